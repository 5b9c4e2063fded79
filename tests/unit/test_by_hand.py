"""What no role does yet neither counts as unfinished work nor is left behind in silence."""

import pytest

from kimi_runbook.findings import Finding, catalogue, left_behind, unsettled

BY_HAND = sorted(code for code, entry in catalogue().items() if entry.flag("by_hand", False))


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


def test_what_no_role_makes_yet() -> None:
    """One more here is one more thing an operator has to do; one less came with a role."""
    assert [
        *("driver.companion", "engine.older_than_driver", "fabric.package_missing"),
    ] == BY_HAND
    bound = [code for code, entry in catalogue().items() if entry.flag("bound_to_the_driver", False)]
    assert sorted(bound) == ["driver.companion", "fabric.package_missing"] and set(bound) <= set(BY_HAND)


@pytest.mark.parametrize("code", BY_HAND)
def test_a_change_by_hand_is_a_change_and_no_role_s_unfinished_work(code: str) -> None:
    one = finding(code)
    assert one.severity == "change"
    assert unsettled([one], [one.role]) == []


def test_what_is_left_of_the_fabric_is_what_the_lock_does_not_name() -> None:
    """What it names is declared by fabric_services, and judged as any package; so is a unit that a role starts."""
    assert {catalogue()[code].text("role") for code in ("driver.companion", "fabric.package_missing")} == {
        "fabric_services"
    }
    for code in ("fabric.service", "driver.companion_process", "cdi.stale", "cdi.missing", "fabric.umad"):
        one = finding(code)
        assert unsettled([one], [one.role]) == [one]


def test_a_role_s_own_change_is_unfinished() -> None:
    one = finding("driver.install")
    assert unsettled([one], ["gpu_driver"]) == [one]
    assert unsettled([one], ["rdma"]) == []


def test_a_new_driver_does_not_leave_its_fabric_packages_behind() -> None:
    install, companion = finding("driver.install"), finding("driver.companion")
    assert left_behind([install, companion]) == [companion]
    assert left_behind([companion]) == []
    assert left_behind([install, finding("driver.companion", "k3-b")]) == []
