"""Findings: judged differences between what is and what must be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache

from kimi_runbook.reading import Fields, data_file

SEVERITIES = ("stop", "change", "warn", "info")
"""From the heaviest to the lightest."""

ACTIONS = ("repair", "install", "configure", "reload", "reboot", "pull", "restart")
"""What a plan may hold, in the order in which it is done on a host."""

FLEET = "fleet"
"""The host of a finding about several hosts; its text names them."""

CATALOGUE = (
    *("findings.yml", "findings_driver.yml", "findings_gpu.yml", "findings_host.yml", "findings_service.yml"),
    "findings_fleet.yml",
)
"""The files of the table of findings, by subject."""


@cache
def catalogue() -> Mapping[str, Fields]:
    """Return code to its entry in the table of findings, in the order of the files."""
    return {code: data_file(name).fields(code) for name in CATALOGUE for code in data_file(name).names()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One judged difference.

    Attributes:
        code: Stable name, a key of the table of findings.
        severity: stop, change, warn or info.
        host: Inventory name, or FLEET.
        role: The role that acts, or that found it.
        observed: What is there.
        expected: What must be there.
        source: Where the expectation comes from.
        next_step: What to do.
        action: What a plan does about it; None unless the severity is change.
    """

    code: str
    severity: str
    host: str
    role: str
    observed: str
    expected: str
    source: str
    next_step: str
    action: str | None = None

    @property
    def title(self) -> str:
        """The finding's name in words."""
        return catalogue()[self.code].text("title")

    @property
    def page(self) -> str:
        """The page that explains the finding, with its anchor."""
        return f"docs/checks/{catalogue()[self.code].text('page')}.md#{anchor(self.code)}"

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Finding:
        """Read the JSON form."""
        fields = Fields(data, "finding")
        texts = {name: fields.optional_text(name) or "" for name in cls.__dataclass_fields__ if name != "action"}
        return cls(**texts, action=fields.optional_text("action"))


def anchor(code: str) -> str:
    """Return the anchor a heading of this code gets on a rendered page: dots are dropped, the rest stays."""
    return code.replace(".", "")


def make_finding(  # noqa: PLR0913 - the fields of a finding that are not in the catalogue
    code: str, *, host: str, observed: str, expected: str, subject: str = "", role: str | None = None
) -> Finding:
    """Build a finding from the catalogue.

    Args:
        code: A key of the table of findings.
        host: Inventory name, or FLEET.
        observed: What is there.
        expected: What must be there.
        subject: Package, file, unit, ... the finding is about; fills ``{subject}`` of the next step.
        role: The role that declared the subject, where the catalogue names none.

    Raises:
        KeyError: The table has no such code.
    """
    entry = catalogue()[code]
    acting = role or entry.text("role")
    return Finding(
        code=code,
        severity=entry.text("severity"),
        host=host,
        role=acting,
        observed=observed.strip() or "nothing",
        expected=expected,
        source=entry.text("source"),
        next_step=entry.text("next_step")
        .replace("{host}", host)
        .replace("{subject}", subject)
        .replace("{playbook}", _playbook(acting)),
        action=entry.optional_text("action"),
    )


def _playbook(role: str) -> str:
    """Return the playbook that runs a role's tasks."""
    return "playbooks/serve.yml" if role == "engine" else "playbooks/provision.yml"


def unsettled(findings: Iterable[Finding], roles: Collection[str]) -> list[Finding]:
    """Return the changes that are left for roles which are done; what is made by hand is not theirs."""
    return [
        finding
        for finding in findings
        if finding.severity == "change"
        and finding.role in roles
        and not catalogue()[finding.code].flag("by_hand", False)
    ]


def left_behind(findings: Iterable[Finding]) -> list[Finding]:
    """Return what the installation of a new driver would leave at another version, on hosts that are to get one."""
    found = list(findings)
    upgraded = {finding.host for finding in found if finding.code == "driver.install"}
    return [
        finding
        for finding in found
        if finding.host in upgraded and catalogue()[finding.code].flag("bound_to_the_driver", False)
    ]


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort the heaviest first, then by host, keeping the judge's order within a host."""
    return tuple(sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.host)))


def stops(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that forbid any change."""
    return tuple(finding for finding in findings if finding.severity == "stop")
