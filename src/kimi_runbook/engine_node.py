"""What one node of the engine gets: settings files, launch, container command, unit; and how far it runs as told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_runbook import interconnect
from kimi_runbook.environment import differing
from kimi_runbook.errors import RunbookError
from kimi_runbook.launch import compose, docker_argv
from kimi_runbook.units import render_engine_unit
from kimi_runbook.wishes import content_sha256, units

Json = Mapping[str, Any]

# The unit counts as started once docker runs, so this covers removing a stale container, not loading a model.
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
_DMABUF = "NCCL_DMABUF_ENABLE"


def node_settings(
    profile: str,
    interface: str,
    hcas: Sequence[str] = (),
    variables: Mapping[str, str | None] | None = None,
    dmabuf: Json | None = None,
) -> dict[str, Any]:
    """Return the interconnect settings of a node by carrier: ``nccl_conf``, ``ucx_conf`` (texts), ``environment``.

    Args:
        profile: As :func:`interconnect.settings` takes it; so are interface, hcas and variables.
        interface: The network interface.
        hcas: RDMA ports.
        variables: Site values on top of the profile and of the ladder's.
        dmabuf: Where the dma-buf ladder ended (dmabuf.Decision in its JSON form); None where there is none.

    Raises:
        RunbookError: The profile is unknown, its settings contradict each other, or dma-buf is switched off though the
            ladder does not end there.
    """
    ladder = dmabuf or {}
    merged = {**ladder.get("settings", {}), **(variables or {})}
    found = interconnect.settings(profile, interface=interface, hcas=hcas, variables=merged)
    last = ladder.get("settings", {}).get(_DMABUF) == "0"
    if not last and any(setting.name == _DMABUF and setting.value == "0" for setting in found):
        ended = ladder.get("reason") or "no rung, since the profile has no RDMA ports"
        raise RunbookError(
            where=f"interconnect profile {profile}",
            observed=f"{_DMABUF}=0; the dma-buf ladder ends at {ended}",
            expected="each rung before it tested and failed (interconnect_dmabuf_tests), and nvidia_peermem loaded",
            next_step="Take it out of interconnect_variables, or record the tests: docs/checks/network.md.",
        )
    refuse_contradictions(found, {}, profile, peermem_loaded=last)
    return {
        "nccl_conf": interconnect.render_nccl_conf(found),
        "ucx_conf": interconnect.render_ucx_conf(found),
        "environment": interconnect.environment(found),
    }


def settings_files(settings: Mapping[str, str], paths: Sequence[str]) -> list[dict[str, str]]:
    """Return the file wishes of a node's interconnect settings.

    Args:
        settings: As :func:`node_settings` returns them.
        paths: Where NCCL's and UCX's file go, in that order.
    """
    contents = (settings["nccl_conf"], settings["ucx_conf"])
    return [{"path": path, "mode": "0644", "content": content} for path, content in zip(paths, contents, strict=True)]


def refuse_contradictions(
    found: Sequence[interconnect.Setting],
    engine_environment: Mapping[str, str],
    profile: str,
    *,
    peermem_loaded: bool | None = None,
) -> None:
    """Raise RunbookError where settings contradict each other or a name is set in two places."""
    problems = interconnect.lint(
        found, engine_environment=engine_environment, profile=profile, peermem_loaded=peermem_loaded
    )
    stops = [problem.message for problem in problems if problem.severity == "stop"]
    if stops:
        raise RunbookError(
            where=f"interconnect profile {profile}",
            observed="; ".join(stops),
            expected="settings that do not contradict each other",
            next_step="Correct interconnect_variables or engine_extra_env in the inventory.",
        )


def node_launch(spec: Json, container: Json) -> dict[str, Any]:
    """Return a node's launch as JSON values: ``argv``, ``env``, ``image``, ``port``, ``headless``, ``docker_argv``.

    Args:
        spec: As :func:`kimi_runbook.launch.compose` takes it.
        container: ``name``, ``devices``, ``ulimits``, ``docker_args``, ``mounts`` (paths, mounted read-only at the
            same place) and, optional, ``env_file`` (path on the host of a file with secrets; empty means none).
    """
    launch = compose(spec)
    command = docker_argv(
        launch,
        container=container["name"],
        mounts=[{"source": path} for path in container["mounts"]],
        devices=container["devices"],
        ulimits=container["ulimits"],
        ipc="host",
        docker_args=container["docker_args"],
        env_file=container.get("env_file") or None,
    )
    return {**launch.to_json(), "docker_argv": command}


def node_wish(spec: Json, container: Json, places: Json) -> dict[str, Any]:
    """Return all that a node gets of the engine and is held to: ``launch``, ``files`` and ``expected``.

    Args:
        spec: As :func:`node_launch` takes it.
        container: As :func:`node_launch` takes it.
        places: ``unit`` (systemd unit), ``launch_file`` (path on the host of what was composed, kept as evidence),
            ``restart`` (the unit's Restart=) and ``ports`` (TCP ports the ranks open, the API's first).
    """
    launch = node_launch(spec, container)
    files = [
        {
            "path": places["launch_file"],
            "mode": "0644",
            "content": json.dumps(launch, indent=2, sort_keys=True) + "\n",
        },
        {
            "path": f"/etc/systemd/system/{places['unit']}",
            "mode": "0644",
            "content": node_unit(launch, container["name"], places["restart"]),
        },
    ]
    engine = {
        "container": container["name"],
        "unit": places["unit"],
        "port": places["ports"][0],
        "ports": list(places["ports"]),
        "serves_http": not launch["headless"],
        "args": launch["argv"],
        "env": launch["env"],
    }
    expected = {"files": files, "units": units([places["unit"]]), "engine": engine}
    return {"launch": launch, "files": files, "expected": expected}


def node_unit(launch: Json, container: str, restart: str) -> str:
    """Return the text of the node's systemd unit."""
    role = "headless rank" if launch["headless"] else "head"
    return render_engine_unit(
        launch["docker_argv"],
        description=f"vLLM engine ({role})",
        container=container,
        stop_timeout_s=STOP_TIMEOUT_S,
        start_timeout_s=START_TIMEOUT_S,
        restart=restart,
    )


def held_reference(image: Json | None, reference: str) -> str:
    """Return the name under which a host holds an image's digest; the reference itself where it holds none yet.

    An image from a mirror or from the stage keeps its digest and has another repository's name, and Docker finds it by
    that name only.

    Args:
        image: ``image`` of the snapshot.
        reference: ``repository@sha256:...`` as locked.
    """
    names = list((image or {}).get("repo_digests") or ())
    digest = reference.partition("@")[2]
    if not digest or reference in names:
        return reference
    return next((name for name in sorted(names) if name.partition("@")[2] == digest), reference)


def proof_argv(launch: Json, container: str, library: str, symbol: str) -> list[str]:
    """Return the service's own ``docker run`` with Python in place of the engine, to call one function of a library.

    Args:
        launch: As :func:`node_launch` returns it.
        container: The service's container name; the proof's ends in ``-proof``.
        library: As the dynamic loader is asked for it, ``libcuda.so.1``.
        symbol: A function from int to int that returns 0 for 0, ``cuInit``.
    """
    argv = list(launch["docker_argv"])
    options = argv[: len(argv) - len(launch["argv"]) - 1]
    options[options.index("--name") + 1] = f"{container}-proof"
    code = (
        "import ctypes, sys\nfunction = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])\nprint('result', function(0))\n"
    )
    return [*options, "--entrypoint", "python3", launch["image"], "-c", code, library, symbol]


def drift(container: Json | None, launch: Json, files: Sequence[Json] = ()) -> str:
    """Return in one phrase how the running container differs from its launch; empty when it does not.

    Args:
        container: ``engine.container`` of the snapshot, None when none runs.
        launch: As :func:`node_launch` returns it.
        files: Settings files the container must see, each with ``path`` and ``content``. A file replaced on the host
            is still the old one inside a container that mounted it before.
    """
    if container is None:
        return "no container runs"
    argv = list(launch["argv"])
    if container["image_reference"] != launch["image"]:
        return f"image is {container['image_reference']}, expected {launch['image']}"
    if list(container["args"])[-len(argv) :] != argv:
        return "arguments differ from the launch"
    wrong = differing(container["env"], launch["env"])
    if wrong:
        return f"environment differs: {', '.join(wrong)}"
    stale = [file["path"] for file in files if container["files"].get(file["path"]) != content_sha256(file["content"])]
    return f"settings inside the container are older: {', '.join(stale)}" if stale else ""
