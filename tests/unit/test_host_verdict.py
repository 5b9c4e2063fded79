"""A host's verdict in a word: stop before all, then the driver, then what else is due."""

from __future__ import annotations

import pytest

from kimi_runbook.findings import make_finding
from kimi_runbook.host_verdict import host_verdict

CASES = [
    ([], "ok", (), ()),
    (["clock.unsynchronized", "host.simulated"], "ok", (), ()),
    (["driver.reload", "package.missing"], "reload", ("install", "reload"), ("driver.reload",)),
    (["driver.install", "driver.reboot"], "install", ("install", "reboot"), ("driver.install",)),
    (["driver.repair", "driver.reboot"], "repair", ("repair", "reboot"), ("driver.repair",)),
    (["driver.reboot", "driver.initramfs"], "reboot", ("configure", "reboot"), ("driver.reboot",)),
    (["image.absent", "engine.absent"], "install", ("pull", "restart"), ("image.absent",)),
    (["engine.args", "unit.inactive"], "reload", ("restart",), ("engine.args", "unit.inactive")),
    (["driver.install", "disk.short", "disk.short"], "stop", ("install",), ("disk.short",)),
]


@pytest.mark.parametrize(("codes", "name", "actions", "deciding"), CASES)
def test_host_verdict(codes: list[str], name: str, actions: tuple[str, ...], deciding: tuple[str, ...]) -> None:
    findings = [make_finding(code, host="k3-a", observed="x", expected="y", role="rdma") for code in codes]
    verdict = host_verdict(findings)
    assert (verdict.name, verdict.actions, verdict.codes) == (name, actions, deciding)
    assert verdict.to_json() == {"name": name, "actions": list(actions), "codes": list(deciding)}
