"""The engine's command line on each node of a multi-node, tensor-parallel vLLM."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kimi_runbook.environment import looks_secret, secret_options
from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields

DEFAULT_PORT = 8000
"""vLLM's port for the API."""

DEFAULT_MASTER_PORT = 29501
"""vLLM's default of --master-port."""

_KEYS = (
    *("image", "model", "served_model_name", "tensor_parallel_size", "nnodes", "node_rank", "master_addr"),
    *("master_port", "port", "host_ip", "block_size", "prefix_caching", "extra_args", "env"),
)
# Options composed here: given again as extra arguments they would contradict the inventory's variables.
_COMPOSED = {
    *("--model", "--served-model-name", "--tensor-parallel-size", "-tp", "--nnodes", "-n", "--node-rank", "-r"),
    *("--master-addr", "--master-port", "--port", "--headless", "--block-size", "--enable-prefix-caching"),
    *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
}


# Options of docker run that have a variable of their own.
_DOCKER_COMPOSED = {"-e", "--env", "--env-file"}
_NEXT_STEP = "Correct the engine's variables in the inventory."
_ENV_FILE_STEP = (
    "Take it out of the inventory, write NAME=value into a file on each host that only root can read, and name that "
    "file as engine_env_file."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one node runs.

    Attributes:
        argv: Arguments after the image's entry point, which is ``vllm serve``.
        env: Environment of the container.
        image: Reference by digest.
        port: Port of the API; on a headless node nothing listens there.
        headless: Whether the node serves no API.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    image: str
    port: int
    headless: bool

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {**asdict(self), "argv": list(self.argv)}

    @classmethod
    def from_json(cls, data: Mapping[str, object], source: str = "launch") -> Launch:
        """Read the JSON form."""
        root = Fields(data, source)
        return cls(
            argv=root.texts("argv"),
            env=root.text_map("env"),
            image=root.text("image"),
            port=root.integer("port"),
            headless=root.flag("headless", False),
        )


def compose(spec: Mapping[str, object]) -> Launch:
    """Return the launch of one node.

    Args:
        spec: ``image`` (by digest), ``model`` (path or name), ``served_model_name``, ``tensor_parallel_size`` (GPUs
            over all nodes), ``nnodes``, ``node_rank``, ``master_addr`` (the head; needed with more than one node),
            ``master_port``, ``port``, ``host_ip`` (this node's own address, becomes VLLM_HOST_IP), ``block_size``
            (tokens; left to the engine when absent), ``prefix_caching`` (default true; always passed on, since
            vLLM's default changed between 0.27 and 0.28), ``extra_args`` (list), ``env``.

    Raises:
        RunbookError: a key is missing, unknown or of the wrong type, ranks and sizes do not fit, an extra argument
            repeats a composed one, the image is not pinned, or a variable or argument would carry a secret: a launch
            is written to files and reports.
    """
    root = Fields(spec, "engine launch", _NEXT_STEP)
    root.refuse_unknown(_KEYS)
    image, model = root.text("image"), root.text("model")
    if not re.fullmatch(r".+@sha256:[0-9a-f]{64}", image):
        raise _wrong("image", image, "a reference by digest")
    nodes, rank = root.optional_integer("nnodes") or 1, root.optional_integer("node_rank") or 0
    tensor = root.integer("tensor_parallel_size")
    if not 0 <= rank < nodes:
        raise _wrong("node_rank", str(rank), f"0 to {nodes - 1}")
    if tensor < 1 or tensor % nodes:
        raise _wrong("tensor_parallel_size", str(tensor), f"a multiple of the {nodes} nodes")
    port = _port(root, "port", DEFAULT_PORT)
    headless = rank > 0
    argv = [model, "--served-model-name", root.text("served_model_name"), "--tensor-parallel-size", str(tensor)]
    argv += _cluster(root, nodes, rank)
    argv += ["--headless"] if headless else ["--port", str(port)]
    block_size = root.optional_integer("block_size")
    if block_size is not None:
        if block_size < 1:
            raise _wrong("block_size", str(block_size), "tokens per block, at least 1")
        argv += ["--block-size", str(block_size)]
    argv.append("--enable-prefix-caching" if root.flag("prefix_caching", True) else "--no-enable-prefix-caching")
    argv.append("--enable-prompt-tokens-details")
    argv += _extra(root)
    return Launch(argv=tuple(argv), env=_env(root), image=image, port=port, headless=headless)


def docker_argv(  # noqa: PLR0913 - one keyword per group of docker options, none of them optional in a service
    launch: Launch,
    *,
    container: str,
    mounts: Sequence[Mapping[str, object]],
    devices: Sequence[str],
    ulimits: Sequence[str],
    ipc: str,
    docker_args: Sequence[str],
    env_file: str | None = None,
) -> list[str]:
    """Return the whole ``docker run`` command of one node.

    Args:
        launch: What the container runs.
        container: Its name.
        mounts: Bind mounts: ``source``, ``target`` (default: the source), ``read_only`` (default true). A source
            that is missing makes docker fail instead of creating a directory in its place.
        devices: Device paths or CDI names.
        ulimits: As ``--ulimit`` takes them, e.g. ``memlock=-1``.
        ipc: As ``--ipc`` takes it, ``host`` for shared memory between workers.
        docker_args: Further options of ``docker run``.
        env_file: Absolute path, on the host, of a file with more environment as ``NAME=value`` lines: the place for
            secrets. What the launch sets itself wins over it.

    Raises:
        RunbookError: a mount or the file is no absolute path, or docker_args set environment.
    """
    if env_file and not env_file.startswith("/"):
        raise _wrong("env_file", env_file, "an absolute path on the host")
    repeated = sorted({argument.partition("=")[0] for argument in docker_args} & _DOCKER_COMPOSED)
    if repeated:
        raise _wrong("docker_args", ", ".join(repeated), "environment in engine_extra_env or engine_env_file only")
    argv = ["/usr/bin/docker", "run", "--rm", "--name", container]
    argv += ["--pull", "never"]  # staged beforehand: a start waits for no network, and runs nothing unpinned
    argv += ["--network", "host", "--ipc", ipc]
    for ulimit in ulimits:
        argv += ["--ulimit", ulimit]
    for device in devices:
        argv += ["--device", device]
    for mount in mounts:
        argv += ["--mount", _mount(mount)]
    if env_file:
        argv += ["--env-file", env_file]
    for name, value in launch.env.items():
        argv += ["--env", f"{name}={value}"]
    return [*argv, *docker_args, launch.image, *launch.argv]


def same_arguments(actual: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a container's arguments are the wanted ones; docker puts the entry point's own ``serve`` before them."""
    before = len(actual) - len(wanted)
    return before >= 0 and list(actual[before:]) == list(wanted) and list(actual[:before]) in ([], ["serve"])


def _cluster(root: Fields, nodes: int, rank: int) -> list[str]:
    if nodes == 1:
        return []
    address = root.text("master_addr")
    port = _port(root, "master_port", DEFAULT_MASTER_PORT)
    return [
        *("--nnodes", str(nodes), "--node-rank", str(rank)),
        *("--master-addr", address, "--master-port", str(port)),
    ]


def _port(root: Fields, key: str, default: int) -> int:
    value = root.optional_integer(key)
    port = default if value is None else value
    if not 0 < port < 65536:
        raise _wrong(key, str(port), "a port, 1 to 65535")
    return port


def _extra(root: Fields) -> tuple[str, ...]:
    extra = root.texts("extra_args")
    repeated = sorted({argument.partition("=")[0] for argument in extra} & _COMPOSED)
    if repeated:
        raise _wrong("extra_args", ", ".join(repeated), "only options that have no variable of their own")
    secret = secret_options(extra)
    if secret:
        raise _wrong("extra_args", ", ".join(secret), "no secret in a launch (VLLM_API_KEY, HF_TOKEN)", _ENV_FILE_STEP)
    return extra


def _env(root: Fields) -> dict[str, str]:
    env = root.text_map("env")
    host_ip = root.text("host_ip")
    try:
        ipaddress.ip_address(host_ip)
    except ValueError:
        raise _wrong("host_ip", host_ip, "this node's own address") from None
    if env.get("VLLM_HOST_IP", host_ip) != host_ip:
        raise _wrong("env", f"VLLM_HOST_IP={env['VLLM_HOST_IP']}", f"host_ip, {host_ip}")
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise _wrong("env", repr(name), "names of letters, digits and underscores")
        if looks_secret(name):
            raise _wrong("env", f"{name}, whose value looks like a secret", "no secret in a launch", _ENV_FILE_STEP)
    return {**env, "VLLM_HOST_IP": host_ip}


def _mount(mount: Mapping[str, object]) -> str:
    fields = Fields(mount, "engine mounts", "Correct the engine's mounts in the inventory.")
    fields.refuse_unknown(("source", "target", "read_only"))
    source = fields.text("source")
    target = fields.optional_text("target") or source
    for path in (source, target):
        if not path.startswith("/") or "," in path or '"' in path:
            raise _wrong("mounts", path, "an absolute path without commas and quotes")
    suffix = ",readonly" if fields.flag("read_only", True) else ""
    return f"type=bind,source={source},target={target}{suffix}"


def _wrong(key: str, observed: str, expected: str, next_step: str = _NEXT_STEP) -> RunbookError:
    return RunbookError(where=f"engine launch: {key}", observed=observed, expected=expected, next_step=next_step)
