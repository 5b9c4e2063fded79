"""Units, updaters, clock, memlock, kernel log, pins, links and the engine, from constructed answers of their tools."""

import json

import container_probe
import host_probe
import kernel_log_probe
import network_probe
import package_probe
import pytest
import unit_probe
from host_tree import Tree

BLOCK = "Id={0}\nNames={0}\nLoadState={1}\nActiveState={2}\nUnitFileState={3}\n"


def shown(*rows: tuple[str, str, str, str]) -> str:
    return "\n".join(BLOCK.format(*row) for row in rows)


def test_units_are_matched_by_name_where_systemd_gives_names(tmp_path):
    tree = Tree(tmp_path)
    tree.say(
        "systemctl show", shown(("b.service", "loaded", "active", "enabled"), ("a.service", "loaded", "failed", ""))
    )
    assert unit_probe.units(tree.probe(), ["a.service", "b.service", "c.service"]) == {
        "a.service": {"load": "loaded", "active": "failed", "enabled": "not-found"},
        "b.service": {"load": "loaded", "active": "active", "enabled": "enabled"},
        "c.service": {"load": "unknown", "active": "unknown", "enabled": "unknown"},
    }


@pytest.mark.parametrize(
    ("rc", "out", "message"),
    [
        pytest.param(1, "System has not been booted with systemd as init system (PID 1).\n", "exit 1", id="no-systemd"),
        pytest.param(0, "\ufffd\ufffd", "exit 0", id="garbage"),
        pytest.param("timeout", "", "no answer within", id="hangs"),
    ],
)
def test_without_an_answer_every_unit_is_unknown(tmp_path, rc, out, message):
    tree = Tree(tmp_path)
    tree.say("systemctl show", out, rc=rc)
    probe = tree.probe()
    assert unit_probe.units(probe, ["a.service"])["a.service"]["load"] == "unknown"
    assert unit_probe.updaters(probe) is None
    assert message in probe.errors[0]["message"]
    assert len(probe.errors) == 1


INSTALLED = ("unattended-upgrades.service", "apt-daily-upgrade.timer")


def test_an_updater_nothing_is_said_of_is_unknown(tmp_path):
    """A whole answer has a block for each unit asked about, there or not; one that was cut off has not."""
    tree = Tree(tmp_path)
    tree.say("systemctl show", shown(("unattended-upgrades.service", "loaded", "inactive", "disabled")))
    probe = tree.probe()
    unit_probe.ask(probe, unit_probe.UPDATERS)
    assert unit_probe.updaters(probe) is None
    assert [error["probe"] for error in probe.errors] == ["systemctl show"]
    assert "said nothing of apt-daily.timer" in probe.errors[0]["message"]


def test_updaters_and_clock(tmp_path):
    tree = Tree(tmp_path)
    tree.say(
        "systemctl show",
        shown(
            ("unattended-upgrades.service", "loaded", "active", "enabled"),
            ("apt-daily-upgrade.timer", "loaded", "inactive", "disabled"),
            *((name, "not-found", "inactive", "") for name in unit_probe.UPDATERS if name not in INSTALLED),
            ("chrony.service", "loaded", "active", "enabled"),
        ),
    )
    tree.say("timedatectl show --property NTPSynchronized", "NTPSynchronized=no\n")
    probe = tree.probe()
    unit_probe.ask(probe, [*unit_probe.UPDATERS, *unit_probe.CLOCKS])
    assert unit_probe.updaters(probe) == [
        {"name": "unattended-upgrades.service", "active": True, "enabled": True},
        {"name": "apt-daily-upgrade.timer", "active": False, "enabled": False},
    ]
    assert unit_probe.clock(probe) == {"synchronized": False, "source": "chrony"}


def test_the_kernel_itself_says_whether_its_clock_is_synchronised():
    assert unit_probe.clock(host_probe.Probe(run=nothing))["synchronized"] in (True, False)


def nothing(argv, **_):
    raise FileNotFoundError(argv[0])


def test_memlock_in_its_places(tmp_path):
    tree = Tree(tmp_path)
    tree.put("/etc/security/limits.conf", "#* soft memlock unlimited\n")
    tree.put("/etc/security/limits.d/rdma.conf", "*\thard  memlock   unlimited\n* hard nofile 1\n")
    tree.say("systemctl show --property DefaultLimitMEMLOCK", "DefaultLimitMEMLOCK=8388608\n")
    tree.say("systemctl show", "Id=docker.service\nLoadState=loaded\nLimitMEMLOCK=infinity\n")
    probe = tree.probe()
    unit_probe.ask(probe, ["docker.service"])
    daemon = {"default-ulimits": {"memlock": {"Name": "memlock", "Soft": -1, "Hard": -1}}}
    assert unit_probe.memlock(probe, daemon) == {
        "limits_conf": [{"file": "/etc/security/limits.d/rdma.conf", "line": "* hard memlock unlimited"}],
        "systemd_default": "8388608",
        "docker_unit": "infinity",
        "daemon_json": "-1:-1",
        "container": None,
    }
    assert unit_probe.memlock(probe, None)["daemon_json"] is None


@pytest.mark.parametrize("limit", ["8388608", "unlimited"])
def test_c46_memlock_inside_the_container_is_what_counts(tmp_path, limit):
    tree = Tree(tmp_path)
    tree.put("/proc/77/limits", f"Limit  Soft  Hard  Units\nMax locked memory         {limit}    {limit}    bytes\n")
    assert unit_probe.memlock(tree.probe(), None, 77)["container"] == limit
    assert unit_probe.memlock(tree.probe(), None, 78)["container"] is None


def test_the_engine_outside_a_container(tmp_path):
    tree = Tree(tmp_path)
    tree.say(
        "systemctl show",
        "Id=kimi-engine.service\nLoadState=loaded\nActiveState=active\nMainPID=88\n"
        'Environment=NCCL_NET=IB "VLLM_API_KEY=s3cret" "UCX_TLS=rc,cuda_copy"\n'
        "EnvironmentFiles=/etc/kimi/env (ignore_errors=no)\nEnvironmentFiles=/etc/kimi/more (ignore_errors=yes)\n",
    )
    tree.put("/etc/kimi/env", "# ours\nHF_TOKEN=s3cret\nNCCL_IB_HCA==mlx5_0\n")
    tree.put("/etc/kimi/more", "VLLM_HOST_IP='192.0.2.1'\n")
    tree.put("/proc/88/cmdline", "vllm\0serve\0/models/k3\0--api-key\0s3cret\0")
    tree.put("/proc/88/stat", "88 (vllm (x)) S " + "0 " * 18 + "6100 0\n")
    tree.put("/proc/stat", "btime 1764500000\n")
    probe = tree.probe()
    unit_probe.ask(probe, ["kimi-engine.service"])
    assert container_probe.engine(probe, "", [], "kimi-engine.service") == {
        "container": None,
        "unit_env": {
            "NCCL_IB_HCA": "=mlx5_0",
            "NCCL_NET": "IB",
            "UCX_TLS": "rc,cuda_copy",
            "VLLM_HOST_IP": "192.0.2.1",
        },
        "process": {
            "argv": ["vllm", "serve", "/models/k3", "--api-key", "(not shown)"],
            "started_at": "2025-11-30T10:54:21Z",
        },
    }


# Lines in the layout of `journalctl --output short-iso` (systemd 252) and `dmesg --time-format iso` (util-linux 2.38).
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
LOADING = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
OOM = "Out of memory: Killed process 4711 (vllm) total-vm:1kB"
JOURNAL = f"""\
2025-11-30T10:54:00+0000 gpu-07 kernel: {LOADING}
2025-11-30T11:00:00+0000 gpu-07 kernel: {XID}
2025-11-30T11:00:01+0000 gpu-07 kernel: usb 1-1: new device
2025-11-30T11:00:02+0000 gpu-07 kernel: {OOM}
"""


def test_the_journal_answers_with_times_and_kinds(tmp_path):
    tree = Tree(tmp_path)
    tree.say("journalctl --dmesg", JOURNAL)
    tree.put("/proc/stat", "btime 1764500000\n")
    probe = tree.probe()
    assert kernel_log_probe.kernel_log(probe) == {
        "readable": True,
        "lines": [
            {"at": "2025-11-30T10:54:00Z", "kind": "nvrm", "text": LOADING},
            {"at": "2025-11-30T11:00:00Z", "kind": "xid", "text": XID},
            {"at": "2025-11-30T11:00:02Z", "kind": "oom", "text": OOM},
        ],
        "cut": 0,
    }
    assert kernel_log_probe.driver_loaded_s(probe) == 40.0


def test_a_journal_without_such_lines_is_told_from_one_nobody_may_read(tmp_path):
    quiet = Tree(tmp_path / "quiet")
    journal = "journalctl --dmesg --boot --utc --output short-iso --no-pager --quiet"
    quiet.say(f"{journal} --lines 2000 --grep", "", rc=1)
    quiet.say(f"{journal} --lines 1", "2025-11-30T11:00:01+0000 gpu-07 kernel: usb 1-1: new device\n")
    assert kernel_log_probe.kernel_log(quiet.probe()) == {"readable": True, "lines": [], "cut": 0}
    closed = Tree(tmp_path / "closed")
    closed.say("journalctl", "", rc=1)
    closed.say("dmesg", "", rc=1, err="dmesg: read kernel buffer failed: Operation not permitted\n")
    probe = closed.probe()
    assert kernel_log_probe.kernel_log(probe)["readable"] is False
    assert "Operation not permitted" in probe.errors[0]["message"]


def test_without_a_journal_the_kernels_buffer_answers(tmp_path):
    tree = Tree(tmp_path)
    tree.say("dmesg", f"2025-11-30T12:00:00,123456+01:00 {XID}\n2025-11-30T12:00:01,0+01:00 eth0: link up\ngarbage\n")
    seen = kernel_log_probe.kernel_log(tree.probe())
    assert seen["lines"] == [{"at": "2025-11-30T11:00:00Z", "kind": "xid", "text": XID}]


STORM = [f"2025-11-30T11:{n // 60:02}:{n % 60:02}+0000 h kernel: pcieport 0: AER: error {n}" for n in range(2000)]


def test_a_chatty_kernel_loses_the_oldest_lines_but_neither_the_load_nor_an_xid(tmp_path):
    """A GPU that falls off the bus says so once; the lines of its PCIe port go on and on."""
    tree = Tree(tmp_path)
    first = [f"2025-11-30T10:54:00+0000 h kernel: {LOADING}", f"2025-11-30T10:59:00+0000 h kernel: {XID}"]
    tree.say("journalctl --dmesg", "\n".join([*first, *STORM[:250]]))
    seen = kernel_log_probe.kernel_log(tree.probe())
    assert [row["text"] for row in seen["lines"][:2]] == [LOADING, XID]
    assert (len(seen["lines"]), seen["cut"]) == (42, 210)
    assert seen["lines"][-1]["text"].endswith("error 249")


def test_an_xid_behind_more_lines_than_are_asked_for_is_asked_for_alone(tmp_path):
    tree = Tree(tmp_path)
    journal = "journalctl --dmesg --boot --utc --output short-iso --no-pager --quiet --lines 2000 --grep"
    tree.say(journal, "\n".join(STORM))
    tree.say(f"{journal} NVRM: Xid|NVRM: loading NVIDIA UNIX", f"2025-11-30T10:59:00+0000 h kernel: {XID}\n")
    assert kernel_log_probe.kernel_log(tree.probe())["lines"][0]["kind"] == "xid"


@pytest.mark.parametrize(
    "text", ["firmware version: 28.43.2026", "Port module event: module 0, Cable plugged", "eth2: Link up"]
)
def test_what_a_network_card_says_at_every_boot_is_no_trouble(tmp_path, text):
    tree = Tree(tmp_path)
    tree.say("journalctl --dmesg", f"2025-11-30T11:00:00+0000 h kernel: mlx5_core 0000:05:00.0: {text}\n")
    assert kernel_log_probe.kernel_log(tree.probe())["lines"] == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("pcieport 0000:00:01.0: AER: Corrected error message received", "pcie-aer"),
        ("DMAR: DRHD: handling fault status reg 2 error", "iommu"),
        ("python3[12]: segfault at 0 ip 00 sp 00 error 4 in libcuda.so.580.95.05", "segfault"),
        ("nvidia: version magic '6.8.0-90 SMP' should be '6.8.0-101 SMP'", "module"),
        ("nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client", "module"),
        ("mlx5_core 0000:05:00.0: Port module event[error]: module 0, Cable error, Bus stuck", "mlx5"),
        ("mlx5_core 0000:05:00.0 eth2: Link down", "mlx5"),
    ],
)
def test_kinds(tmp_path, text, kind):
    tree = Tree(tmp_path)
    tree.say("journalctl --dmesg", f"2025-11-30T11:00:00+0000 h kernel: {text}\n")
    assert [row["kind"] for row in kernel_log_probe.kernel_log(tree.probe())["lines"]] == [kind]


def test_holds_and_pins_of_apt(tmp_path):
    tree = Tree(tmp_path)
    tree.say("dpkg-query --show", "linux-image-generic\thi \t6.8\nbash\tii \t5\nnvidia-open\thi \t580.95.05-1\n")
    tree.put("/etc/apt/preferences.d/nvidia-driver-pinning-580", "Package: *nvidia*\n")
    tree.put("/etc/apt/preferences.d/ignored.txt", "x")
    probe = tree.probe()
    assert package_probe.holds(probe) == ["linux-image-generic", "nvidia-open"]
    assert [row["path"] for row in package_probe.pins(probe)] == ["/etc/apt/preferences.d/nvidia-driver-pinning-580"]


def test_what_preference_files_and_streams_say_of_nvidia(tmp_path):
    tree = Tree(tmp_path)
    tree.put(
        "/etc/apt/preferences.d/site",
        "Explanation: by hand\nPackage: *nvidia* libcuda1\n# no\nPin: version 570.*\nPin-Priority: 1001\n\n"
        "Package: bash\nPin: version 5\nPin-Priority: 1\n \nPackage: nvlsm\nPin:  release  l=NVIDIA CUDA\n\nnonsense\n",
    )
    tree.put("/etc/apt/preferences", "Package: cuda-*\nPin: origin x.example\nPin-Priority: -1\n\nPackage: nvidia-x\n")
    tree.put("/etc/dnf/modules.d/nvidia-driver.module", "[nvidia-driver]\nname=nvidia-driver\nstream=570-open\n")
    assert {row["path"]: row["entries"] for row in package_probe.pins(tree.probe())} == {
        "/etc/apt/preferences": [{"package": "cuda-*", "pin": "origin x.example", "priority": -1}],
        "/etc/apt/preferences.d/site": [
            {"package": "*nvidia* libcuda1", "pin": "version 570.*", "priority": 1001},
            {"package": "nvlsm", "pin": "release l=NVIDIA CUDA", "priority": None},
        ],
        "/etc/dnf/modules.d/nvidia-driver.module": [
            {"package": "nvidia-driver", "pin": "stream 570-open", "priority": None}
        ],
    }


def test_version_locks_of_dnf(tmp_path):
    tree = Tree(tmp_path)
    tree.say(
        "rpm --query --all", "kernel-core\t5.14.0-570.el9\nnvidia-driver-cuda\t580.95.05-1.el9\nkernel\t5.14.0-1.el9\n"
    )
    tree.put("/etc/dnf/plugins/versionlock.list", "# ours\nkernel-core-0:5.14.0-570.el9.*\n*nvidia*580*\n!bad-1\n")
    tree.put("/etc/dnf/versionlock.toml", 'version = "1.0"\n[[packages]]\nname = "nvlsm"\n')
    probe = tree.probe()
    assert package_probe.holds(probe) == [
        "*nvidia*580*",
        "kernel-core",
        "kernel-core-0:5.14.0-570.el9.*",
        "nvidia-driver-cuda",
        "nvlsm",
    ]
    assert package_probe.packages(probe, ["kernel-core", "kernel"]) == {
        "kernel-core": {"version": "5.14.0-570.el9", "held": True},
        "kernel": {"version": "5.14.0-1.el9", "held": False},
        "nvidia-driver-cuda": {"version": "580.95.05-1.el9", "held": True},
    }


def test_without_a_package_manager_nothing_is_known(tmp_path):
    probe = Tree(tmp_path).probe()
    assert package_probe.holds(probe) is None
    assert probe.errors == [{"probe": "packages", "message": "neither dpkg-query nor rpm lists them"}]


def test_links_with_mtu_and_speed(tmp_path):
    tree = Tree(tmp_path)
    for name, mtu, speed in [("eth0", "1500", "25000"), ("ib0", "4092", "-1"), ("veth12", "1500", "10000")]:
        tree.put(f"/sys/class/net/{name}/mtu", f"{mtu}\n")
        tree.put(f"/sys/class/net/{name}/speed", f"{speed}\n")
    tree.put("/sys/class/net/eth1/mtu", "9000\n")
    assert network_probe.links(tree.probe()) == (
        {"eth0": 1500, "eth1": 9000, "ib0": 4092},
        {"eth0": 25000, "eth1": None, "ib0": None},
    )


def test_holders_of_devices_row_by_row(tmp_path):
    tree = Tree(tmp_path)
    tree.put("/proc/42/comm", "python3\n")
    for number, target in enumerate(["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia0", "socket:[7]", "/dev/null"]):
        tree.link(f"/proc/42/fd/{number}", target)
    tree.put("/proc/notaprocess/fd/0")
    holders, sockets = network_probe.open_devices(tree.probe())
    assert holders == [
        {"pid": 42, "name": "python3", "device": "/dev/nvidia0"},
        {"pid": 42, "name": "python3", "device": "/dev/nvidiactl"},
    ]
    assert sockets == {"7": 42}


@pytest.mark.parametrize(
    ("info", "store", "cdi"),
    [
        pytest.param(
            {"DockerRootDir": "/data/docker", "CDISpecDirs": ["/etc/cdi"]}, "/data/docker", True, id="overlay2"
        ),
        pytest.param(
            {"DockerRootDir": "/data/docker", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]},
            "/var/lib/containerd",
            None,
            id="containerd-store",
        ),
        pytest.param({"DockerRootDir": "/data/docker", "CDISpecDirs": []}, "/data/docker", False, id="no-cdi"),
    ],
)
def test_where_images_lie(tmp_path, info, store, cdi):
    tree = Tree(tmp_path)
    tree.put("/data/docker/x")
    tree.put("/var/lib/containerd/x")
    tree.say("docker info", json.dumps({"DefaultRuntime": "nvidia", "Driver": "overlayfs", **info}))
    tree.say("dpkg-query --show", "nvidia-container-toolkit\tii \t1.20.0-1\nlibnvidia-container1\tii \t1.19.0-1\n")
    seen = container_probe.runtime(tree.probe())
    assert (seen["store_path"], seen["cdi_enabled"]) == (store, cdi)
    assert (seen["default_runtime"], seen["storage_driver"]) == ("nvidia", "overlayfs")
    assert seen["toolkit"] == {"nvidia-container-toolkit": "1.20.0-1", "libnvidia-container1": "1.19.0-1"}
    assert (seen["free_bytes"], seen["free_inodes"]) == (None, None)  # this tree does not say


def test_a_docker_that_cannot_be_reached_is_an_error_and_no_absent_image(tmp_path):
    tree = Tree(tmp_path)
    tree.say("docker", "", rc=1, err="Cannot connect to the Docker daemon at unix:///var/run/docker.sock.\n")
    probe = tree.probe()
    container_probe.image(probe, "repo@sha256:1")
    assert "Cannot connect" in probe.errors[0]["message"]


REFERENCE = f"registry.example:5000/vllm@sha256:{'a' * 64}"
MIRROR = f"mirror.example/vllm@sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("held", "present"),
    [
        pytest.param(f"<none>@<none>\nvllm@sha256:{'b' * 64}\n{MIRROR}\n", True, id="same-digest-of-a-mirror"),
        pytest.param(f"kimi-runbook/engine@sha256:{'a' * 64}\n", False, id="only-the-tag-that-protects-it"),
        pytest.param("", False, id="nothing"),
    ],
)
def test_an_image_is_known_by_its_digest_and_not_by_its_name(tmp_path, held, present):
    tree = Tree(tmp_path)
    tree.say(f"docker image inspect {REFERENCE}", "[]", rc=1, err="Error: No such image")
    inspected = json.dumps([{"RepoDigests": [MIRROR], "Architecture": "amd64", "Size": 7}])
    tree.say(f"docker image inspect {MIRROR}", inspected)
    tree.say("docker image ls", held)
    probe = tree.probe()
    seen = container_probe.image(probe, REFERENCE)
    assert (seen["reference"], seen["present"]) == (REFERENCE, present)
    assert seen["repo_digests"] == ([MIRROR] if present else []) and probe.errors == []


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        pytest.param("/dev/a / ext4 rw 0 0\n/dev/b /var/lib/docker xfs ro,noatime 0 0\n", True, id="remounted"),
        pytest.param("/dev/a / ext4 ro 0 0\n/dev/b /var/lib/docker xfs rw,noatime 0 0\n", False, id="root-only"),
        pytest.param("/dev/a / ext4 rw 0 0\n/dev/b /var/lib/dock xfs ro 0 0\n", False, id="another-folder"),
        pytest.param("/dev/a / ext4 ro 0 0\noverlay / overlay rw 0 0\n", False, id="mounted-over"),
        pytest.param("garbage\n", None, id="garbage"),
        pytest.param(None, None, id="cannot-tell"),
    ],
)
def test_a_read_only_store(tmp_path, mounts, expected):
    tree = Tree(tmp_path)
    if mounts is not None:
        tree.put("/proc/self/mounts", mounts)
    assert container_probe.read_only(tree.probe(), "/var/lib/docker") is expected
