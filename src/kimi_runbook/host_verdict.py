"""The verdict of one host in a word, from its findings: ok, reload, reboot, install, repair or stop. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kimi_runbook.findings import ACTIONS, Finding

HostVerdictName = Literal["ok", "reload", "reboot", "install", "repair", "stop"]

VERDICTS: tuple[HostVerdictName, ...] = ("stop", "repair", "install", "reboot", "reload", "ok")
"""From the heaviest to the lightest."""

_DRIVER: tuple[HostVerdictName, ...] = ("repair", "install", "reboot", "reload")
# What a due action says of a host whose driver is right: something is not there yet, or what runs is older than it.
_BY_ACTION: dict[str, HostVerdictName] = {
    "repair": "repair",
    "install": "install",
    "configure": "install",
    "pull": "install",
    "reboot": "reboot",
    "reload": "reload",
    "restart": "reload",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostVerdict:
    """What one host needs.

    Attributes:
        name: ``stop`` when any finding forbids a change; else the driver's verdict; else, with the driver right,
            ``install`` when packages, files, settings or the image are not there yet, ``reload`` when only what runs is
            older than what is there, ``ok`` when nothing is due. Warnings do not change it.
        actions: What is due, in the order in which it is done; also where the verdict is stop.
        codes: The codes of the findings that decided.
    """

    name: HostVerdictName
    actions: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"name": self.name, "actions": list(self.actions), "codes": list(self.codes)}


def host_verdict(findings: Iterable[Finding]) -> HostVerdict:
    """Return the verdict of the host these findings are about."""
    found = tuple(findings)
    due = {finding.action for finding in found}
    actions = tuple(action for action in ACTIONS if action in due)
    stopping = _codes(finding for finding in found if finding.severity == "stop")
    if stopping:
        return HostVerdict(name="stop", actions=actions, codes=stopping)
    codes = {finding.code for finding in found}
    for name in _DRIVER:
        if f"driver.{name}" in codes:
            return HostVerdict(name=name, actions=actions, codes=(f"driver.{name}",))
    names = {_BY_ACTION[action] for action in actions}
    for name in VERDICTS:
        if name in names:
            deciding = (finding for finding in found if finding.action and _BY_ACTION[finding.action] == name)
            return HostVerdict(name=name, actions=actions, codes=_codes(deciding))
    return HostVerdict(name="ok")


def _codes(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(finding.code for finding in findings))
