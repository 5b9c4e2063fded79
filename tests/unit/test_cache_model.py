"""The model of a prefix cache against vLLM's own scheduler, and each way it can be told to be wrong."""

from typing import Any

import pytest

from tests.faults.engine.cache_model import CacheModel, Flaw
from tests.unit.recorded_hits import model_of, runs, tokens_of


@pytest.mark.parametrize("run", runs(), ids=lambda run: "-".join(f"{k}={v}" for k, v in run["engine"].items()))
def test_the_model_supplies_what_vllm_supplies(run: dict[str, Any]) -> None:
    model = model_of(run["engine"])
    assert [model.look_up(tokens_of(parts)) for parts in run["prompts"]] == run["hits"]


def test_the_recording_has_hits_and_misses_of_every_kind_of_engine() -> None:
    by_engine: dict[str, list[int]] = {}
    for run in runs():
        by_engine.setdefault(str(run["engine"]), []).extend(run["hits"])
    assert len(by_engine) >= 15
    for engine, hits in by_engine.items():
        assert min(sum(one > 0 for one in hits), hits.count(0)) >= 5, engine


def series(model: CacheModel, shared: int, suffix: int, sightings: int = 3) -> list[int]:
    """The hits of prompts that share their start and part for ``suffix`` tokens."""
    return [model.look_up([*range(shared), *range(1000 * n, 1000 * n + suffix)]) for n in range(1, sightings + 1)]


@pytest.mark.parametrize(
    ("flaw", "attention", "short", "long"),
    [
        pytest.param(None, [0, 256, 256], [0, 256, 256], [0, 0, 256], id="healthy"),
        pytest.param(Flaw.NEVER_HITS, [0, 0, 0], [0, 0, 0], [0, 0, 0], id="never"),
        pytest.param(Flaw.STATE_LOST, [0, 256, 256], [0, 0, 0], [0, 0, 0], id="state-lost"),
        pytest.param(Flaw.JUNCTION_LOST, [0, 256, 256], [0, 256, 256], [0, 0, 0], id="junction-lost"),
        pytest.param(Flaw.BLOCK_SHORT, [0, 128, 128], [0, 128, 128], [0, 0, 128], id="block-short"),
        pytest.param(Flaw.BLOCK_LONG, [128, 384, 384], [128, 256, 256], [128, 128, 384], id="block-long"),
    ],
)
def test_a_flaw_shows_in_hits(flaw: Flaw | None, attention: list[int], short: list[int], long: list[int]) -> None:
    assert series(CacheModel(block_size=128, flaw=flaw), 300, 200) == attention
    assert series(CacheModel(block_size=128, recurrent=True, flaw=flaw), 300, 40) == short
    assert series(CacheModel(block_size=128, recurrent=True, flaw=flaw), 300, 200) == long


def test_a_cache_that_ignores_content_hits_on_another_prefix() -> None:
    model = CacheModel(block_size=128, flaw=Flaw.ANY_PREFIX)
    assert [model.look_up(range(300)), model.look_up(range(5000, 5300))] == [0, 256]


def test_a_cleared_cache_is_cold() -> None:
    model = CacheModel(block_size=128)
    model.look_up(range(300))
    model.clear()
    assert model.look_up(range(300)) == 0


def test_caching_that_is_off_keeps_nothing() -> None:
    model = CacheModel(block_size=128, caching=False)
    assert [model.look_up(range(300)) for _ in range(2)] == [0, 0]
    assert model.geometry_labels()["enable_prefix_caching"] == "False"
