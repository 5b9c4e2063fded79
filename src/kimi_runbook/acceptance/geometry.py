"""The engine's cache geometry, read back from the running engine: what it says, not what it was told.

Each value is taken from the first source that has it: the labels of ``vllm:cache_config_info``, the engine's log, the
launch, and last what the operator said. What the operator said is compared with the engine all the same. A value no
source has stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kimi_runbook.acceptance.capabilities import front_end
from kimi_runbook.acceptance.geometry_log import GeometryLog
from kimi_runbook.acceptance.hit_rules import UnknownDraftError, drops_a_unit, retention_default
from kimi_runbook.acceptance.launch_options import LaunchOptions
from kimi_runbook.acceptance.metrics import CACHE_CONFIG, DRAFTS, Reading
from kimi_runbook.acceptance.plan import GeometryOptions

_T = TypeVar("_T")
_NO_LOG = GeometryLog(values={})
_NO_LAUNCH = LaunchOptions()
_NOTHING_TOLD = GeometryOptions()
_DENSE = "dense"
# Labels the expectation rests on: engines that disagree on one have no common geometry.
_COMMON = (
    *("block_size", "enable_prefix_caching", "mamba_cache_mode", "mamba_block_size", "effective_attention_block_size"),
    *("prefix_match_unit", "prefix_cache_retention_interval", "cache_hit_alignment_tokens", "sliding_window"),
)


class UnknownGeometryError(Exception):
    """The engine does not say enough to compute what a healthy cache would do; the message says what is missing."""


class ContradictedGeometryError(Exception):
    """What the operator said is not what the engine says; the message names both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How the engine keeps and finds prefixes.

    Attributes:
        block_size: Tokens per block.
        attention_block: Tokens per block of attention, context parallelism included.
        match_unit: Tokens between two places a hit can land on.
        prefix_caching: Whether prefix caching is on; None when nothing says so.
        recurrent: Whether recurrent state is cached along with attention, so that hits follow other rules.
        cache_mode: ``mamba_cache_mode``; ``none`` for engines whose layers are all attention.
        retention: Tokens between states kept without need: ``0``, a number, ``dense``; empty when unknown.
        draft_drop: Whether a draft model makes the last matched unit be recomputed.
        batch_tokens: Tokens of one prefill step at most, or None when nothing says so.
        sliding_window: Whether some layers see a window only.
        num_gpu_blocks: Blocks of the cache (all engines together), or None. The label keeps its name on CPU.
        kv_tokens: Tokens the cache holds (one engine), or None.
        engines: Engines that report.
        front_end: ``python`` or ``rust``; both where endpoints differ.
        version: What the engine says its version is.
        witnesses: Where each value comes from, by its name here.
        labels: Every label of ``vllm:cache_config_info``, for the record.
    """

    block_size: int
    attention_block: int
    match_unit: int
    prefix_caching: bool | None
    recurrent: bool
    cache_mode: str
    retention: str
    draft_drop: bool
    batch_tokens: int | None
    sliding_window: bool
    num_gpu_blocks: int | None
    kv_tokens: int | None
    engines: int
    front_end: str
    version: str
    witnesses: Mapping[str, str]
    labels: Mapping[str, str]


def read_geometry(
    reading: Reading,
    *,
    version: str = "",
    log: GeometryLog = _NO_LOG,
    launch: LaunchOptions = _NO_LAUNCH,
    told: GeometryOptions = _NOTHING_TOLD,
) -> Geometry:
    """Return the engine's geometry.

    Args:
        reading: Every metrics endpoint, read once.
        version: What ``GET /version`` says; defaults depend on it.
        log: What the engine's log says.
        launch: What the engine was started with.
        told: What the operator said.

    Raises:
        UnknownGeometryError: When a value the expectation rests on is in no source, or engines disagree on it.
        ContradictedGeometryError: When the operator said something else than the engine.
    """
    return _Finder(reading, version, log, launch, told).geometry()


class _Finder:
    """Looks each value up and remembers where it was found."""

    def __init__(
        self, reading: Reading, version: str, log: GeometryLog, launch: LaunchOptions, told: GeometryOptions
    ) -> None:
        self.reading, self.version, self.log, self.launch, self.told = reading, version, log, launch, told
        self.labels = _common_labels(reading)
        self.witnesses: dict[str, str] = {}

    def geometry(self) -> Geometry:
        block = self._block_size()
        mode = self._cache_mode()
        recurrent = mode not in ("none", "None")
        attention = self._attention_block(block)
        return Geometry(
            block_size=block,
            attention_block=attention,
            match_unit=self._match_unit(block, attention) if recurrent else self._attention_unit(attention),
            prefix_caching=self._prefix_caching(recurrent),
            recurrent=recurrent,
            cache_mode=mode,
            retention=self._retention(recurrent),
            draft_drop=self._draft_drop(),
            batch_tokens=self._pick(
                "batch_tokens",
                (self.launch.number("--max-num-batched-tokens"), "launch: --max-num-batched-tokens"),
                (self.log.number("batch_tokens"), "log: max_num_batched_tokens="),
            ),
            sliding_window=self._label("sliding_window") is not None,
            num_gpu_blocks=self._pick("num_gpu_blocks", self._labelled("num_gpu_blocks")),
            kv_tokens=self._pick(
                "kv_tokens",
                self._labelled("kv_cache_size_tokens"),
                (self.log.number("kv_tokens"), "log: KV cache size:"),
            ),
            engines=self.reading.engine_count,
            front_end=" and ".join(sorted({front_end(exposition) for exposition in self.reading.expositions})),
            version=self.version,
            witnesses=self.witnesses,
            labels=self.labels,
        )

    def _block_size(self) -> int:
        engine = self._pick(
            "block_size",
            self._labelled("block_size"),
            (self.log.number("block_size"), "log: Setting attention block size to"),
            (_number(self.log.argument("block_size")), "log: non-default args"),
            (self.launch.number("--block-size"), "launch: --block-size"),
        )
        block = self._or_told("block_size", engine, self.told.block_size)
        if block is None or block < 1:
            raise UnknownGeometryError(self._without("block_size", "the block size is unknown"))
        return block

    def _cache_mode(self) -> str:
        mode = self._pick(
            "cache_mode",
            (self._label("mamba_cache_mode", none_is_a_value=True), f"{CACHE_CONFIG} mamba_cache_mode"),
            (self.log.values.get("mamba_cache_mode"), "log: Mamba cache mode is set to"),
            # A hybrid says so where its mode is changed from none, which is where it starts from.
            ("none" if self.log.whole_start else None, "log: a whole start without Mamba cache mode is set to"),
        )
        mode = self._or_told("cache_mode", mode, self.told.cache_mode or None)
        if mode is None:
            raise UnknownGeometryError(
                self._without("mamba_cache_mode", "whether recurrent state is cached is unknown")
            )
        return mode

    def _attention_block(self, block: int) -> int:
        parallel = self.launch.number("--decode-context-parallel-size", "-dcp")
        found = self._pick(
            "attention_block",
            self._labelled("effective_attention_block_size"),
            (block * parallel if parallel else None, "launch: --decode-context-parallel-size"),
            (block, "the block size: nothing tells of decode context parallelism"),
        )
        return found or block

    def _attention_unit(self, attention: int) -> int:
        self.witnesses["match_unit"] = "the block of attention: there is no other kind of layer"
        return attention

    def _match_unit(self, block: int, attention: int) -> int:
        set_to = self._pick(
            "match_unit",
            self._labelled("cache_hit_alignment_tokens"),
            self._labelled("prefix_match_unit"),
            (_number(self.log.argument("prefix_match_unit")), "log: non-default args"),
            (self.launch.number("--prefix-match-unit"), "launch: --prefix-match-unit"),
        )
        left_unset = "prefix_match_unit" in self.labels or self.log.has_arguments or self.launch.known
        if set_to is None and left_unset:
            # unset: the greatest common divisor of the groups' blocks (v1/core/kv_cache_utils.py)
            groups = [int(size) for size in self.log.values.get("group_sizes", "").replace(",", " ").split()]
            set_to = self._pick(
                "match_unit",
                (math.gcd(*groups) if groups else None, "log: kv cache group sizes"),
                (math.gcd(block, attention), "the blocks: --prefix-match-unit is not set"),
            )
        unit = self._or_told("match_unit", set_to, self.told.match_unit)
        if unit is None:
            raise UnknownGeometryError(self._without("prefix_match_unit", "where a hit can land is unknown"))
        if unit < 1 or block % unit:
            raise UnknownGeometryError(f"a match unit of {unit} tokens does not divide the block of {block}")
        return unit

    def _prefix_caching(self, recurrent: bool) -> bool | None:
        launched = self.launch.prefix_caching
        told = self._pick(
            "prefix_caching",
            (self._label("enable_prefix_caching"), f"{CACHE_CONFIG} enable_prefix_caching"),
            (self.log.values.get("prefix_caching") or None, "log: the engine's configuration"),
            (None if launched is None else str(launched), "launch: --enable-prefix-caching or its opposite"),
            ("True" if recurrent else None, "the cache mode: it is none without prefix caching"),
        )
        if told not in (None, "True", "False"):
            raise UnknownGeometryError(f"{CACHE_CONFIG} has enable_prefix_caching={told!r}")
        return None if told is None else told == "True"

    def _retention(self, recurrent: bool) -> str:
        default = retention_default(self.version)
        engine = self._pick(
            "retention",
            (
                _interval(self.labels.get("prefix_cache_retention_interval")),
                f"{CACHE_CONFIG} prefix_cache_retention_interval",
            ),
            (_interval(self.log.argument("prefix_cache_retention_interval")), "log: non-default args"),
            (_interval(self.launch.option("--prefix-cache-retention-interval")), "launch"),
            (default if self.log.has_arguments or self.launch.known else None, f"default of vLLM {self.version}"),
        )
        retention = self._or_told("retention", engine, _interval(self.told.retention or None))
        if retention is None and recurrent:
            raise UnknownGeometryError(
                self._without("prefix_cache_retention_interval", "how long recurrent state is kept is unknown")
            )
        return retention or ""

    def _draft_drop(self) -> bool:
        method = self._draft_method()
        if not method or self.launch.keeps_drafted_unit:
            return False
        try:
            return drops_a_unit(method, self.version)
        except UnknownDraftError as error:
            raise UnknownGeometryError(str(error)) from error

    def _draft_method(self) -> str:
        drafting = bool(self.reading.label_sets(DRAFTS))
        method = self._pick(
            "draft",
            (self.launch.draft_method, "launch: --speculative-config"),
            (self.log.values.get("draft_method"), "log: the engine's configuration"),
            (_method_in(self.log.argument("speculative_config")), "log: non-default args"),
            (None if drafting else "", f"no sample of {DRAFTS}"),
        )
        if method is None or (drafting and not method):
            raise UnknownGeometryError(
                f"{DRAFTS} says that a draft model runs, and neither launch nor log says of which method, so whether "
                "a hit loses its last unit is unknown"
            )
        return method

    def _label(self, name: str, *, none_is_a_value: bool = False) -> str | None:
        """Return a label's text; vLLM writes None for what is not set, which is no value except where it is one."""
        text = self.labels.get(name)
        return None if text == "None" and not none_is_a_value else text

    def _labelled(self, name: str) -> tuple[int | None, str]:
        return _number(self._label(name)), f"{CACHE_CONFIG} {name}"

    def _pick(self, name: str, *candidates: tuple[_T | None, str]) -> _T | None:
        """Return the first candidate there is, and keep where it comes from."""
        for value, source in candidates:
            if value is not None:
                self.witnesses[name] = source
                return value
        return None

    def _or_told(self, name: str, engine: _T | None, told: _T | None) -> _T | None:
        """Return the engine's value, or the operator's where the engine has none; raises when they differ."""
        if engine is None:
            return self._pick(name, (told, "the operator"))
        if told is not None and told != engine:
            raise ContradictedGeometryError(
                f"{name} was given as {told}, and the engine has {engine} ({self.witnesses[name]})"
            )
        return engine

    def _without(self, label: str, consequence: str) -> str:
        if not self.reading.label_sets(CACHE_CONFIG):
            return f"{CACHE_CONFIG} is absent from /metrics and the log does not say it either, so {consequence}"
        return f"{CACHE_CONFIG} has {label}={self.labels.get(label)!r}, so {consequence}"


def _common_labels(reading: Reading) -> dict[str, str]:
    found = reading.label_sets(CACHE_CONFIG)
    for label in _COMMON:
        values = {labels.get(label, "") for labels in found}
        if len(values) > 1:
            raise UnknownGeometryError(f"engines disagree on {label}: {', '.join(sorted(values))}")
    return found[0] if found else {}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _interval(text: str | None) -> str | None:
    """Return a retention as it is written here, or None for what is none."""
    if text in ("None", "none", _DENSE):
        return _DENSE
    return None if _number(text) is None else str(_number(text))


def _method_in(logged: str | None) -> str | None:
    """Return the method in a logged ``{'method': 'mtp', ...}``."""
    if logged is None or "'method': '" not in logged:
        return None
    return logged.partition("'method': '")[2].partition("'")[0]
