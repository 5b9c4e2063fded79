"""The role of RDMA: modules and their order, peer memory only where it can exist, refusals explained (C49 to C52)."""

from pathlib import Path
from typing import Any

import kernel_modules
import pytest
import yaml
from host_tree import Tree
from node_programs import Programs, call

from kimi_runbook import rdma
from kimi_runbook.errors import RunbookError

DEFAULT = ["mlx5_core", "mlx5_ib", "ib_uverbs", "ib_umad", "rdma_cm"]
NIC = [{"name": "mlx5_0", "port": 1, "state": "ACTIVE"}]
OFED = "OFED-internal-25.10-1.2.3"


def snapshot(ofed: str | None = None, devices: Any = NIC, sw_mng: int = 0) -> dict[str, Any]:
    return {"rdma": {"ofed": ofed}, "rdma_devices": devices, "fabric": {"nvswitches": 0, "sw_mng": sw_mng}}


@pytest.mark.parametrize(
    ("choice", "seen", "loaded"),
    [
        pytest.param("never", snapshot(OFED), False, id="never"),
        pytest.param("possible", snapshot(OFED), True, id="beside-DOCA-OFED"),
        pytest.param("possible", snapshot(None), False, id="inbox-mlx5-is-not-applicable"),
        pytest.param("possible", snapshot(OFED, []), False, id="C52-no-device"),
        pytest.param("required", snapshot(None), True, id="required-is-asked-for-and-stops"),
    ],
)
def test_peer_memory_is_loaded_where_it_can_exist(choice: str, seen: dict[str, Any], loaded: bool) -> None:
    found = rdma.host_modules(DEFAULT, choice, seen, {"platform": "h200"})
    assert found == DEFAULT + (["nvidia_peermem"] if loaded else [])


def test_modules_stand_behind_what_they_stand_on() -> None:
    asked = ["nvidia-peermem", "gdrdrv", "rdma_cm", "ib-uverbs", "mlx5_ib", "mlx5_core"]
    found = rdma.host_modules(asked, "never", snapshot(), {"platform": "h200"})
    assert found == ["mlx5_core", "mlx5_ib", "ib_uverbs", "rdma_cm", "gdrdrv", "nvidia_peermem"]


@pytest.mark.parametrize(
    ("platform", "sw_mng", "needed"),
    [("b300", 0, True), ("h200_nvl", 4, True), ("h200", 0, False), ("gb300", 0, False), ("lab", 0, False)],
)
def test_c28_nvlink5_gets_ib_umad_whatever_the_site_asks_for(platform: str, sw_mng: int, needed: bool) -> None:
    found = rdma.host_modules(["mlx5_ib"], "never", snapshot(sw_mng=sw_mng), {"platform": platform})
    assert ("ib_umad" in found) is needed


def test_a_word_that_is_no_choice_is_refused() -> None:
    with pytest.raises(RunbookError, match="never, possible, required"):
        rdma.host_modules(DEFAULT, "True", snapshot(), {"platform": "h200"})


def test_the_snapshot_is_asked_whatever_the_answer() -> None:
    assert rdma.asked_modules(["mlx5_core"]) == ["mlx5_core", "ib_umad", "nvidia_peermem"]


def test_c51_nothing_restarts_openibd(project_root: Path) -> None:
    """A restart drops every link, and hangs on nvidia_peermem."""
    for path in [*project_root.glob("roles/*/tasks/*.yml"), *project_root.glob("roles/*/handlers/*.yml")]:
        for task in yaml.safe_load(path.read_text(encoding="utf-8")) or []:
            assert "openibd" not in str(task), path


# Loading.


def test_what_is_not_loaded_now_is_loaded_in_its_order(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.put("/sys/module/mlx5_core/refcnt", "1\n")
    assert kernel_modules.missing(["mlx5_core", "mlx5-ib", "ib_umad"], tree.probe()) == ["mlx5-ib", "ib_umad"]


INVALID = "modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument"
SYMBOLS = "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client"


@pytest.mark.parametrize(
    ("name", "said", "log", "told"),
    [
        pytest.param("nvidia_peermem", INVALID, SYMBOLS, "gpu-operator#2868", id="C49-built-before-OFED"),
        pytest.param("nvidia-peermem", INVALID, SYMBOLS, "gpu-operator#2868", id="C49-other-spelling"),
        pytest.param("nvidia_peermem", INVALID, "", "rdma_peermem to never", id="inbox-mlx5"),
        pytest.param(
            "mlx5_ib", "modprobe: FATAL: Module mlx5_ib not found", "", "take it out of rdma_modules", id="C52"
        ),
        pytest.param("mlx5_ib", "", "mlx5_ib: Unknown symbol x\nusb: y", "log: mlx5_ib: Unknown symbol x.", id="log"),
    ],
)
def test_a_refusal_says_what_to_do(name: str, said: str, log: str, told: str) -> None:
    text = kernel_modules.explained(name, said, log)
    assert told in text and "usb" not in text and text.startswith(f"{name} was not loaded")


def programs(tmp_path: Path, modprobe: str) -> Programs:
    found = Programs(tmp_path / "bin")
    found.put("modprobe", f"echo $1 >> $DIR/modprobe.said\n{modprobe}")
    found.put("journalctl", f"echo '{SYMBOLS}'")
    return found


def test_modules_are_loaded_one_after_the_other(tmp_path: Path) -> None:
    seen = programs(tmp_path, "exit 0")
    code, told = call("kernel_modules", seen, modules=["kimi_test_a", "kimi_test_b"])
    assert (code, told["changed"], told["loaded"]) == (0, True, ["kimi_test_a", "kimi_test_b"])
    assert seen.said("modprobe.said") == ["kimi_test_a", "kimi_test_b"]


def test_check_mode_loads_nothing(tmp_path: Path) -> None:
    seen = programs(tmp_path, "exit 0")
    assert call("kernel_modules", seen, check=True, modules=["kimi_test_a"])[1]["changed"] is True
    assert seen.said("modprobe.said") == []


def test_c49_a_refused_peermem_names_the_rebuild(tmp_path: Path) -> None:
    seen = programs(tmp_path, f'[ $1 = kimi_test_a ] || {{ echo "{INVALID}" >&2; exit 1; }}')
    code, told = call("kernel_modules", seen, modules=["kimi_test_a", "nvidia_peermem", "kimi_test_b"])
    assert code == 1 and "disagrees about version of symbol" in told["msg"] and "gpu-operator#2868" in told["msg"]
    assert seen.said("modprobe.said") == ["kimi_test_a", "nvidia_peermem"]


def test_a_modprobe_that_hangs_is_ended(tmp_path: Path) -> None:
    code, told = call("kernel_modules", programs(tmp_path, "sleep 60"), modules=["kimi_test_a"], timeout_s=1)
    assert code == 1 and "did not end within 1 s" in told["msg"]
