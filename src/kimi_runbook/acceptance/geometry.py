"""The engine's cache geometry, read back from the running engine: what it says, not what it was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_runbook.acceptance.metrics import CACHE_CONFIG, Reading


class UnknownGeometryError(Exception):
    """The engine does not say enough to compute what a healthy cache would do; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How the engine keeps and finds prefixes.

    Attributes:
        block_size: Tokens per block, the step hits come in.
        num_gpu_blocks: Blocks of the cache (one engine), or None when the engine does not say. The label keeps its
            name on CPU.
        prefix_caching: Whether prefix caching is on.
        recurrent: Whether recurrent state is cached along with attention blocks (``mamba_cache_mode`` other than
            ``none``), so that hits follow other rules.
        retention: ``prefix_cache_retention_interval`` as the engine writes it; empty before vLLM 0.29.
        labels: Every label of ``vllm:cache_config_info``, for the record.
    """

    block_size: int
    num_gpu_blocks: int | None
    prefix_caching: bool
    recurrent: bool
    retention: str
    labels: Mapping[str, str]


def read_geometry(reading: Reading) -> Geometry:
    """Return the geometry in ``vllm:cache_config_info``.

    Raises:
        UnknownGeometryError: When the family is absent (vLLM's Rust front end has none), engines disagree, or a label
            the expectation rests on is missing or no number.
    """
    found = reading.label_sets(CACHE_CONFIG)
    if not found:
        raise UnknownGeometryError(f"{CACHE_CONFIG} is absent from /metrics, so the block size is unknown")
    for label in ("block_size", "enable_prefix_caching", "mamba_cache_mode"):
        values = {labels.get(label, "") for labels in found}
        if len(values) > 1:
            raise UnknownGeometryError(f"engines disagree on {label}: {', '.join(sorted(values))}")
    labels = found[0]
    block_size = _number(labels.get("block_size", ""))
    if block_size is None or block_size < 1:
        raise UnknownGeometryError(f"{CACHE_CONFIG} has block_size={labels.get('block_size')!r}")
    caching = labels.get("enable_prefix_caching", "")
    if caching not in ("True", "False"):
        raise UnknownGeometryError(f"{CACHE_CONFIG} has enable_prefix_caching={caching!r}")
    return Geometry(
        block_size=block_size,
        num_gpu_blocks=_number(labels.get("num_gpu_blocks", "")),
        prefix_caching=caching == "True",
        recurrent=labels.get("mamba_cache_mode", "none") not in ("none", "None"),
        retention=labels.get("prefix_cache_retention_interval", ""),
        labels=labels,
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
