"""What no role does yet neither counts as unfinished work nor is left behind in silence."""

import pytest

from kimi_runbook.by_hand import left_behind, unsettled
from kimi_runbook.findings import Finding, catalogue
from kimi_runbook.reading import data_file


def finding(code: str, host: str = "k3-a") -> Finding:
    entry = catalogue()[code]
    return Finding(
        code=code,
        severity=entry.text("severity"),
        host=host,
        role=entry.text("role"),
        observed="seen",
        expected="wanted",
        source="here",
        next_step="Do it.",
        action=entry.optional_text("action"),
    )


@pytest.mark.parametrize("code", data_file("by_hand.yml").texts("codes"))
def test_a_change_by_hand_is_a_change_and_no_role_s_unfinished_work(code: str) -> None:
    one = finding(code)
    assert one.severity == "change"
    assert unsettled([one], [one.role]) == []


def test_a_role_s_own_change_is_unfinished() -> None:
    one = finding("driver.install")
    assert unsettled([one], ["gpu_driver"]) == [one]
    assert unsettled([one], ["rdma"]) == []


def test_a_new_driver_does_not_leave_its_fabric_packages_behind() -> None:
    install, companion = finding("driver.install"), finding("driver.companion")
    assert left_behind([install, companion]) == [companion]
    assert left_behind([companion]) == []
    assert left_behind([install, finding("driver.companion", "k3-b")]) == []
