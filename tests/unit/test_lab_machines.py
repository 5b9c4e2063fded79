import io
import tarfile
from dataclasses import replace

from lab.docker import list_arguments, remove_arguments
from lab.dockerd import OwnEngine, is_engine
from lab.hosts import apt_source, prepare_script
from lab.keys import known_hosts, ssh_config
from lab.machines import File, Spec, archive, create_arguments
from lab.settings import HOSTS, places

SPEC = Spec(machine=HOSTS[0], image="kimi-lab/host:1", files={"/etc/x": File(b"1")}, prepared_from="a")


def value_of(arguments: list[str], option: str) -> list[str]:
    return [arguments[at + 1] for at, argument in enumerate(arguments) if argument == option]


def test_create_arguments() -> None:
    arguments = create_arguments(HOSTS[0], "image", "spec")
    assert value_of(arguments, "--name") == ["k3-a"]
    assert value_of(arguments, "--ip") == ["172.31.240.11"]
    assert value_of(arguments, "--label") == ["kimi-runbook.lab=1", "kimi-runbook.lab.spec=spec"]
    assert "kimi-lab-k3-a-docker:/var/lib/docker" in value_of(arguments, "--volume")
    assert value_of(arguments, "--add-host") == ["kimi-lab-depot:172.31.240.10", "k3-b:172.31.240.12"]
    assert "--privileged" not in arguments
    assert not {"SYS_RESOURCE", "SYS_MODULE", "SYS_TIME"} & set(value_of(arguments, "--cap-add"))
    assert arguments[-2:] == ["image", "/lib/systemd/systemd"]


def test_spec_digest_follows_every_input() -> None:
    others = [
        replace(SPEC, image="kimi-lab/host:2"),
        replace(SPEC, prepared_from="b"),
        replace(SPEC, machine=HOSTS[1]),
        replace(SPEC, files={"/etc/x": File(b"2")}),
        replace(SPEC, files={"/etc/x": File(b"1", 0o600)}),
        replace(SPEC, files={"/etc/y": File(b"1")}),
    ]
    assert len({spec.digest() for spec in (SPEC, *others)}) == len(others) + 1
    assert replace(SPEC).digest() == SPEC.digest()


def test_archive_brings_directories_and_keeps_roots_own_closed() -> None:
    data = archive({"/root/.ssh/authorized_keys": File(b"key", 0o600), "/etc/lab/x": File(b"1")})
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        modes = {member.name: member.mode for member in tar.getmembers()}
    assert modes == {
        "etc": 0o755,
        "etc/lab": 0o755,
        "etc/lab/x": 0o644,
        "root": 0o700,
        "root/.ssh": 0o700,
        "root/.ssh/authorized_keys": 0o600,
    }


def test_down_asks_for_the_label_and_nothing_else() -> None:
    assert list_arguments("volume") == ["volume", "ls", "--quiet", "--filter", "label=kimi-runbook.lab=1"]
    assert "--all" in list_arguments("container")
    assert remove_arguments("container", ["a", "b"]) == ["container", "rm", "--force", "--volumes", "a", "b"]
    assert remove_arguments("network", ["n"]) == ["network", "rm", "n"]


def test_own_engine_is_told_by_its_pid_file(tmp_path) -> None:
    own = OwnEngine(tmp_path)
    assert is_engine(own.argv(), own.pid_file)
    assert not is_engine(["dockerd", "--pidfile", "/var/run/docker.pid"], own.pid_file)
    assert not is_engine(["python3", str(own.pid_file)], own.pid_file)
    assert not is_engine([], own.pid_file)


def test_a_stale_pid_file_names_no_process(tmp_path) -> None:
    own = OwnEngine(tmp_path)
    own.pid_file.write_text("1\n")  # a process, but no dockerd
    assert own.pid() is None


def test_ssh_config_and_known_hosts(tmp_path) -> None:
    text = ssh_config(tmp_path)
    assert text.count("StrictHostKeyChecking yes") == 2
    assert "Host k3-b\n  HostName 172.31.240.12\n" in text
    assert f'UserKnownHostsFile "{tmp_path}/known_hosts"' in text
    keys = {machine.name: ("private", f"ssh-ed25519 AAAA{machine.name} comment\n") for machine in HOSTS}
    assert known_hosts(keys).splitlines()[0] == "172.31.240.11,k3-a ssh-ed25519 AAAAk3-a"


def test_prepare_script_leaves_the_vendor_source_behind_nowhere() -> None:
    script = prepare_script(["nvidia-driver-cuda=1"])
    assert "rm -r /run/kimi-lab-sources" in script
    assert "/etc/apt/sources.list.d/cuda" not in script
    assert "Signed-By: " in apt_source("cuda")


def test_places_follow_environment_and_user(tmp_path) -> None:
    assert places(tmp_path, {"KIMI_LAB_HOME": "/x"}, is_root=True).home.as_posix() == "/x"
    assert places(tmp_path, {}, is_root=True).home.as_posix() == "/var/cache/kimi-runbook-lab"
    assert places(tmp_path, {}, is_root=False).home.parts[-2:] == (".cache", "kimi-runbook-lab")
