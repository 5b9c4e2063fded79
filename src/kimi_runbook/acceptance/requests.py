"""About how many requests a plan's steps send to the model, for those who wait for them or pay for them."""

from __future__ import annotations

from kimi_runbook.acceptance import step2_short_request, step4_concurrency, step6_observation
from kimi_runbook.acceptance.plan import AcceptancePlan
from kimi_runbook.acceptance.progress import Batch

# The protocol of shared_prefix/protocol.py, when no family is left out: too-short 2, zero-prefix 2, short-suffix 3,
# resend 2, long-suffix 3, changed-system 1.
_SHARED_PREFIX = 13


def requests_of(plan: AcceptancePlan) -> dict[int, tuple[Batch, ...]]:
    """Return about what each planned step sends, in order; steps that only ask the nodes are left out."""
    batches = {
        2: (Batch(requests=step2_short_request.requests_of(plan)),),
        3: (Batch(requests=_SHARED_PREFIX),),
        4: step4_concurrency.batches_of(plan),
        6: (Batch(requests=step6_observation.requests_of(plan) if plan.observe_s else 0),),
    }
    return {step: batches[step] for step in plan.steps if step in batches}
