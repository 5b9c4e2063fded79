"""Changes no role makes yet (data/by_hand.yml): no unfinished work, and some of them stop a driver's upgrade."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kimi_runbook.findings import Finding
from kimi_runbook.reading import data_file

_INSTALL = "driver.install"


def unsettled(findings: Iterable[Finding], roles: Collection[str]) -> list[Finding]:
    """Return the changes that are left for roles which are done; what is made by hand is not theirs."""
    by_hand = set(data_file("by_hand.yml").texts("codes"))
    return [f for f in findings if f.severity == "change" and f.role in roles and f.code not in by_hand]


def left_behind(findings: Iterable[Finding]) -> list[Finding]:
    """Return what the installation of a new driver would leave at another version, on hosts that are to get one."""
    found = list(findings)
    bound = set(data_file("by_hand.yml").texts("bound_to_the_driver"))
    upgraded = {finding.host for finding in found if finding.code == _INSTALL}
    return [finding for finding in found if finding.code in bound and finding.host in upgraded]
