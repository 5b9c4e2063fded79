"""The steps of one host's change, in their order, and which of them a plan makes due."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kimi_runbook.errors import RunbookError


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its name in the state file and the role and entry point that it plays.

    Attributes:
        disruptive: Whether the engine must not run meanwhile, so that the host is drained first.
        after: Roles whose work brings this step with it: what stands on another driver is proved, or started, anew.
    """

    name: str
    role: str
    entry: str = "main"
    disruptive: bool = False
    after: tuple[str, ...] = ()


DRAIN, AUDIT, RESTORE = "drain", "audit", "restore"

STEPS = (
    Step(DRAIN, "node_drain", "drain"),
    Step("gpu_driver", "gpu_driver", disruptive=True),
    Step("container_runtime", "container_runtime", disruptive=True, after=("gpu_driver",)),
    Step("rdma", "rdma", disruptive=True, after=("gpu_driver",)),
    # Once rdma has been played: fabric manager needs ib_umad.
    Step("fabric_services", "fabric_services", disruptive=True, after=("gpu_driver",)),
    Step("engine_image", "engine_image"),
    Step("model_weights", "model_weights"),
    Step("interconnect", "interconnect"),
    Step(AUDIT, "host_snapshot", "again"),
    Step(RESTORE, "node_drain", "restore"),
)
"""Every step there is. A host that needs no disruptive one keeps serving: nothing is drained, nothing restored."""

NAMES = tuple(step.name for step in STEPS)
ROLES = tuple(dict.fromkeys(step.role for step in STEPS if step.name not in (AUDIT,)))


def due(
    planned: Collection[str],
    played: Collection[str],
    interrupted: Collection[str] = (),
    begun: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the names of the steps that are due on a host, in order.

    Args:
        planned: Roles that its plan names.
        played: Roles that this frame plays; a role that is planned and not among them is left to others.
        interrupted: Steps that earlier runs had begun and not ended. They are played again even where the plan names
            nothing for them: what a killed task leaves behind need not be visible to a snapshot.
        begun: Steps that earlier run had begun; a drained host is restored, whatever is planned now.

    Raises:
        RunbookError: ``played`` names a role the frame has no step for.
    """
    unknown = sorted(set(played) - set(ROLES))
    if unknown:
        raise RunbookError(
            where="host_transaction_roles",
            observed=", ".join(unknown),
            expected=f"roles of the frame: {', '.join(ROLES)}",
            next_step="Remove the name, or correct its spelling.",
        )
    wanted = {
        step.name
        for step in STEPS
        if step.name not in (DRAIN, AUDIT, RESTORE)
        and step.role in played
        and (
            step.name in interrupted or any(role in planned or role in interrupted for role in (step.role, *step.after))
        )
    }
    disruptive = any(step.name in wanted and step.disruptive for step in STEPS)
    drained = "node_drain" in played and (disruptive or DRAIN in begun)
    if drained:
        wanted.add(RESTORE)
        # One that was interrupted while draining, or later, is drained once more: it may have come back by a reboot.
        if disruptive or DRAIN in interrupted:
            wanted.add(DRAIN)
    return tuple(name for name in NAMES if name in wanted or name == AUDIT)


def entries() -> Mapping[str, Mapping[str, str]]:
    """Return step name to ``role`` and ``entry``, as the frame looks them up."""
    return {step.name: {"role": step.role, "entry": step.entry} for step in STEPS}
