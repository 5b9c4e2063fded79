"""The host's answers, from a tree of files and canned command output."""

import json
import subprocess
import sys
from pathlib import Path

import container_probe
import driver_probe
import host_probe
import network_probe
import package_probe
import pytest
import redaction
import unit_probe

OPEN_580 = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.178.04  Release Build  (dvs-builder)\n"
PROPRIETARY_570 = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sat Feb  1 00:00:00 UTC 2025\n"


class Canned:
    """Stands for subprocess.run: answers by program name, FileNotFoundError for the rest."""

    def __init__(self, answers):
        self.answers = answers

    def __call__(self, argv, **_):
        for start, (rc, out) in self.answers.items():
            if " ".join(argv).startswith(start):
                if rc == "timeout":
                    raise subprocess.TimeoutExpired(argv, 10)
                return subprocess.CompletedProcess(argv, rc, out, "")
        raise FileNotFoundError(argv[0])


def probe(root: Path, **answers) -> host_probe.Probe:
    return host_probe.Probe(root=root, run=Canned({key.replace("_", " "): value for key, value in answers.items()}))


def put(root: Path, path: str, text: str) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "version", "flavour"),
    [
        pytest.param(OPEN_580, "580.178.04", "open", id="open"),
        pytest.param(PROPRIETARY_570, "570.133.20", "proprietary", id="proprietary"),
    ],
)
def test_driver_reads_the_loaded_version(tmp_path, line, version, flavour):
    put(tmp_path, "/proc/driver/nvidia/version", line)
    seen = driver_probe.driver(probe(tmp_path))
    assert (seen["loaded"], seen["flavour"]) == (version, flavour)


def test_driver_keeps_disk_loaded_and_userspace_apart(tmp_path):
    put(tmp_path, "/proc/driver/nvidia/version", PROPRIETARY_570)
    put(tmp_path, "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.178.04", "")
    (tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.178.04")
    seen = driver_probe.driver(
        host_probe.Probe(
            root=tmp_path,
            run=Canned(
                {
                    "modinfo nvidia": (0, "version:        580.178.04\nlicense:        Dual MIT/GPL\n"),
                    "nvidia-smi": (18, "Failed to initialize NVML: Driver/library version mismatch\n"),
                }
            ),
        )
    )
    assert (seen["on_disk"], seen["loaded"], seen["userspace"]) == ("580.178.04", "570.133.20", "580.178.04")
    assert seen["smi_rc"] == 18
    assert "version mismatch" in seen["smi_message"]


KERNEL = "6.8.0-90-generic"
with_the_library = pytest.mark.skipif(sys.version_info < (3, 11), reason="the library needs Python 3.11")


@pytest.mark.parametrize(
    ("made", "present"),
    [
        pytest.param([], None, id="no-kernel-of-its-own"),
        pytest.param([f"lib/modules/{KERNEL}"], False, id="no-headers"),
        pytest.param([f"lib/modules/{KERNEL}", "lib/modules/0.1-other/build"], False, id="headers-of-another-kernel"),
        pytest.param([f"lib/modules/{KERNEL}/build"], True, id="headers"),
    ],
)
def test_headers_of_the_running_kernel(tmp_path, made, present):
    put(tmp_path, "/proc/sys/kernel/osrelease", f"{KERNEL}\n")
    for folder in made:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    assert driver_probe.driver(probe(tmp_path))["headers_present"] is present


def test_a_link_to_removed_headers_is_no_headers(tmp_path):
    put(tmp_path, "/proc/sys/kernel/osrelease", f"{KERNEL}\n")
    (tmp_path / f"lib/modules/{KERNEL}").mkdir(parents=True)
    (tmp_path / f"lib/modules/{KERNEL}/build").symlink_to(tmp_path / "usr/src/removed")
    assert driver_probe.driver(probe(tmp_path))["headers_present"] is False


@pytest.mark.parametrize(
    ("efi", "answer", "on"),
    [
        pytest.param(True, (0, "SecureBoot enabled\n"), True, id="on"),
        pytest.param(True, (0, "SecureBoot disabled\n"), False, id="off"),
        pytest.param(True, (255, "EFI variables are not supported on this system\n"), None, id="cannot-tell"),
        pytest.param(True, None, None, id="no-mokutil"),
        pytest.param(False, None, False, id="no-efi"),
        pytest.param(False, (255, "EFI variables are not supported on this system\n"), False, id="no-efi-says-mokutil"),
    ],
)
def test_secure_boot(tmp_path, efi, answer, on):
    if efi:
        (tmp_path / "sys/firmware/efi").mkdir(parents=True)
    asked = host_probe.Probe(root=tmp_path, run=Canned({"mokutil --sb-state": answer} if answer else {}))
    seen = driver_probe.driver(asked)
    assert seen["secure_boot"] is on
    assert seen["key_enrolled"] is None  # no key lies on this host


@pytest.mark.parametrize(
    ("key", "answer", "enrolled"),
    [
        pytest.param("/var/lib/dkms/mok.pub", (1, "{} is already enrolled\n"), True, id="enrolled-exits-1"),
        pytest.param("/var/lib/dkms/mok.pub", (0, "{} is not enrolled\n"), False, id="not-enrolled-exits-0"),
        pytest.param("/var/lib/dkms/mok.pub", (1, "{} is already in the enrollment request\n"), False, id="waits"),
        pytest.param("/var/lib/dkms/mok.pub", (1, "unknown option\n"), None, id="cannot-tell"),
        pytest.param("/var/lib/shim-signed/mok/MOK.der", (1, "{} is already enrolled\n"), True, id="ubuntu"),
    ],
)
def test_the_key_counts_only_where_secure_boot_is_on(tmp_path, key, answer, enrolled):
    put(tmp_path, key, "")
    told = (answer[0], answer[1].format(key))
    for state, seen in (("enabled", enrolled), ("disabled", None)):
        answers = {"mokutil --sb-state": (0, f"SecureBoot {state}\n"), f"mokutil --test-key {key}": told}
        assert driver_probe.driver(host_probe.Probe(root=tmp_path, run=Canned(answers)))["key_enrolled"] is seen


@pytest.mark.parametrize(
    ("path", "answers", "runfile"),
    [
        pytest.param(None, {"dpkg-query --search": (1, "")}, False, id="nothing-there"),
        pytest.param("/usr/bin/nvidia-uninstall", {"dpkg-query --search": (1, "")}, True, id="nobody-owns-it"),
        pytest.param("/usr/lib/nvidia/old-uninstall", {"dpkg-query --search": (1, "")}, True, id="in-the-library"),
        pytest.param("/usr/bin/nvidia-uninstall", {"dpkg-query --search": (0, "x: y")}, False, id="a-package-owns-it"),
        pytest.param("/usr/bin/nvidia-uninstall", {"rpm --query --file": (1, "")}, True, id="rpm"),
        pytest.param("/usr/bin/nvidia-uninstall", {}, False, id="nobody-to-ask"),
    ],
)
def test_a_runfile_is_an_uninstaller_no_package_owns(tmp_path, path, answers, runfile):
    if path:
        put(tmp_path, path, "")
    assert driver_probe.driver(host_probe.Probe(root=tmp_path, run=Canned(answers)))["runfile"] is runfile


@with_the_library
def test_what_the_probe_reports_of_a_driver_is_what_the_library_reads(tmp_path):
    from kimi_runbook import host_facts as facts  # noqa: PLC0415 - the probe's other tests run without the library

    assert set(driver_probe.driver(probe(tmp_path))) == set(facts.DriverFacts.__dataclass_fields__)


@with_the_library
def test_probe_and_library_report_the_same_variables():
    from kimi_runbook import environment  # noqa: PLC0415 - the probe's other tests run without the library

    assert environment.STEERING.pattern == redaction.ENGINE_ENV.pattern
    assert environment.SECRET.pattern == redaction.SECRET_NAME.pattern
    assert environment.SECRET.flags == redaction.SECRET_NAME.flags
    assert environment.SECRET_OPTIONS == redaction.SECRET_OPTIONS


def test_secrets_among_arguments_are_not_shown():
    args = ["serve", "--api-key", "s3cret", "--hf-token=s3cret", "--port", "8000"]
    assert redaction.arguments(args) == [
        *("serve", "--api-key", "(not shown)", "--hf-token=(not shown)", "--port", "8000"),
    ]


def test_a_host_without_anything_answers_all_the_same(tmp_path):
    seen = driver_probe.driver(probe(tmp_path))
    assert seen["on_disk"] is None
    assert seen["loaded"] is None
    assert seen["smi_rc"] is None
    assert driver_probe.gpus(probe(tmp_path)) == []
    assert container_probe.engine_container(probe(tmp_path), "kimi-engine", ["/etc/nccl.conf"]) is None


def test_a_hanging_command_is_an_error_and_not_a_hang(tmp_path):
    asked = host_probe.Probe(root=tmp_path, run=Canned({"nvidia-smi": ("timeout", "")}))
    assert driver_probe.gpus(asked) == []
    assert asked.errors == [{"probe": "nvidia-smi", "message": "no answer within 30 s"}]


def test_packages_tell_absent_installed_and_held_apart(tmp_path):
    listing = (
        "docker.io\tii \t20.10\nnvidia-driver-cuda\thi \t580.178.04-1\nnvidia-modprobe\trc \t570-1\nbash\tii \t5\n"
    )
    asked = host_probe.Probe(root=tmp_path, run=Canned({"dpkg-query": (0, listing)}))
    assert package_probe.packages(asked, ["docker.io", "rdma-core"]) == {
        "docker.io": {"version": "20.10", "held": False},
        "rdma-core": None,
        "nvidia-driver-cuda": {"version": "580.178.04-1", "held": True},
    }


def test_units_follow_the_order_they_were_asked_in(tmp_path):
    answer = (
        "LoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
        "LoadState=not-found\nActiveState=inactive\nUnitFileState=\n"
    )
    asked = host_probe.Probe(root=tmp_path, run=Canned({"systemctl show": (0, answer)}))
    assert unit_probe.units(asked, ["docker.service", "nope.service"]) == {
        "docker.service": {"load": "loaded", "active": "active", "enabled": "enabled"},
        "nope.service": {"load": "not-found", "active": "inactive", "enabled": "not-found"},
    }


def test_listening_decodes_both_address_families(tmp_path):
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: {address}:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n"
    put(tmp_path, "/proc/net/tcp", head + row.format(address="0B00A8C0"))
    put(tmp_path, "/proc/net/tcp6", head + row.format(address="00000000000000000000000001000000"))
    (tmp_path / "proc/42/fd").mkdir(parents=True)
    (tmp_path / "proc/42/fd/3").symlink_to("socket:[4711]")
    put(tmp_path, "/proc/42/comm", "nginx\n")
    rows = network_probe.listening(probe(tmp_path), {8000})
    assert [row["address"] for row in rows] == ["192.168.0.11", "::1"]
    assert rows[0]["process"] == "nginx"
    assert network_probe.listening(probe(tmp_path), {9000}) == []


def test_the_container_shows_steering_variables_and_no_secret(tmp_path):
    put(tmp_path, "/proc/77/root/etc/nccl.conf", "NCCL_IB_DISABLE=1\n")
    container = {
        "Id": "abc",
        "Image": "sha256:1",
        "Args": ["serve", "/model"],
        "State": {"Pid": 77, "StartedAt": "2026-11-30T14:00:00Z"},
        "Config": {"Image": "repo@sha256:2", "Env": ["VLLM_HOST_IP=192.0.2.1", "VLLM_API_KEY=s3cret", "HOME=/root"]},
        "RestartCount": 2,
    }
    asked = host_probe.Probe(
        root=tmp_path,
        run=Canned(
            {
                "docker container inspect": (0, json.dumps([container])),
                "docker image inspect": (0, json.dumps([{"RepoDigests": ["repo@sha256:2"]}])),
            }
        ),
    )
    seen = container_probe.engine_container(asked, "kimi-engine", ["/etc/nccl.conf", "/etc/ucx/ucx.conf"])
    assert seen["env"] == {"VLLM_HOST_IP": "192.0.2.1"}
    assert seen["image_repo_digests"] == ["repo@sha256:2"]
    assert seen["restart_count"] == 2
    assert len(seen["files"]["/etc/nccl.conf"]) == 64
    assert seen["files"]["/etc/ucx/ucx.conf"] is None


def test_files_report_content_and_mode(tmp_path):
    put(tmp_path, "/etc/nccl.conf", "NCCL_NET=Socket\n")
    (tmp_path / "etc/nccl.conf").chmod(0o640)
    seen = host_probe.files(probe(tmp_path), ["/etc/nccl.conf", "/etc/absent"])
    assert seen["/etc/nccl.conf"]["mode"] == "0640"
    assert seen["/etc/absent"] is None


def test_of_nccl_and_ucx_files_the_settings_are_told_and_no_secret(tmp_path):
    nccl = "# rails\nNCCL_NET=Socket\nNCCL_IB_HCA==mlx5_0:1\nNCCL_NET=IB\nNCCL_AUTH_KEY=x\nPASS=x\n=\n"
    ucx = "UCX_TLS = rc,cuda_copy \r\nUCX_NOTE=hf_q7WkL2pZx9Rt4VbN8mYc\n[section]\n\0\xff\n"
    put(tmp_path, "/etc/nccl.conf", nccl)
    put(tmp_path, "/etc/ucx/ucx.conf", ucx)
    put(tmp_path, "/etc/other.conf", "NCCL_NET=IB\n")
    seen = host_probe.files(probe(tmp_path), ["/etc/nccl.conf", "/etc/ucx/ucx.conf", "/etc/other.conf"])
    assert seen["/etc/nccl.conf"]["settings"] == {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_NET": "IB"}
    assert seen["/etc/ucx/ucx.conf"]["settings"] == {"UCX_TLS": "rc,cuda_copy", "UCX_NOTE": redaction.NOT_SHOWN}
    assert "settings" not in seen["/etc/other.conf"]


def test_a_broken_daemon_json_is_told_and_not_hidden(tmp_path):
    put(tmp_path, "/etc/docker/daemon.json", "{broken")
    put(tmp_path, "/var/lib/docker/there", "")
    seen = container_probe.runtime(
        probe(tmp_path, **{"df /var/lib/docker": (0, "     Avail     IFree\n 123456789   1000\n")})
    )
    assert seen["daemon"] is None
    assert "property name" in seen["daemon_error"]
    assert (seen["free_bytes"], seen["free_inodes"]) == (123456789, 1000)
