"""Batches that know the engine and the fabric: a replica and an NVLink domain change as one, never in parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kimi_runbook.errors import RunbookError

Groups = Iterable[Sequence[str]]


def units(hosts: Sequence[str], replicas: Groups, domains: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Return the hosts in the smallest groups that may change together, in the order of their first host.

    Hosts that share a replica or an NVLink domain are one unit, and so are units that a replica or a domain joins.

    Args:
        hosts: The hosts to change, in inventory order.
        replicas: The nodes of each engine; nodes that are not to change are ignored.
        domains: Host to the name of its NVLink domain; hosts without one are left out.
    """
    by_domain: dict[str, list[str]] = {}
    for host in hosts:
        if domains.get(host):
            by_domain.setdefault(domains[host], []).append(host)
    joined = {host: {host} for host in hosts}
    for group in (*replicas, *by_domain.values()):
        members = [host for host in group if host in joined]
        together = set().union(*(joined[host] for host in members)) if members else set()
        for host in together:
            joined[host] = together
    found: list[tuple[str, ...]] = []
    for host in hosts:
        if not any(host in unit for unit in found):
            found.append(tuple(one for one in hosts if one in joined[host]))
    return tuple(found)


def batches(  # noqa: PLR0913 - what a fleet is made of
    hosts: Sequence[str],
    sizes: Sequence[int | str],
    *,
    replicas: Sequence[Sequence[str]],
    domains: Mapping[str, str],
    serving: Iterable[Sequence[str]] = (),
    min_up: int = 0,
    lenient: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """Cut the hosts to change into batches; the first is the canary.

    Args:
        hosts: The hosts to change, in inventory order.
        sizes: Units per batch, a number or a share of all units such as ``"25%"`` (rounded down, at least one); the
            last one repeats. ``[1, "25%"]`` is a canary, then quarters.
        replicas: The nodes of each engine of the fleet.
        domains: Host to the name of its NVLink domain.
        serving: The replicas that serve now. Only these count as capacity.
        min_up: Replicas that must keep serving; batches are made smaller for its sake.
        lenient: Give a unit that takes down too many a batch of its own instead of raising: for a plan that is only
            shown. What applies it asks again.

    Raises:
        RunbookError: No size, or one that is no positive number or share; or one unit alone would take down more
            replicas than may go.
    """
    cut = units(hosts, replicas, domains)
    counts = [_count(size, len(cut)) for size in sizes]
    if not counts:
        raise _bad_size("none")
    up = [frozenset(nodes) for nodes in serving]
    may_go = len(up) - min_up
    found: list[list[tuple[str, ...]]] = []
    for unit in cut:
        alone = _taken_down([unit], up)
        if min_up and alone > may_go and not lenient:
            raise RunbookError(
                where="provision_min_up",
                observed=f"{len(up)} of {len(replicas)} replicas serve, and changing {', '.join(unit)} together "
                f"takes down {alone}",
                expected=f"{min_up} that keep serving",
                next_step="Bring more replicas up first, or lower provision_min_up for this window. "
                "Nothing was changed.",
            )
        limit = counts[min(len(found) - 1, len(counts) - 1)] if found else 0
        fits = found and len(found[-1]) < limit and (not min_up or _taken_down([*found[-1], unit], up) <= may_go)
        if fits:
            found[-1].append(unit)
        else:
            found.append([unit])
    return tuple(tuple(host for unit in batch for host in unit) for batch in found)


def _taken_down(batch: Iterable[Sequence[str]], up: Iterable[frozenset[str]]) -> int:
    hosts = {host for unit in batch for host in unit}
    return sum(bool(nodes & hosts) for nodes in up)


def _count(size: int | str, total: int) -> int:
    match = re.fullmatch(r"(\d+)(%?)", str(size)) if not isinstance(size, bool) else None
    if match is None or int(match[1]) == 0 or (match[2] and int(match[1]) > 100):
        raise _bad_size(repr(size))
    return max(1, total * int(match[1]) // 100) if match[2] else int(match[1])


def _bad_size(observed: str) -> RunbookError:
    return RunbookError(
        where="batch sizes",
        observed=observed,
        expected='positive numbers or shares, e.g. [1, "25%"]',
        next_step="Correct provision_batches in the inventory.",
    )
