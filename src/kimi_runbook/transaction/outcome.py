"""How a run ended on each host, kept while it goes on: a file that is always true, and the table people read last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from kimi_runbook.reading import Fields
from kimi_runbook.shapes import read
from kimi_runbook.transaction.state import span

SCHEMA_VERSION = 1
STATES = ("not_begun", "open", "failed", "unreachable", "rolled_back", "done")
"""``open``: at a step, or stopped there with the roll. ``failed``: at a step, for a reason. From the heaviest on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutcome:
    """One host's end, or where it stands.

    Attributes:
        state: One of STATES.
        step: The step it stands at, or that failed.
        drained: Whether it was drained and has not been restored.
        reason: Why it failed, in the words of the task.
        began: When it began, in seconds of the epoch; 0 while it has not.
        seconds: Time from then to the last thing recorded.
    """

    state: str = "not_begun"
    step: str = ""
    drained: bool = False
    reason: str = ""
    began: int = 0
    seconds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A whole run: which hosts, in which batches, and how each stands."""

    run_id: str
    plan_digest: str = ""
    lock_digest: str = ""
    batches: tuple[tuple[str, ...], ...] = ()
    hosts: Mapping[str, HostOutcome] = field(default_factory=dict)

    @classmethod
    def of(cls, run_id: str, plan_digest: str, lock_digest: str, batches: Sequence[Sequence[str]]) -> Outcome:
        """Return the outcome of a run that has begun nothing yet."""
        return cls(
            run_id=run_id,
            plan_digest=plan_digest,
            lock_digest=lock_digest,
            batches=tuple(tuple(batch) for batch in batches),
            hosts={host: HostOutcome() for batch in batches for host in batch},
        )

    def with_host(self, host: str, **changes: object) -> Outcome:
        """Return the outcome with one host's part changed."""
        one = replace(self.hosts.get(host, HostOutcome()), **changes)  # type: ignore[arg-type]  # checked by its users' tests
        return replace(self, hosts={**self.hosts, host: one})

    def to_json(self) -> dict[str, object]:
        """Return the JSON form, with what to do next."""
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self),
            "batches": [list(batch) for batch in self.batches],
            "next": next_step(self),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object], source: str = "outcome") -> Outcome:
        """Read the JSON form; RunbookError when it is not an outcome."""
        root = Fields(data, source, "Look at the hosts with playbooks/audit.yml.")
        root.require_schema(SCHEMA_VERSION)
        rows = Fields({str(n): batch for n, batch in enumerate(root.optional_sequence("batches") or ())}, source)
        hosts = root.fields("hosts")
        return cls(
            run_id=root.text("run_id"),
            plan_digest=root.optional_text("plan_digest") or "",
            lock_digest=root.optional_text("lock_digest") or "",
            batches=tuple(rows.texts(key) for key in rows.names()),
            hosts={host: read(HostOutcome, hosts.fields(host)) for host in hosts.names()},
        )


def unsettled_before(outcome: Outcome, batch: Collection[str]) -> tuple[str, ...]:
    """Return hosts of earlier batches that have not ended well: the roll must not go on past them."""
    earlier: list[str] = []
    for one in outcome.batches:
        if set(one) & set(batch):
            break
        earlier += one
    return tuple(host for host in earlier if outcome.hosts[host].state != "done")


def words(one: HostOutcome) -> str:
    """Return one host's end in words."""
    where = f"{'drained ' if one.drained else ''}at step {one.step}"
    return {
        "not_begun": "not begun",
        "open": f"{where}: the run ended here",
        "failed": f"{where}: failed",
        "unreachable": f"{where}: not reached any more",
        "rolled_back": "rolled back to the previous lock",
        "done": "done",
    }[one.state]


def next_step(outcome: Outcome) -> str:
    """Return the next command, or that none is needed."""
    states = {one.state for one in outcome.hosts.values()}
    again = "ansible-playbook playbooks/provision.yml"
    if states <= {"done"}:
        return "ansible-playbook playbooks/serve.yml"
    if states & {"open", "unreachable"}:
        return f"{again} -e take_over={outcome.run_id}"
    if "rolled_back" in states:
        return "Read why the canary failed, correct the lock, then: ansible-playbook playbooks/audit.yml"
    return again


def render(outcome: Outcome) -> str:
    """Return the table: one line per host by batch, the reason of a failure below it, and the next command."""
    width = max([len(host) for host in outcome.hosts] + [4])
    lines = [f"{'HOST'.ljust(width)}  BATCH  TIME      END"]
    numbered = {host: n for n, batch in enumerate(outcome.batches, 1) for host in batch}
    for host, one in outcome.hosts.items():
        taken = span(one.seconds) if one.state != "not_begun" else "-"
        lines.append(f"{host.ljust(width)}  {numbered.get(host, '-')!s:<5}  {taken:<8}  {words(one)}")
        if one.reason:
            lines += [f"{'':{width}}  {line}" for line in one.reason.strip().splitlines()]
    lines.append(f"next: {next_step(outcome)}")
    return "\n".join(lines)
