"""The dma-buf ladder: from what was observed of one host to the rung that passed, what it sets, and why. Pure.

A rung has a condition, which a snapshot tells, and is proved only by a test: a registration that worked. So a rung
can be not met (something has to be mended first), untested, failed (only then the next one is looked at) or passed.
Switching dma-buf off is the last rung: it is reached only when every rung before it was tested and failed, and taken
only with nvidia_peermem loaded; without that, traffic goes through host memory and nobody is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, data_file
from kimi_runbook.versions import compare_upstream

Json = Mapping[str, Any]

PASSED, UNTESTED, FAILED, NOT_MET = "passed", "untested", "failed", "not_met"
MET, NOT_TOLD = "met", "not_told"  # of a gate, which is no place to stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the ladder looks at; None where it could not be told.

    Attributes:
        rails: RDMA ports of the compute rails, as ``mlx5_0:1``, to their state.
        pairs: Whether network cards and GPUs are paired as rdma_topo says.
        flavour: Flavour of the loaded GPU driver: open or proprietary.
        kernel: Release of the running kernel.
        libmlx5: Version of libmlx5 in the engine image, as its file's name has it.
        libibverbs: Version of libibverbs there.
        override: Whether the driver exports dma-buf whatever the PCIe topology.
        peermem: Whether nvidia_peermem is loaded.
    """

    rails: Mapping[str, str | None]
    pairs: bool | None = None
    flavour: str | None = None
    kernel: str | None = None
    libmlx5: str | None = None
    libibverbs: str | None = None
    override: bool | None = None
    peermem: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RungTest:
    """One test of a rung: whether registration worked, what was seen, and where that is kept."""

    rung: str
    passed: bool
    observed: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one rung stands, and why."""

    rung: str
    state: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where the ladder ended.

    Attributes:
        rung: The rung to run with; empty when nothing on the ladder is left.
        state: passed, untested, not_met when the host has to be mended before this rung counts, or failed.
        reason: Why this one, in a sentence.
        settings: What it sets on top of the interconnect profile; empty unless passed or untested.
        steps: Every rung that was looked at.
    """

    rung: str
    state: str
    reason: str
    settings: Mapping[str, str]
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def decide(observed: Observed, tests: Sequence[RungTest] = ()) -> Decision:
    """Climb down the ladder and return where it ends.

    Args:
        observed: What a snapshot tells.
        tests: Tests that were made, in their order; the last one of a rung counts.

    Raises:
        RunbookError: A test names no rung of the ladder.
    """
    rungs = {rung.text("name"): rung for rung in data_file("dmabuf.yml").each("rungs")}
    results = {test.rung: test for test in tests}
    unknown = [name for name in results if name not in rungs]
    if unknown:
        raise RunbookError(
            where="interconnect_dmabuf_tests",
            observed=f"rung {', '.join(unknown)}",
            expected=", ".join(rungs),
            next_step="Correct the rung's name in the inventory.",
        )
    steps: list[Step] = []
    for name, rung in rungs.items():
        missing, untold = _CONDITIONS[name](observed)
        test = results.get(name)
        # What was tested once and failed need not be in place any more; what is lasting has to hold all the same.
        if missing and (test is None or test.passed or rung.flag("lasting", False)):
            return _ended(rung, [*steps, Step(rung=name, state=NOT_MET, why=missing)], {})
        if rung.flag("gate", False):
            steps.append(Step(rung=name, state=NOT_TOLD if untold else MET, why=untold or "as it has to be"))
            continue
        if test is not None and not test.passed:
            steps.append(Step(rung=name, state=FAILED, why=f"{test.observed} ({test.source})"))
            continue
        why = f"{test.observed} ({test.source})" if test else untold or "no test was recorded"
        steps.append(Step(rung=name, state=PASSED if test else UNTESTED, why=why))
        return _ended(rung, steps, rung.text_map("settings"))
    return Decision(
        rung="",
        state=FAILED,
        reason="every rung was tested and failed: there is no GPUDirect RDMA on this host",
        settings={},
        steps=tuple(steps),
    )


def _ended(rung: Fields, steps: Sequence[Step], settings: Mapping[str, str]) -> Decision:
    return Decision(
        rung=rung.text("name"),
        state=steps[-1].state,
        reason=f"{rung.text('title')}: {steps[-1].why}",
        settings=dict(settings),
        steps=tuple(steps),
    )


def _rails(observed: Observed) -> tuple[str, str]:
    down = [f"{name} {state or 'absent'}" for name, state in observed.rails.items() if state != "ACTIVE"]
    if down:
        return f"{', '.join(down)}; every rail has to be ACTIVE", ""
    if observed.pairs is False:
        return "network cards and GPUs are not paired as rdma_topo says", ""
    return "", "" if observed.pairs else "rdma_topo was not asked about the pairs of GPU and network card"


def _software(observed: Observed) -> tuple[str, str]:
    facts = data_file("dmabuf.yml")
    missing = []
    if observed.flavour not in (None, "open"):
        missing.append(f"the {observed.flavour} driver is loaded, dma-buf needs the open one")
    if observed.kernel is not None and _older(observed.kernel, facts.text("kernel")):
        missing.append(f"kernel {observed.kernel}, dma-buf needs {facts.text('kernel')}")
    if observed.libmlx5 is not None and _older(observed.libmlx5, facts.text("libmlx5")):
        missing.append(
            f"libmlx5 {observed.libmlx5} in the image, mlx5dv_reg_dmabuf_mr came with {facts.text('libmlx5')}"
        )
    core = _rdma_core(observed.libibverbs)
    if core is not None and core < facts.integer("rdma_core"):
        missing.append(f"libibverbs of rdma-core {core} in the image, ibv_reg_dmabuf_mr came with 34")
    told = {"driver flavour": observed.flavour, "kernel": observed.kernel, "libmlx5 of the image": observed.libmlx5}
    unknown = [name for name, value in told.items() if value is None]
    return ", ".join(missing), f"not told: {', '.join(unknown)}" if unknown else ""


def _override(observed: Observed) -> tuple[str, str]:
    name = f"NVreg_{data_file('dmabuf.yml').text('override_parameter')}"
    if observed.override:
        return "", ""
    return f"{name}=1 is not loaded: set it for the nvidia module and reboot, then test again", ""


def _nothing(observed: Observed) -> tuple[str, str]:
    del observed
    return "", ""


def _peermem(observed: Observed) -> tuple[str, str]:
    if observed.peermem:
        return "", ""
    return "nvidia_peermem is not loaded: rdma_peermem required, which needs DOCA-OFED", ""


_CONDITIONS: Mapping[str, Callable[[Observed], tuple[str, str]]] = {
    "rails": _rails,
    "software": _software,
    "topology_override": _override,
    "no_data_direct": _nothing,
    "peermem": _peermem,
}


def _older(version: str, than: str) -> bool:
    match = re.match(r"\d+(\.\d+)*", version)
    return match is not None and compare_upstream(match[0], than) < 0


def _rdma_core(version: str | None) -> int | None:
    """Return the number of rdma-core that a libibverbs of version 1.<abi>.<rdma-core>.<patch> comes from."""
    parts = (version or "").split(".")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdigit() else None


def observe(snapshot: Json, rails: Sequence[str], *, peermem_asked: bool = False) -> Observed:
    """Return what a snapshot tells of the ladder.

    Args:
        snapshot: The host's snapshot in its JSON form.
        rails: RDMA ports of the compute rails, as ``mlx5_0:1``.
        peermem_asked: Whether a role loads nvidia_peermem, so that it counts where it can exist.
    """
    states = {f"{port['name']}:{port['port']}": port.get("state") for port in snapshot.get("rdma_devices") or ()}
    driver = snapshot.get("driver") or {}
    stack = ((snapshot.get("image") or {}).get("stack") or {}).get("libraries") or ()
    parameter = (driver.get("params") or {}).get(data_file("dmabuf.yml").text("override_parameter"))
    rdma = snapshot.get("rdma") or {}
    can_exist = bool(rdma.get("ofed")) and peermem_asked
    return Observed(
        rails={name: states.get(name) for name in rails},
        flavour=driver.get("flavour"),
        kernel=(snapshot.get("os") or {}).get("kernel"),
        libmlx5=_library(stack, "libmlx5"),
        libibverbs=_library(stack, "libibverbs"),
        override=None if parameter is None else str(parameter) == "1",
        peermem=bool(rdma.get("peer_memory")) or can_exist,
    )


def _library(stack: Sequence[Json], name: str) -> str | None:
    versions = [row["version"] for row in stack if row["name"].startswith(f"{name}.so") and row.get("version")]
    return min(versions, key=lambda version: [int(part) for part in re.findall(r"\d+", version)], default=None)


def tests_of(rows: Sequence[Json]) -> tuple[RungTest, ...]:
    """Return the tests an inventory records: ``rung``, ``passed``, ``observed`` and ``source`` of each.

    Raises:
        RunbookError: A row lacks one of them, or says neither true nor false.
    """
    found = []
    for number, row in enumerate(rows):
        lacking = [key for key in ("rung", "observed", "source") if not str(row.get(key) or "").strip()]
        if lacking or not isinstance(row.get("passed"), bool):
            raise RunbookError(
                where=f"interconnect_dmabuf_tests, entry {number + 1}",
                observed=f"no {', '.join(lacking) or 'passed'}",
                expected="rung, passed (true or false), observed and source: what was seen, and where it is kept",
                next_step="Complete the entry in the inventory: a rung is left only on evidence.",
            )
        found.append(
            RungTest(
                rung=str(row["rung"]), passed=row["passed"], observed=str(row["observed"]), source=str(row["source"])
            )
        )
    return tuple(found)


def test_of_log(rung: str, text: str, source: str) -> RungTest | None:
    """Return what a log of NCCL or perftest proves of the rung it was written under; None when it proves nothing."""
    facts = data_file("dmabuf.yml")
    for pattern, passed in ((facts.text("log_failed"), False), (facts.text("log_passed"), True)):
        line = next((line for line in text.splitlines() if re.search(pattern, line)), None)
        if line is not None:
            return RungTest(rung=rung, passed=passed, observed=" ".join(line.split())[:200], source=source)
    return None
