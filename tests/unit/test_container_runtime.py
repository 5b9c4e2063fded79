"""The role of the container runtime: daemon.json, CDI and the devices' survival (C37 to C44)."""

import json
from pathlib import Path
from typing import Any

import cdi_spec
import device_survival
import docker_daemon_config
import fabric_probe
import pytest
import yaml
from host_tree import Tree
from node_programs import Programs, call

DRIVER, OLD = "580.178.04", "570.133.20"
SPEC = "/var/run/cdi/nvidia.yaml"
LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so.{version}"
UUID = "GPU-5f2c1d3e-0000-1111-2222-33334444555{n}"


def specification(gpus: int = 2, version: str = DRIVER, extra: str = "") -> str:
    lines = ["---", "cdiVersion: 0.7.0", "kind: nvidia.com/gpu", "devices:"]
    for name in [*map(str, range(gpus)), *(UUID.format(n=n) for n in range(gpus)), "all"]:
        lines += [f'  - name: "{name}"', "    containerEdits:", "      deviceNodes:", "        - path: /dev/nvidia0"]
    library = LIBRARY.format(version=version)
    lines += ["containerEdits:", "  mounts:", f"    - hostPath: {library}", f"      containerPath: {library}", extra]
    return "\n".join(lines) + "\n"


def host(tmp_path: Path, made: str | None = None, *, docker: str = "28.1.1", toolkit: str = "1.20.0") -> Tree:
    """Return a host with two GPUs and driver DRIVER, whose nvidia-ctk makes this specification."""
    tree = Tree(tmp_path / "host")
    tree.put(
        "/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release\n"
    )
    tree.put("/dev/nvidia0")
    tree.put(LIBRARY.format(version=DRIVER))
    tree.say(
        "nvidia-smi -L",
        "GPU 0: NVIDIA B300 (UUID: a)\n  MIG 1g.34gb Device 0: (UUID: b)\nGPU 1: NVIDIA B300 (UUID: c)\n",
    )
    tree.say("nvidia-ctk --version", f"NVIDIA Container Toolkit CLI version {toolkit}\ncommit: x\n")
    tree.say("nvidia-ctk cdi generate", specification() if made is None else made)
    tree.say("docker version", f"{docker}\n", rc=0 if docker else 1)
    tree.say("systemctl show --value --property ActiveState", "active\n")
    return tree


def run(tree: Tree, tmp_path: Path, **params: Any) -> tuple[int, dict[str, Any]]:
    return call("cdi_spec", Programs(tmp_path / "bin"), root=str(tree.root), **params)


def test_a_specification_is_written_and_then_left_alone(tmp_path: Path) -> None:
    tree = host(tmp_path)
    code, told = run(tree, tmp_path)
    assert (code, told["changed"], told["applicable"]) == (0, True, True)
    written = tree.root / SPEC.lstrip("/")
    assert written.read_text() == specification() and written.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in written.parent.iterdir()] == ["nvidia.yaml"], "nothing half written is left"
    assert run(tree, tmp_path)[1]["changed"] is False


def test_c40_a_stale_one_is_replaced(tmp_path: Path) -> None:
    tree = host(tmp_path)
    tree.put(SPEC, specification(version=OLD))
    _, told = run(tree, tmp_path)
    assert told["changed"] and OLD in told["diff"]["before"] and OLD not in told["diff"]["after"]


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        pytest.param("", "it names 0 GPUs, the driver shows 2", id="empty"),
        pytest.param(specification(gpus=1), "it names 1 GPUs, the driver shows 2", id="one-GPU-short"),
        pytest.param(specification(version=OLD), f"it names libraries of {OLD}, {DRIVER} is loaded", id="C40-other"),
        pytest.param(
            specification(extra="    - hostPath: /usr/bin/nvidia-gone"), "not there: /usr/bin/nvidia-gone", id="path"
        ),
    ],
)
def test_a_specification_that_is_wrong_replaces_nothing(tmp_path: Path, made: str, wrong: str) -> None:
    tree = host(tmp_path, made)
    tree.put(SPEC, "as it was\n")
    code, told = run(tree, tmp_path)
    assert code == 1 and wrong in told["msg"] and "left as it is" in told["msg"]
    assert (tree.root / SPEC.lstrip("/")).read_text() == "as it was\n"


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    tree = host(tmp_path)
    assert run(tree, tmp_path, check=True)[1]["changed"] is True
    assert not (tree.root / "var").exists()


@pytest.mark.parametrize(
    ("docker", "toolkit", "reason"),
    [
        ("20.10.24", "1.20.0", "Docker 20.10, CDI needs 26.1"),
        ("26.0.2", "1.20.0", "Docker 26.0, CDI needs 26.1"),
        ("28.1.1", "1.17.8", "toolkit 1.17, CDI needs 1.18"),
        ("", "1.20.0", "no Docker answers, CDI needs 26.1"),
    ],
)
def test_too_old_a_host_is_left_alone_unless_cdi_is_required(
    tmp_path: Path, docker: str, toolkit: str, reason: str
) -> None:
    tree = host(tmp_path, docker=docker, toolkit=toolkit)
    _, told = run(tree, tmp_path)
    assert (told["changed"], told["applicable"], told["reason"]) == (False, False, reason)
    code, told = run(tree, tmp_path, mode="required")
    assert code == 1 and reason in told["msg"]


def test_one_that_is_there_is_kept_right_whatever_docker_it_is(tmp_path: Path) -> None:
    tree = host(tmp_path, docker="20.10.24")
    tree.put(SPEC, specification(version=OLD))
    assert run(tree, tmp_path)[1]["changed"] is True
    assert OLD not in (tree.root / SPEC.lstrip("/")).read_text()


def test_c40_foreign_files_are_named_and_left_alone(tmp_path: Path) -> None:
    tree = host(tmp_path)
    mine = tree.put("/etc/cdi/nvidia.yaml", specification(version=OLD))
    tree.put("/etc/cdi/fine.yaml", specification())
    _, told = run(tree, tmp_path)
    assert list(told["foreign"]) == ["/etc/cdi/nvidia.yaml"] and OLD in told["foreign"]["/etc/cdi/nvidia.yaml"]
    assert mine.read_text() == specification(version=OLD)


def test_c38_a_refresh_in_its_start_limit_is_taken_up_again(tmp_path: Path) -> None:
    tree = host(tmp_path)
    tree.say("systemctl show --value --property ActiveState nvidia-cdi-refresh.path", "failed\n")
    tree.say("systemctl reset-failed")
    tree.say("systemctl start")
    assert run(tree, tmp_path)[1]["refreshed"] == ["nvidia-cdi-refresh.path"]


def test_c38_the_refresh_comes_after_the_driver_and_without_a_limit(project_root: Path) -> None:
    rows = yaml.safe_load((project_root / "roles/container_runtime/vars/main.yml").read_text(encoding="utf-8"))
    (dropin,) = rows["__container_runtime_unit_files"]
    assert "After=systemd-modules-load.service nvidia-persistenced.service" in dropin["content"]
    assert "StartLimitIntervalSec=0" in dropin["content"]


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        (["0", "1", "all"], 2),
        ([UUID.format(n=0), UUID.format(n=1), "all"], 2),
        (["0", "1", UUID.format(n=0), UUID.format(n=1), "all"], 2),
        (["0:0", "0:1", "1:0", "all"], 2),
        (["all"], 0),
        ([], 0),
    ],
)
def test_gpus_are_counted_by_index_or_uuid(devices: list[str], count: int) -> None:
    assert cdi_spec.gpus_of(devices) == count


def test_a_library_with_a_number_of_its_own_is_no_other_driver(tmp_path: Path) -> None:
    """libnvidia-egl-gbm.so.1.1.2 comes with every driver."""
    tree = Tree(tmp_path)
    text = specification(extra="    - hostPath: /usr/lib/x86_64-linux-gnu/libnvidia-egl-gbm.so.1.1.2")
    assert fabric_probe.cdi_facts(tree.probe(), text)["versions"] == [DRIVER]


# daemon.json.

DOCKERD = 'case "$*" in *--help*) echo "{help}";; *--validate*) cp "$3" $DIR/validated; {answer};; esac'


def docker(
    tmp_path: Path, *, validate: str = "--validate", answer: str = "true", unit: str = "", engine: str = "inactive"
):
    programs = Programs(tmp_path / "bin")
    programs.put("dockerd", DOCKERD.format(help=validate, answer=answer))
    programs.put(
        "systemctl",
        f'case "$*" in *ExecStart*) echo "ExecStart={{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd {unit} ; }}";; '
        f"*) echo {engine};; esac",
    )
    return programs


def merge(programs: Programs, path: Path, **params: Any) -> tuple[int, dict[str, Any]]:
    return call("docker_daemon_config", programs, path=str(path), **{"settings": {"features": {"cdi": True}}, **params})


def test_c42_what_a_site_set_stays_and_a_backup_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text('{"mtu": 9000, "features": {"buildkit": true}}', encoding="utf-8")
    programs = docker(tmp_path)
    code, told = merge(programs, path)
    assert (code, told["changed"]) == (0, True)
    merged = {"mtu": 9000, "features": {"buildkit": True, "cdi": True}}
    assert json.loads(path.read_text()) == merged == json.loads((programs.folder / "validated").read_text())
    assert json.loads(Path(told["backup_file"]).read_text()) == {"mtu": 9000, "features": {"buildkit": True}}


def test_c44_a_second_run_asks_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text('{ "features":   {"cdi":true} }', encoding="utf-8")
    programs = docker(tmp_path, answer="exit 1", engine="active")
    assert merge(programs, path, drained_units=["kimi-engine.service"])[1]["changed"] is False
    assert path.read_text() == '{ "features":   {"cdi":true} }'


@pytest.mark.parametrize("state", ["active", "activating"])
def test_c42_nothing_is_written_under_a_running_engine(tmp_path: Path, state: str) -> None:
    path = tmp_path / "daemon.json"
    path.write_text("{}", encoding="utf-8")
    programs = docker(tmp_path, engine=state)
    code, told = merge(programs, path, drained_units=["kimi-engine.service"])
    assert code == 1 and "kimi-engine.service runs, expected it stopped" in told["msg"]
    assert path.read_text() == "{}"
    assert merge(programs, path, check=True, drained_units=["kimi-engine.service"])[1]["changed"] is True


def test_what_dockerd_refuses_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    code, told = merge(docker(tmp_path, answer="echo unable to configure >&2; exit 1"), path)
    assert code == 1 and "unable to configure" in told["msg"] and not path.exists()


def test_a_docker_that_cannot_validate_is_not_asked(tmp_path: Path) -> None:
    programs = docker(tmp_path, validate="--version", answer="exit 1")
    assert merge(programs, tmp_path / "daemon.json")[1]["changed"] is True
    assert not (programs.folder / "validated").exists()


@pytest.mark.parametrize(
    ("settings", "options", "both"),
    [
        ({"hosts": ["tcp://0.0.0.0:1"]}, "-H fd:// --containerd=/run/x", {"hosts": "-H"}),
        ({"features": {"cdi": True}}, "-H fd:// --containerd=/run/x", {}),
        ({"runtimes": {}}, "--add-runtime=nvidia=/usr/bin/nvidia-container-runtime", {"runtimes": "--add-runtime"}),
        ({"data-root": "/srv"}, "", {}),
    ],
)
def test_a_key_the_unit_sets_too_is_found(settings: dict[str, Any], options: str, both: dict[str, str]) -> None:
    """NVIDIA/nvidia-container-toolkit#631: dockerd refuses to start with both."""
    assert docker_daemon_config.excluded(settings, f"argv[]=/usr/bin/dockerd {options} ;") == both


def test_a_key_set_twice_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    code, told = merge(docker(tmp_path, unit="-H fd://"), path, settings={"hosts": ["fd://"]})
    assert code == 1 and "hosts (-H of docker.service)" in told["msg"] and not path.exists()


# The daemon-reload.

LOSES = (
    'if [ -f $DIR/reloaded ]; then echo "Failed to initialize NVML: Unknown Error"; exit {code}; fi; echo "GPU 0: B300"'
)


def runtime(tmp_path: Path, answer: str) -> Programs:
    programs = Programs(tmp_path / "bin")
    programs.put("docker", f'echo "$*" >> $DIR/docker.said\nif [ $1 = exec ]; then {answer}; fi')
    programs.put("systemctl", "touch $DIR/reloaded; echo $1 >> $DIR/systemctl.said")
    return programs


def survive(programs: Programs) -> tuple[int, dict[str, Any]]:
    return call("device_survival", programs, image="engine@sha256:1", devices=["nvidia.com/gpu=all"])


def test_c37_devices_that_survive(tmp_path: Path) -> None:
    programs = runtime(tmp_path, 'echo "GPU 0: B300"')
    code, told = survive(programs)
    assert (code, told["changed"], told["answer"]) == (0, False, "GPU 0: B300")
    said = programs.said("docker.said")
    assert [line.split()[0] for line in said] == ["rm", "run", "exec", "exec", "rm"]
    assert "--device nvidia.com/gpu=all" in said[1] and "--pull never" in said[1]
    assert programs.said("systemctl.said") == ["daemon-reload"]


@pytest.mark.parametrize("status", [0, 255])
def test_c37_devices_that_are_lost_at_a_daemon_reload(tmp_path: Path, status: int) -> None:
    programs = runtime(tmp_path, LOSES.format(code=status))
    code, told = survive(programs)
    assert code == 1 and "after daemon-reload" in told["msg"] and "Unknown Error" in told["msg"]
    assert programs.said("docker.said")[-1].startswith("rm --force"), "the container is removed all the same"


def test_a_container_that_does_not_start_is_no_lost_device(tmp_path: Path) -> None:
    programs = runtime(tmp_path, "true")
    programs.put("docker", '[ $1 != run ] || { echo "could not select device driver" >&2; exit 125; }')
    code, told = survive(programs)
    assert code == 1 and "start of the container: exit 125: could not select device driver" in told["msg"]


def test_a_docker_that_hangs_is_left(tmp_path: Path) -> None:
    programs = runtime(tmp_path, "sleep 60")
    params = {"name": "x", "timeout_s": 1, "devices": [], "docker_args": [], "image": "i", "probe": ["true"]}
    code, told = call("device_survival", programs, **params)
    assert code == 1 and "before daemon-reload: no answer within 1 s" in told["msg"]
    assert device_survival.LostError.__doc__
