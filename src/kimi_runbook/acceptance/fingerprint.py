"""What a run may be compared by, gathered from what its steps observed."""

from __future__ import annotations

from collections import Counter

from kimi_runbook.acceptance.client import CLIENT_VERSION
from kimi_runbook.acceptance.context import Context
from kimi_runbook.reading import digest_of
from kimi_runbook.record import Fingerprint


def fingerprint_of(context: Context) -> Fingerprint:
    """Return the run's fingerprint; what no step observed is None."""
    plan, geometry = context.plan, context.geometry
    return Fingerprint(
        image_digest=context.observed("image_digest"),
        engine_version=context.observed("engine_version"),
        driver=context.observed("driver"),
        gpus={
            host.name: dict(sorted(Counter(gpu.name or "unnamed" for gpu in plan.snapshots[host.name].gpus).items()))
            for host in plan.hosts
        },
        interconnect=plan.interconnect,
        parallelism=dict(plan.engine.parallelism),
        nodes=plan.engine.nodes if plan.hosts else None,
        block_size_tokens=geometry.block_size if geometry else None,
        retention=geometry.retention if geometry else None,
        prefix_caching=geometry.prefix_caching if geometry else None,
        request_set=digest_of(context.requests),
        client=CLIENT_VERSION,
    )
