"""The third witness of step 3: the time to the first token, cold against warm, with an interval. Pure.

On a small model, or a busy machine, a hit saves less than the clock varies, so this witness only ever contradicts: when
even the quickest warm prompt is well above the slowest cold one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kimi_runbook.acceptance.hit_rules import slower_than
from kimi_runbook.acceptance.result import Check, State, verify
from kimi_runbook.acceptance.shared_prefix.protocol import RESEND, SHORT, ZERO
from kimi_runbook.acceptance.shared_prefix.sending import Sent

_NAME = "first-token-ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median time to the first token, warm over cold.

    Attributes:
        cold_s, warm_s: Times of prompts of about the same length, without and with hits, in seconds.
    """

    cold_s: tuple[float, ...]
    warm_s: tuple[float, ...]

    @property
    def value(self) -> float:
        """Median over median."""
        return median(self.warm_s) / median(self.cold_s)

    @property
    def low(self) -> float:
        """The lower bound: the quickest warm over the slowest cold."""
        return min(self.warm_s) / max(self.cold_s)

    @property
    def high(self) -> float:
        """The upper bound: the slowest warm over the quickest cold."""
        return max(self.warm_s) / min(self.cold_s)

    @property
    def coverage(self) -> float:
        """How sure the interval is: n independent times hold their true median with probability 1 - 2^(1-n)."""
        return (1 - 2.0 ** (1 - len(self.cold_s))) * (1 - 2.0 ** (1 - len(self.warm_s)))

    def to_json(self) -> dict[str, Any]:
        """Return the ratio as JSON-ready values; seconds and plain numbers."""
        return {
            "cold_median_s": round(median(self.cold_s), 4),
            "warm_median_s": round(median(self.warm_s), 4),
            "ratio": round(self.value, 3),
            "low": round(self.low, 3),
            "high": round(self.high, 3),
            "coverage": round(self.coverage, 2),
        }


def ratio_of(sent: Sequence[Sent]) -> Ratio | None:
    """Return the ratio over prompts of about one length, or None where one side has no time."""
    alike = [one for one in sent if one.expected.family in (ZERO, SHORT, RESEND)]
    cold = [one for one in alike if one.expected.family == ZERO or one.expected.label == f"{SHORT}.1"]
    shared_by_all = max((one.hits or 0 for one in cold), default=0)  # a template that fills a block hits even there
    warm = [one for one in alike if one not in cold and (one.hits or 0) > shared_by_all]
    cold_s, warm_s = _first_tokens(cold), _first_tokens(warm)
    return Ratio(cold_s=cold_s, warm_s=warm_s) if cold_s and warm_s else None


def _first_tokens(sent: Sequence[Sent]) -> tuple[float, ...]:
    return tuple(one.answer.first_token_s for one in sent if one.answer.first_token_s is not None)


def first_token(ratio: Ratio | None) -> Check:
    """Return whether the first token contradicts the hits."""
    limit = slower_than()
    expected = f"a lower bound of at most {limit:g} (data/hit_rules.yml); it tells against a hit, never for one"
    if ratio is None:
        return verify(
            _NAME,
            False,
            observed="no time to the first token on one side",
            expected=expected,
            evidence="streamed answers",
            next_step="A model that thinks in a channel of its own, or a proxy that collects streams: see step 2.",
            otherwise=State.WARN,
        )
    return verify(
        _NAME,
        ratio.low <= limit,
        observed=f"warm over cold {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}; medians of "
        f"{len(ratio.warm_s)} and {len(ratio.cold_s)})",
        expected=expected,
        evidence="streamed answers",
        next_step="Hits that make a prompt slower: look for state that is restored from slow memory (vllm#45238).",
        otherwise=State.WARN,
    )
