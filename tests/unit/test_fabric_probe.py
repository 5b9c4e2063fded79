"""NVLink fabric, CDI specifications and RDMA devices, from constructed trees of an HGX B200 and an HGX H200."""

import fabric_probe
import pytest
import rdma_probe
import unit_probe
from host_tree import Tree

UNITS = """\
Id=nvidia-fabricmanager.service
Names=nvidia-fabricmanager.service
LoadState=loaded
ActiveState=active
UnitFileState=enabled
MainPID=2001
ExecMainStartTimestampMonotonic=61000000

Id=nvlsm.service
Names=nvlsm.service
LoadState=not-found
ActiveState=inactive
UnitFileState=
MainPID=0
ExecMainStartTimestampMonotonic=0
"""
PACKAGES = "nvidia-fabricmanager-570\tii \t570.133.20-1\nnvidia-imex\thi \t580.95.05-1\n"


def h200(tree: Tree) -> None:
    tree.say("systemctl show", UNITS)
    tree.say("dpkg-query --show", PACKAGES)
    tree.put("/proc/stat", "cpu 1 2\nbtime 1764500000\n")
    tree.put("/proc/driver/nvidia-nvswitch/devices/0000:07:00.0")
    tree.put("/proc/driver/nvidia-nvswitch/devices/0000:08:00.0")


def test_services_with_package_and_age_of_the_process(tmp_path):
    tree = Tree(tmp_path)
    h200(tree)
    tree.link("/proc/2001/exe", "/usr/bin/nv-fabricmanager (deleted)")
    probe = tree.probe()
    unit_probe.ask(probe, ["nvidia-fabricmanager.service", "nvlsm.service", "nvidia-imex.service"])
    seen = fabric_probe.fabric(probe, loaded=True)
    assert seen["nvswitches"] == 2
    assert seen["services"]["nvidia-fabricmanager"] == {
        "package": "nvidia-fabricmanager-570",
        "version": "570.133.20-1",
        "active": "active",
        "started_at": "2025-11-30T10:54:21Z",
        "replaced": True,
    }
    assert seen["services"]["nvlsm"] == {
        "package": None,
        "version": None,
        "active": "inactive",
        "started_at": None,
        "replaced": None,
    }
    assert (seen["services"]["nvidia-imex"]["package"], seen["services"]["nvidia-imex"]["active"]) == (
        "nvidia-imex",
        "unknown",
    )
    assert seen["gpus"] is None  # nvidia-smi is not there


def test_managed_switches_and_imex(tmp_path):
    tree = Tree(tmp_path)
    tree.put("/sys/class/infiniband/mlx5_0/device/vpd", b"\x82\x10\0ConnectX-7\0\x90 SW_MNG\0")
    tree.put("/sys/class/infiniband/mlx5_1/device/vpd", b"\x82\x10\0ConnectX-7\0")
    tree.put("/sys/class/infiniband/mlx5_2/node_guid", "1\n")
    tree.put("/dev/nvidia-caps-imex-channels/channel0")
    tree.put("/etc/nvidia-imex/nodes_config.cfg", "# rack 1\n192.0.2.11\n\n192.0.2.12\n")
    seen = fabric_probe.fabric(tree.probe(), loaded=False)
    assert (seen["nvswitches"], seen["sw_mng"]) == (0, 1)
    assert seen["imex_channels"] == ["channel0"]
    assert seen["imex_nodes"] == ["192.0.2.11", "192.0.2.12"]


def test_no_nodes_config_is_told_from_an_empty_one(tmp_path):
    tree = Tree(tmp_path)
    assert fabric_probe.fabric(tree.probe(), loaded=False)["imex_nodes"] is None
    tree.put("/etc/nvidia-imex/nodes_config.cfg", "")
    assert fabric_probe.fabric(tree.probe(), loaded=False)["imex_nodes"] == []


IMEX_UNIT = "Id=nvidia-imex.service\nLoadState=loaded\nActiveState=active\nMainPID=2002\n"
# Constructed; the layout as published for a domain of two nodes, one of which does not answer.
IMEX = """\
{"nodes": {
  "0": {"status": "READY", "host": "192.0.2.11", "hostName": "a", "changed": true, "version": "580.95.05",
        "connections": {"0": {"host": "192.0.2.11", "status": "CONNECTED", "changed": false},
                        "1": {"host": "192.0.2.12", "status": "DISCONNECTED", "changed": true}}},
  "1": {"status": "UNAVAILABLE", "host": "192.0.2.12", "connections": {}, "version": ""}},
 "status": "DEGRADED"}
"""


def imex_domain(tree, *, unit=IMEX_UNIT):
    tree.put("/etc/nvidia-imex/nodes_config.cfg", "192.0.2.11\n192.0.2.12\n")
    tree.say("systemctl show", unit)
    probe = tree.probe()
    unit_probe.ask(probe, ["nvidia-imex.service"])
    return fabric_probe.fabric(probe, loaded=False)["imex_domain"], probe.errors


def test_the_imex_domain_as_the_daemon_sees_it(tmp_path):
    tree = Tree(tmp_path)
    tree.say("nvidia-imex-ctl -N -j", IMEX)
    seen, _ = imex_domain(tree)
    assert seen["status"] == "DEGRADED"
    assert seen["nodes"] == [
        {"host": "192.0.2.11", "status": "READY", "version": "580.95.05", "apart": ["192.0.2.12 DISCONNECTED"]},
        {"host": "192.0.2.12", "status": "UNAVAILABLE", "version": None, "apart": []},
    ]


@pytest.mark.parametrize(
    ("answer", "rc", "says"),
    [
        pytest.param("", "timeout", "no answer within 20 s", id="hangs"),
        pytest.param("Failed to connect to the IMEX daemon\n", 1, "Failed to connect", id="refused"),
        pytest.param("Nœuds: 2, état: PRÊT\n", 0, "did not print JSON", id="another-locale"),
        pytest.param('{"nodes": {"0": 7}}', 0, "names no nodes", id="other-shape"),
        pytest.param("[1]", 0, "names no nodes", id="a-list"),
    ],
)
def test_an_imex_daemon_without_a_usable_answer_is_unknown(tmp_path, answer, rc, says):
    tree = Tree(tmp_path)
    tree.say("nvidia-imex-ctl -N -j", answer, rc=rc)
    seen, errors = imex_domain(tree)
    assert seen is None
    assert any(error["probe"].startswith("nvidia-imex-ctl") and says in error["message"] for error in errors)


def test_a_daemon_that_does_not_run_is_not_asked(tmp_path):
    tree = Tree(tmp_path)
    tree.say("nvidia-imex-ctl -N -j", "", rc="timeout")
    seen, errors = imex_domain(tree, unit="Id=nvidia-imex.service\nLoadState=loaded\nMainPID=0\n")
    assert seen is None and not any("imex" in error["probe"] for error in errors)


YAML = """\
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
  - name: "0"
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia0
  - name: all
    containerEdits: {}
containerEdits:
  hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
  mounts:
    - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.570.133.20
      containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.570.133.20
    - hostPath: /usr/bin/nvidia-smi
"""
JSON = '{"kind":"nvidia.com/gpu","devices":[{"name":"0"}],"containerEdits":{"mounts":[{"hostPath":"/a.so.580.95.05"}]}}'


def test_a_stale_cdi_specification_names_what_is_missing(tmp_path):
    tree = Tree(tmp_path)
    for path in ("/dev/nvidia0", "/usr/bin/nvidia-smi", "/usr/bin/nvidia-cdi-hook", "/a.so.580.95.05"):
        tree.put(path)
    tree.put("/var/run/cdi/nvidia.yaml", YAML)
    tree.put("/etc/cdi/own.json", JSON)
    tree.put("/etc/cdi/notes.txt", "hostPath: /gone")
    assert fabric_probe.cdi(tree.probe()) == [
        {"path": "/etc/cdi/own.json", "versions": ["580.95.05"], "missing": [], "devices": ["0"]},
        {
            "path": "/var/run/cdi/nvidia.yaml",
            "versions": ["570.133.20"],
            "missing": ["/usr/lib/x86_64-linux-gnu/libcuda.so.570.133.20"],
            "devices": ["0", "all"],
        },
    ]


def test_one_folder_under_two_names_is_read_once(tmp_path):
    tree = Tree(tmp_path)
    tree.put("/run/cdi/nvidia.yaml", YAML)
    tree.link("/var/run", "../run")
    assert [row["path"] for row in fabric_probe.cdi(tree.probe())] == ["/var/run/cdi/nvidia.yaml"]


# Layout of ibv_devinfo from rdma-core 50; values constructed.
DEVINFO = """\
hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t28.43.1014
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t4096 (5)
\t\t\tlink_layer:\t\tEthernet
"""


def test_an_rdma_port_with_everything(tmp_path):
    tree = Tree(tmp_path)
    base = "/sys/class/infiniband/mlx5_0"
    tree.put(f"{base}/fw_ver", "28.43.1014\n")
    tree.put(f"{base}/node_guid", "5c25:7303:00aa:bbcc\n")
    tree.put(f"{base}/device/net/eth2/mtu", "9000\n")
    tree.put(f"{base}/ports/1/state", "4: ACTIVE\n")
    tree.put(f"{base}/ports/1/link_layer", "Ethernet\n")
    tree.put(f"{base}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    for number, gid in enumerate(
        ["fe80:" + "0000:" * 6 + "0001", "0" * 4 + ":0000" * 7, "0000:" * 5 + "ffff:c000:020b"]
    ):
        tree.put(f"{base}/ports/1/gids/{number}", f"{gid}\n")
    tree.say("ibv_devinfo", DEVINFO)
    assert rdma_probe.rdma_devices(tree.probe()) == [
        {
            "name": "mlx5_0",
            "port": 1,
            "state": "ACTIVE",
            "link_layer": "Ethernet",
            "rate": "400 Gb/sec (4X NDR)",
            "gids": 2,
            "mtu": 4096,
            "fw": "28.43.1014",
            "guid": "5c25:7303:00aa:bbcc",
            "netdev": ["eth2"],
        }
    ]


@pytest.mark.parametrize(
    ("rc", "out", "ofed"),
    [
        pytest.param(0, "MLNX_OFED_LINUX-24.10-1.1.4.0:\n", "MLNX_OFED_LINUX-24.10-1.1.4.0", id="ofed"),
        pytest.param(0, "OFED-internal-25.04-0.6.1:\n", "OFED-internal-25.04-0.6.1", id="doca"),
        pytest.param(1, "broken\n", None, id="fails"),
        pytest.param(None, "", None, id="inbox"),
    ],
)
def test_ofed(tmp_path, rc, out, ofed):
    tree = Tree(tmp_path)
    if rc is not None:
        tree.say("ofed_info -s", out, rc=rc)
    tree.put("/sys/module/mlx5_core/version", "24.10-1.1.4\n")
    tree.put("/sys/module/mlx5_core/refcnt", "3\n")
    tree.put("/sys/module/nvidia_peermem/version", "580.95.05\n")
    seen = rdma_probe.rdma(tree.probe())
    assert seen["ofed"] == ofed
    assert seen["modules"]["mlx5_core"] == {"loaded": True, "version": "24.10-1.1.4", "refcnt": 3}
    assert seen["modules"]["ib_umad"] == {"loaded": False, "version": None, "refcnt": None}
    assert seen["peer_memory"] is True
