"""The role of the NVLink fabric: what a host gets, and the modules that run and await it (C26 to C36)."""

import subprocess
from pathlib import Path
from typing import Any

import fabric_units
import fabric_wait
import imex_wait
import pytest
from host_tree import Tree
from node_programs import Programs, call

from kimi_runbook import fabric
from kimi_runbook.errors import RunbookError

DRIVER = "580.178.04"
FM = {"nvidia-fabricmanager": f"{DRIVER}-1"}
NVLINK5 = {**FM, "nvlsm": "2025.06.11-1", "libnvsdm": f"{DRIVER}-1"}
NO_IMEX: dict[str, Any] = {"nodes": [], "config": {}}


def snapshot(**parts: Any) -> dict[str, Any]:
    return {
        "fabric": {"nvswitches": 0, "sw_mng": 0, **parts.pop("fabric", {})},
        "packages": {},
        "units": {},
        "driver": {"loaded": DRIVER},
        "rdma_devices": [],
        **parts,
    }


def lock(platform: str, companions: dict[str, str] | None = None) -> dict[str, Any]:
    return {"platform": platform, "driver": {"version": DRIVER, "companions": companions or {}}}


@pytest.mark.parametrize(
    ("platform", "seen", "companions", "kind", "packages", "units"),
    [
        pytest.param("h200_nvl", {}, FM, "none", [], [], id="pcie-never"),
        pytest.param("lab", {}, FM, "none", [], [], id="lab-never"),
        pytest.param(
            "h200",
            {"fabric": {"nvswitches": 4}},
            FM,
            "nvswitch",
            ["nvidia-fabricmanager"],
            ["nvidia-fabricmanager.service"],
            id="hgx-h200",
        ),
        pytest.param(
            "h200_nvl",
            {"fabric": {"nvswitches": 4}},
            FM,
            "nvswitch",
            ["nvidia-fabricmanager"],
            ["nvidia-fabricmanager.service"],
            id="switches-of-a-platform-that-has-none",
        ),
        pytest.param("h200", {}, FM, "none", [], [], id="no-switch-although-the-driver-is-loaded"),
        pytest.param(
            "h200",
            {"driver": {"loaded": None}},
            FM,
            "nvswitch",
            ["nvidia-fabricmanager"],
            ["nvidia-fabricmanager.service"],
            id="before-the-first-driver",
        ),
        pytest.param(
            "b300",
            {"fabric": {"sw_mng": 4}},
            NVLINK5,
            "nvlink5",
            ["nvidia-fabricmanager", "nvlsm", "libnvsdm", "infiniband-diags"],
            ["nvidia-fabricmanager.service"],
            id="C29-nvlink5-has-nvlsm-and-ibstat",
        ),
        pytest.param(
            "b300",
            {"fabric": {"sw_mng": 4}, "units": {"nvlsm.service": {"load": "loaded"}}},
            NVLINK5,
            "nvlink5",
            ["nvidia-fabricmanager", "nvlsm", "libnvsdm", "infiniband-diags"],
            ["nvlsm.service", "nvidia-fabricmanager.service"],
            id="nvlsm-with-a-unit-of-its-own-first",
        ),
        pytest.param("b300", {"rdma_devices": [{"name": "mlx5_0"}]}, NVLINK5, "none", [], [], id="no-SW_MNG"),
        pytest.param("gb300", {}, FM, "rack", [], [], id="lock-names-no-imex"),
        pytest.param(
            "gb300",
            {},
            {"nvidia-imex-580": f"{DRIVER}-1"},
            "rack",
            ["nvidia-imex-580"],
            ["nvidia-imex.service"],
            id="name-with-its-branch",
        ),
        pytest.param(
            "h200_nvl",
            {"packages": {"libnvidia-nscq": {"version": "570.133.20-1"}}},
            {"libnvidia-nscq": f"{DRIVER}-1"},
            "none",
            ["libnvidia-nscq"],
            [],
            id="installed-anyway-is-not-left-behind",
        ),
        pytest.param("h200_nvl", {}, {"nvidia-persistenced": f"{DRIVER}-1"}, "none", [], [], id="the-driver-s-own"),
    ],
)
def test_what_a_host_gets(  # noqa: PLR0917 - the columns of the table
    platform: str,
    seen: dict[str, Any],
    companions: dict[str, str],
    kind: str,
    packages: list[str],
    units: list[str],
) -> None:
    wish = fabric.host_wish(snapshot(**seen), lock(platform, companions), NO_IMEX)
    assert (wish["kind"], [one["name"] for one in wish["packages"]], wish["units"]) == (kind, packages, units)
    assert all(one["held"] for one in wish["packages"] if one["version"]), "C27: held with the driver"


def test_bound_packages_have_the_driver_s_version_and_nvlsm_its_own() -> None:
    wish = fabric.host_wish(snapshot(fabric={"sw_mng": 1}), lock("b300", NVLINK5), NO_IMEX)
    assert wish["bound"] == ["nvidia-fabricmanager", "libnvsdm"]


def test_a_package_of_an_older_name_gives_way() -> None:
    seen = snapshot(fabric={"nvswitches": 1}, packages={"nvidia-fabricmanager-570": {"version": "570.133.20-1"}})
    wish = fabric.host_wish(seen, lock("h200", FM), NO_IMEX)
    assert wish["replaced"] == ["nvidia-fabricmanager-570"]


RACK = {
    name: {"nvlink_domain": domain, "engine_address": address}
    for name, domain, address in (
        ("t2", "rack1", "192.0.2.12"),
        ("t1", "rack1", "192.0.2.11"),
        ("t3", "rack2", "192.0.2.13"),
        ("pcie", "", "192.0.2.14"),
    )
}


def test_every_host_of_a_domain_gets_the_same_files() -> None:
    nodes = fabric.domain_nodes(list(RACK), RACK, "rack1")
    assert nodes == ["192.0.2.12", "192.0.2.11"], "in the inventory's order, not sorted and not another domain's"
    imex = {"nodes": nodes, "config": {"SERVER_PORT": 50000}}
    listed, config = fabric.host_wish(snapshot(), lock("gb300"), imex)["files"]
    assert (listed["path"], listed["content"]) == ("/etc/nvidia-imex/nodes_config.cfg", "192.0.2.12\n192.0.2.11\n")
    assert config["content"].endswith("\nSERVER_PORT=50000\n")
    assert fabric.host_wish(snapshot(fabric={"nvswitches": 1}), lock("h200", FM), imex)["files"] == []


def test_no_domain_leaves_imex_alone() -> None:
    assert fabric.domain_nodes(list(RACK), RACK, "") == []
    assert fabric.host_wish(snapshot(), lock("gb300"), NO_IMEX)["files"] == []


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        pytest.param({"t1": {"nvlink_domain": "r", "engine_address": ""}}, "t1 has the address ''", id="no-address"),
        pytest.param({"t1": {"nvlink_domain": "r", "engine_address": "tray1"}}, "'tray1'", id="a-name"),
        pytest.param(
            {n: {"nvlink_domain": "r", "engine_address": "192.0.2.1"} for n in "ab"}, "two hosts", id="one-for-two"
        ),
        pytest.param(
            {f"t{n}": {"nvlink_domain": "r", "engine_address": f"192.0.2.{n}"} for n in range(1, 20)},
            "19 hosts",
            id="two-racks-in-one",
        ),
    ],
)
def test_a_domain_that_cannot_work_is_refused(hosts: dict[str, Any], message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        fabric.domain_nodes(list(hosts), hosts, "r")


def test_a_setting_of_two_lines_is_refused() -> None:
    with pytest.raises(RunbookError, match="NAME=value"):
        fabric.imex_files(["192.0.2.1"], {"LOG_FILE_NAME": "a\nSERVER_PORT=1"})


# The services.


@pytest.mark.parametrize(
    ("packages", "driver", "wrong"),
    [
        pytest.param({"nvidia-fabricmanager": f"{DRIVER}-1"}, DRIVER, "", id="equal"),
        pytest.param({"nvidia-fabricmanager": f"3:{DRIVER}-1.el9"}, DRIVER, "", id="equal-rpm"),
        pytest.param({"nvidia-fabricmanager": "570.133.20-1"}, DRIVER, "nvidia-fabricmanager is 570", id="C26-other"),
        pytest.param({"nvidia-fabricmanager": f"{DRIVER}1-1"}, DRIVER, "nvidia-fabricmanager is", id="C26-nearly"),
        pytest.param({}, DRIVER, "nvidia-fabricmanager is not installed", id="missing"),
        pytest.param({"nvidia-fabricmanager": f"{DRIVER}-1"}, None, "no NVIDIA driver is loaded", id="no-driver"),
    ],
)
def test_versions_are_equal_before_a_start(packages: dict[str, str], driver: str | None, wrong: str) -> None:
    found = fabric_units.unequal(["nvidia-fabricmanager"], packages, driver)
    assert found.startswith(wrong) and bool(found) == bool(wrong)


RUNS = {"enabled": True, "active": True, "replaced": False}


@pytest.mark.parametrize(
    ("first", "second", "restart", "actions"),
    [
        pytest.param({}, {}, False, [], id="nothing-to-do"),
        pytest.param({"enabled": False}, {}, False, [("enable", "a")], id="not-at-boot"),
        pytest.param({}, {"active": False}, False, [("start", "b")], id="stopped"),
        pytest.param({}, {"replaced": True}, False, [("restart", "b")], id="older-than-its-package"),
        pytest.param({"replaced": True}, {}, False, [("restart", "a"), ("restart", "b")], id="what-follows-too"),
        pytest.param({"active": False}, {}, False, [("start", "a"), ("restart", "b")], id="first-was-down"),
        pytest.param({}, {}, True, [("restart", "a"), ("restart", "b")], id="configuration-changed"),
    ],
)
def test_what_is_done_to_the_services(
    first: dict[str, bool], second: dict[str, bool], restart: bool, actions: list[tuple[str, str]]
) -> None:
    seen = {"a": {**RUNS, **first}, "b": {**RUNS, **second}}
    assert fabric_units.plan(["a", "b"], seen, restart) == actions


@pytest.mark.parametrize(
    ("kind", "files", "told"),
    [
        pytest.param("none", [], "", id="none"),
        pytest.param("rack", [], "", id="rack"),
        pytest.param("nvswitch", ["/proc/driver/nvidia-nvswitch/devices/0"], "", id="nvswitch"),
        pytest.param("nvswitch", [], "no NVSwitch", id="C28-nothing-to-do"),
        pytest.param("nvlink5", [], "no RDMA function", id="C28-not-detected"),
        pytest.param("nvlink5", ["/sys/class/infiniband/mlx5_0/device/vpd"], "ib_umad is not loaded", id="C28-umad"),
        pytest.param(
            "nvlink5", ["/sys/class/infiniband/mlx5_0/device/vpd", "/sys/module/ib_umad/refcnt"], "", id="nvlink5"
        ),
    ],
)
def test_the_fabric_has_to_show(tmp_path: Path, kind: str, files: list[str], told: str) -> None:
    tree = Tree(tmp_path)
    for path in files:
        tree.put(path, "SW_MNG")
    assert fabric_units.unseen(kind, tree.probe()).startswith(told)
    assert bool(fabric_units.unseen(kind, tree.probe())) == bool(told)


SYSTEMCTL = """\
echo "$@" >> $DIR/systemctl.said
say() {{ printf 'LoadState=loaded\\nActiveState=%s\\nUnitFileState=%s\\nMainPID=0\\n' $1 $2; }}
case "$1" in
  show) cat $DIR/state 2>/dev/null || say {active} {enabled};;
  stop) {stop};;
  kill) say failed enabled > $DIR/state;;
  start) say {after} enabled > $DIR/state;;
esac
"""


def systemctl(
    tmp_path: Path, *, active: str = "inactive", enabled: str = "disabled", after: str = "active", stop: str = "true"
) -> Programs:
    programs = Programs(tmp_path / "bin")
    programs.put("systemctl", SYSTEMCTL.format(active=active, enabled=enabled, after=after, stop=stop))
    programs.put("journalctl", "echo 'versions differ'; echo 'exiting'")
    programs.put("dpkg-query", "printf 'nvidia-fabricmanager\\tii \\t580.178.04-1\\n'")
    return programs


def test_units_are_enabled_and_started(tmp_path: Path) -> None:
    programs = systemctl(tmp_path)
    code, told = call("fabric_units", programs, units=["nvidia-imex.service"])
    assert (code, told["changed"]) == (0, True)
    assert told["actions"] == ["enable nvidia-imex.service", "start nvidia-imex.service"]
    assert {"enable nvidia-imex.service", "start nvidia-imex.service"} <= set(programs.said("systemctl.said"))


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    programs = systemctl(tmp_path, active="active", enabled="enabled")
    assert call("fabric_units", programs, units=["nvidia-imex.service"])[1]["changed"] is False
    assert {line.split()[0] for line in programs.said("systemctl.said")} == {"show"}


def test_check_mode_starts_nothing(tmp_path: Path) -> None:
    programs = systemctl(tmp_path)
    _, told = call("fabric_units", programs, check=True, units=["nvidia-imex.service"], bound=["nvidia-imex"])
    assert told["actions"] == ["enable nvidia-imex.service", "start nvidia-imex.service"]
    assert {line.split()[0] for line in programs.said("systemctl.said")} == {"show"}


def test_c26_nothing_is_started_beside_another_driver(tmp_path: Path) -> None:
    programs = systemctl(tmp_path)
    code, told = call("fabric_units", programs, units=["x.service"], bound=["nvidia-imex"])
    assert code == 1 and "gpu-operator#544" in told["msg"] and "none was started" in told["msg"]
    assert programs.said("systemctl.said") == []


def test_c28_nothing_is_started_where_the_switches_do_not_show(tmp_path: Path) -> None:
    """This machine shows none; with nothing to start there is nothing to refuse."""
    programs = systemctl(tmp_path)
    code, told = call("fabric_units", programs, kind="nvswitch", units=["nvidia-fabricmanager.service"])
    assert code == 1 and "no NVSwitch" in told["msg"] and "gpu-operator#2781" in told["msg"]
    assert programs.said("systemctl.said") == []
    assert call("fabric_units", programs, kind="nvswitch", units=[])[0] == 0


def test_a_unit_another_service_starts_may_be_missing(tmp_path: Path) -> None:
    programs = systemctl(tmp_path)
    programs.put("systemctl", "printf 'LoadState=not-found\\nActiveState=inactive\\nUnitFileState=\\nMainPID=0\\n'")
    unit = "nvlsm.service"
    assert call("fabric_units", programs, units=[unit], optional_units=[unit])[1]["actions"] == []
    code, told = call("fabric_units", programs, units=[unit])
    assert code == 1 and "nvlsm.service: no such unit" in told["msg"]


def test_c36_a_stop_that_hangs_is_ended(tmp_path: Path) -> None:
    programs = systemctl(tmp_path, active="active", enabled="enabled", stop="[ -f $DIR/state ] || sleep 60")
    code, told = call("fabric_units", programs, units=["x.service"], restart=True, stop_timeout_s=1)
    assert (code, told["killed"]) == (0, ["x.service"])
    verbs = [line.split()[0] for line in programs.said("systemctl.said") if not line.startswith("show")]
    assert verbs == ["stop", "kill", "stop", "reset-failed", "start"]


def test_a_service_that_does_not_come_up_quotes_its_journal(tmp_path: Path) -> None:
    code, told = call("fabric_units", systemctl(tmp_path, after="failed"), units=["x.service"])
    assert code == 1 and "x.service is failed" in told["msg"] and "versions differ | exiting" in told["msg"]


# The fabric.


def block(**changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "state": "Completed",
        "status": "Success",
        "cluster_uuid": "f0e1d2c3-1111-2222-3333-444455556666",
        "clique_id": "32766",
        **changes,
    }


@pytest.mark.parametrize(
    ("rows", "gpus", "domain", "told"),
    [
        pytest.param([block()], 1, True, "", id="ready"),
        pytest.param([block(cluster_uuid=None, clique_id=None)], 1, False, "", id="hgx-needs-no-domain"),
        pytest.param([block(state="In Progress", status=None)], 1, False, "GPU 0 In Progress/unknown", id="C30-802"),
        pytest.param([block(status="Insufficient Resources")], 1, False, "GPU 0 Completed/Insuff", id="no-resources"),
        pytest.param([block(clique_id="0")], 1, True, "GPU 0 ClusterUUID", id="no-clique"),
        pytest.param([block()], 8, False, "1 GPUs have a Fabric block, 8", id="C28-some-without"),
        pytest.param([], 0, False, "nvidia-smi shows no GPU", id="none"),
        pytest.param(None, 0, False, "nvidia-smi shows no GPU", id="no-answer"),
    ],
)
def test_when_a_fabric_is_ready(rows: Any, gpus: int, domain: bool, told: str) -> None:
    found = fabric_wait.not_ready(rows, gpus, domain)
    assert found.startswith(told) and bool(found) == bool(told)


REPORT = """\
cat <<'XML'
<?xml version="1.0" ?>
<nvidia_smi_log><gpu id="00000000:1B:00.0"><product_name>NVIDIA H200</product_name>
<fabric><state>STATE</state><status>STATUS</status></fabric></gpu></nvidia_smi_log>
XML
"""


def smi(tmp_path: Path, then: str = "") -> Programs:
    programs = Programs(tmp_path / "bin")
    report = REPORT.replace("STATE", "Completed").replace("STATUS", "Success")
    late = REPORT.replace("STATE", "In Progress").replace("STATUS", "N/A")
    programs.put(
        "nvidia-smi",
        f"echo x >> $DIR/calls\nif [ $(wc -l < $DIR/calls) -ge {then or 99} ]; then\n{report}else\n{late}fi",
    )
    return programs


def test_the_fabric_is_awaited(tmp_path: Path) -> None:
    programs = smi(tmp_path, then="3")
    code, told = call("fabric_wait", programs, poll_s=0.05, timeout_s=30)
    assert (code, told["changed"], told["gpus"][0]["state"]) == (0, False, "Completed")
    assert len(programs.said("calls")) == 3


def test_c30_a_fabric_that_never_comes_names_error_802(tmp_path: Path) -> None:
    code, told = call("fabric_wait", smi(tmp_path), poll_s=0.05, timeout_s=1)
    assert code == 1
    assert "GPU 0 In Progress/unknown" in told["msg"] and "error 802" in told["msg"] and "within 1 s" in told["msg"]


# IMEX.

ANSWER = """\
{"status": "DOM", "nodes": {
 "0": {"host": "192.0.2.11", "status": "MINE", "version": "580.178.04",
       "connections": {"1": {"host": "192.0.2.12", "status": "LINK"}}},
 "1": {"host": "192.0.2.12", "status": "OTHER", "version": "580.178.04", "connections": {}}}}
"""


def domain(mine: str = "READY", other: str = "READY", link: str = "CONNECTED") -> dict[str, Any]:
    return {
        "status": "UP",
        "nodes": [
            {"host": "192.0.2.11", "status": mine, "apart": [] if link == "CONNECTED" else [f"192.0.2.12 {link}"]},
            {"host": "192.0.2.12", "status": other, "apart": []},
        ],
    }


@pytest.mark.parametrize(
    ("told", "whole", "wrong"),
    [
        pytest.param(domain(), True, "", id="up"),
        pytest.param(domain(other="UNAVAILABLE"), False, "", id="a-peer-may-be-in-its-window"),
        pytest.param(domain(other="UNAVAILABLE"), True, "192.0.2.12 UNAVAILABLE", id="peer-down"),
        pytest.param(domain(link="DISCONNECTED"), True, "192.0.2.11 - 192.0.2.12 DISCONNECTED", id="apart"),
        pytest.param(domain(mine="WAITING_FOR_RECOVERY"), False, "192.0.2.11 WAITING", id="C32-not-yet"),
        pytest.param({"status": "UP", "nodes": []}, False, "the domain has no node", id="other-domain"),
    ],
)
def test_when_imex_is_ready(told: dict[str, Any], whole: bool, wrong: str) -> None:
    found = imex_wait.not_ready(told, "192.0.2.11", whole)
    assert found.startswith(wrong) and bool(found) == bool(wrong)


def imex(tmp_path: Path, ready_at: int) -> Programs:
    programs = Programs(tmp_path / "bin")
    up = ANSWER.replace("DOM", "UP").replace("MINE", "READY").replace("OTHER", "READY").replace("LINK", "CONNECTED")
    down = up.replace('"UP"', '"DOWN"').replace('"READY"', '"INITIALIZING"')
    programs.put(
        "nvidia-imex-ctl",
        f"echo x >> $DIR/calls\nif [ $(wc -l < $DIR/calls) -ge {ready_at} ]; then\ncat <<'J'\n{up}J\n"
        f"elif [ $(wc -l < $DIR/calls) = 1 ]; then echo 'cannot connect' >&2; exit 1\nelse\ncat <<'J'\n{down}J\nfi",
    )
    return programs


def test_c32_imex_is_awaited_through_its_start(tmp_path: Path) -> None:
    programs = imex(tmp_path, ready_at=3)
    code, told = call("imex_wait", programs, address="192.0.2.11", poll_s=0.05, timeout_s=30)
    assert (code, told["status"], len(programs.said("calls"))) == (0, "UP", 3)


def test_c32_imex_that_never_converges_says_in_which_state(tmp_path: Path) -> None:
    code, told = call("imex_wait", imex(tmp_path, ready_at=999), address="192.0.2.11", poll_s=0.05, timeout_s=1)
    assert code == 1 and "192.0.2.11 INITIALIZING" in told["msg"] and "persist.dat" in told["msg"]


def test_a_client_that_hangs_is_no_answer() -> None:
    def hangs(argv: list[str], timeout_s: float) -> Any:
        raise subprocess.TimeoutExpired(argv, timeout_s)

    assert imex_wait.ask(hangs)[0] is None
