"""What vLLM's own scheduler supplied (tests/data/prefix_cache), and how its prompts become tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kimi_runbook.acceptance.geometry import Geometry
from kimi_runbook.acceptance.prompts import Prompt
from tests.faults.engine.cache_model import CacheModel

_FILE = Path(__file__).parents[1] / "data" / "prefix_cache" / "vllm_0.32.0_scheduler.json"


@cache
def runs() -> tuple[dict[str, Any], ...]:
    """Return every recorded run: engine, prompts as parts, hits."""
    return tuple(json.loads(_FILE.read_text(encoding="utf-8"))["runs"])


def tokens_of(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return a recorded prompt's tokens: a part's are its own and always the same."""
    return tuple(part * 100_000 + place for part, length in parts for place in range(length))


def prompts_of(token_lists: Sequence[Sequence[int]]) -> list[Prompt]:
    """Return tokens as prompts of one series."""
    return [
        Prompt(family="any", sighting=number, messages=[], tokens=tuple(tokens))
        for number, tokens in enumerate(token_lists, start=1)
    ]


def model_of(engine: dict[str, Any]) -> CacheModel:
    """Return a model of a recorded engine."""
    fields = {name: value for name, value in engine.items() if name != "inside"}
    return CacheModel(internal_checkpoint="inside" in engine, **fields)


def geometry_of(model: CacheModel, *, version: str = "0.32.0", tells_batch: bool = True) -> Geometry:
    """Return the geometry an engine with such a cache tells."""
    return Geometry(
        block_size=model.block_size,
        attention_block=model.block_size,
        match_unit=model.unit,
        prefix_caching=model.caching,
        recurrent=model.recurrent,
        cache_mode="align" if model.recurrent else "none",
        retention="dense" if model.retention is None else str(model.retention),
        draft_drop=model.draft_drop,
        batch_tokens=model.batch_tokens if tells_batch else None,
        sliding_window=False,
        num_gpu_blocks=model.num_blocks,
        kv_tokens=None,
        engines=1,
        front_end="python",
        version=version,
        witnesses={},
        labels={},
    )
