"""The driver verdict: one row per line of the table it implements."""

from __future__ import annotations

from typing import Any

import pytest
from judging import snapshot_data

from kimi_runbook.driver_verdict import activation_after, driver_verdict, judge_driver, process_matches, same_version
from kimi_runbook.host_facts import DriverFacts, Holder, ModuleFacts
from kimi_runbook.snapshot import Snapshot

OLD, NEW = "570.133.20", "580.178.04"
UPGRADED: dict[str, Any] = {"on_disk": NEW, "loaded": OLD, "userspace": NEW, "flavour": "open"}
RIGHT: dict[str, Any] = {"on_disk": NEW, "loaded": NEW, "userspace": NEW, "flavour": "open", "smi_rc": 0}


@pytest.mark.parametrize(
    ("facts", "options", "verdict", "reason"),
    [
        pytest.param(RIGHT, {}, "ok", "on disk and loaded", id="all-equal"),
        pytest.param(RIGHT | {"userspace": None, "smi_rc": None}, {}, "ok", "loaded", id="unknown-is-not-wrong"),
        pytest.param(UPGRADED, {"activation": "reload"}, "reload", "is loaded", id="older-loaded"),
        pytest.param(UPGRADED, {}, "reboot", "site's way", id="reboot-is-the-default"),
        pytest.param(RIGHT | {"loaded": None}, {"activation": "reload"}, "reload", "no module", id="nothing-loaded"),
        pytest.param(
            UPGRADED,
            {"activation": "reload", "drm": ModuleFacts(loaded=True, refcnt=2)},
            "reboot",
            "display",
            id="console-owns-the-gpu",
        ),
        pytest.param(
            UPGRADED,
            {"activation": "reload", "drm": ModuleFacts(loaded=True, refcnt=0)},
            "reload",
            "loaded",
            id="drm-idle",
        ),
        pytest.param(
            UPGRADED | {"holders": (Holder(pid=1, name="jupyter"),)},
            {"activation": "reload"},
            "reboot",
            "jupyter",
            id="process-no-role-stops",
        ),
        pytest.param(RIGHT | {"on_disk": OLD}, {}, "install", f"{OLD} is on disk", id="disk-not-target"),
        pytest.param({}, {}, "install", "no module is on disk", id="nothing-installed"),
        pytest.param(
            {"loaded": OLD}, {"package_at_target": True}, "repair", "no module of theirs", id="module-not-built"
        ),
        pytest.param(RIGHT | {"flavour": "proprietary"}, {}, "install", "proprietary", id="flavour"),
        pytest.param(RIGHT | {"userspace": OLD}, {}, "install", "user-space", id="userspace"),
        pytest.param(RIGHT | {"smi_rc": 18}, {}, "repair", "exit status 18", id="library-mismatch"),
    ],
)
def test_verdict(facts: dict[str, Any], options: dict[str, Any], verdict: str, reason: str) -> None:
    judged = judge_driver(DriverFacts(**facts), target=NEW, **options)
    assert (judged.name, reason in judged.reason) == (verdict, True), judged.reason
    assert judged.to_json() == {"name": verdict, "reason": judged.reason}


def test_a_reboot_is_due_only_while_loaded_and_disk_differ() -> None:
    data = snapshot_data()
    data["driver"] |= {"on_disk": OLD, "loaded": OLD}
    wanted = {"version": NEW, "activation": "reboot"}
    steps = []
    for change in ({}, {"on_disk": NEW}, {"loaded": NEW}):
        data["driver"] |= change
        steps.append(driver_verdict(Snapshot.from_json(data), wanted).name)
    assert steps == ["install", "reboot", "ok"]


def test_activation_is_announced_as_it_will_be_judged() -> None:
    data = snapshot_data()
    data["driver"] |= {"on_disk": OLD, "loaded": OLD, "flavour": "proprietary"}
    assert activation_after(Snapshot.from_json(data), {"version": NEW, "activation": "reload"}).name == "reload"
    data["modules"]["nvidia_drm"] = {"loaded": True, "refcnt": 1}
    assert activation_after(Snapshot.from_json(data), {"version": NEW, "activation": "reload"}).name == "reboot"


@pytest.mark.parametrize(
    ("observed", "wanted", "same"),
    [
        ("580.178.04-1", "580.178.04-1", True),
        ("3:580.95.05-1.el9", "580.95.05", True),
        ("3:580.95.05-1.el9", "580.95.05-1.el9", True),
        ("580.178.04-2", "580.178.04-1", False),
        ("580.178.040-1", "580.178.04", False),
        ("595.84-1", "595.84", True),
    ],
)
def test_same_version(observed: str, wanted: str, same: bool) -> None:
    assert same_version(observed, wanted) is same


@pytest.mark.parametrize(
    ("name", "matches"),
    [("nvidia-persiste", True), ("VLLM::Worker_TP", True), ("vllm", True), ("vllm-thief", False), ("python3", False)],
)
def test_process_names_are_compared_as_the_kernel_cuts_them(name: str, matches: bool) -> None:
    assert process_matches(name, ["nvidia-persistenced", "VLLM::*", "vllm"]) is matches
