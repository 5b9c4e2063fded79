"""What a healthy prefix cache must do: figures off a real engine, vLLM's own scheduler, and an independent model."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kimi_runbook.acceptance.expectation import NoRuleError, expect, rule_for
from kimi_runbook.acceptance.geometry import Geometry
from tests.faults.engine.cache_model import CacheModel
from tests.unit.recorded_hits import geometry_of, model_of, prompts_of, runs, tokens_of


def hits(geometry: Geometry, *token_lists: Sequence[int]) -> list[int]:
    return [one.hit_tokens for one in expect(geometry, prompts_of(token_lists))]


def attention(block_size: int = 128, **fields: Any) -> Geometry:
    return geometry_of(CacheModel(block_size=block_size, **fields))


def recurrent(block_size: int = 128, **fields: Any) -> Geometry:
    return geometry_of(CacheModel(block_size=block_size, recurrent=True, **fields))


def prompt(shared: int, length: int, private: int) -> list[int]:
    """A prompt whose first ``shared`` tokens are everybody's."""
    return [*range(shared), *range(1000 * private, 1000 * private + length - shared)]


@pytest.mark.parametrize(
    ("block", "length", "expected"),
    [
        pytest.param(128, 1288, 1280, id="seen-on-vllm-0.32"),
        pytest.param(128, 1280, 1152, id="multiple-of-the-block-loses-one"),
        pytest.param(128, 128, 0, id="exactly-one-block"),
        pytest.param(128, 129, 128, id="one-block-and-a-token"),
        pytest.param(64, 1288, 1280, id="other-block"),
        pytest.param(1536, 1288, 0, id="shorter-than-a-block"),
    ],
)
def test_exact_resend(block: int, length: int, expected: int) -> None:
    assert hits(attention(block), range(length), range(length)) == [0, expected]
    assert hits(recurrent(block), range(length), range(length)) == [0, expected]


@pytest.mark.parametrize(
    ("block", "shared", "expected"),
    [
        pytest.param(128, 1160, 1152, id="seen-on-vllm-0.32"),
        pytest.param(128, 1152, 1152, id="shared-part-ends-with-a-block"),
        pytest.param(128, 1151, 1024, id="one-token-short-of-a-block"),
        pytest.param(128, 127, 0, id="less-than-a-block"),
        pytest.param(256, 1160, 1024, id="other-block"),
    ],
)
def test_shared_part_of_attention_only(block: int, shared: int, expected: int) -> None:
    prompts = prompts_of([prompt(shared, 1288, 5), prompt(shared, 1288, 6)])
    second = expect(attention(block), prompts)[1]
    assert (second.shared_tokens, second.hit_tokens) == (shared, expected)


@pytest.mark.parametrize(
    ("fields", "shared", "length", "expected"),
    [
        pytest.param({}, 300, 340, [0, 256, 256, 256], id="ends-in-the-block-of-the-shared-part"),
        pytest.param({}, 300, 400, [0, 0, 256, 256], id="crosses-into-the-next-block"),
        pytest.param({}, 300, 700, [0, 0, 256, 256], id="ends-two-blocks-on"),
        pytest.param({}, 100, 700, [0, 0, 0, 0], id="shares-less-than-a-block"),
        pytest.param({"match_unit": 32}, 260, 285, [0, 256, 256, 256], id="match-unit-within-the-first-unit"),
        pytest.param({"match_unit": 32}, 300, 700, [0, 0, 256, 256], id="match-unit-does-not-keep-more-states"),
        pytest.param({"draft_drop": True}, 300, 340, [0, 128, 128, 128], id="draft-drops-a-block"),
        pytest.param({"draft_drop": True}, 300, 700, [0, 0, 128, 128], id="draft-drops-a-block-of-a-junction"),
        pytest.param({"retention": None, "batch_tokens": 128}, 300, 700, [0, 256, 256, 256], id="dense"),
        pytest.param({"retention": None}, 300, 700, [0, 0, 256, 256], id="dense-in-one-step-keeps-no-more"),
        pytest.param({"retention": 256, "batch_tokens": 128}, 500, 900, [0, 256, 384, 384], id="interval"),
    ],
)
def test_shared_part_with_recurrent_state(
    fields: dict[str, Any], shared: int, length: int, expected: list[int]
) -> None:
    """The first request keeps state only near its own end: siblings hit at once or, across a block, at the third."""
    assert hits(recurrent(**fields), *(prompt(shared, length, 5 + n) for n in range(4))) == expected


@pytest.mark.parametrize("run", runs(), ids=lambda run: "-".join(f"{k}={v}" for k, v in run["engine"].items()))
def test_the_expectation_is_what_vllm_supplies(run: dict[str, Any]) -> None:
    """Where it depends on what the engine does not tell, nothing is expected at all."""
    prompts = prompts_of([tokens_of(parts) for parts in run["prompts"]])
    try:
        expected = expect(geometry_of(model_of(run["engine"])), prompts)
    except NoRuleError as error:
        assert "match_unit" in run["engine"]
        assert "from inside a step" in str(error)
        return
    assert [one.hit_tokens for one in expected] == run["hits"]


def family(draw: random.Random, block: int) -> list[list[int]]:
    """Prompts that share starts of random length, some of them twice, some an exact multiple of the block."""
    prompts: list[list[int]] = []
    for number in range(1, 16):
        base = draw.choice(prompts) if prompts and draw.random() < 0.8 else []
        kept = base[: draw.randint(0, len(base))] if draw.random() < 0.8 else base
        own = draw.choice((0, draw.randint(1, block // 2), draw.randint(block, 3 * block))) if base else 2 * block + 5
        made = [*kept, *range(number * 10_000, number * 10_000 + own)]
        if draw.random() < 0.15:
            made = made[: len(made) // block * block]
        if len(made) > 1:
            prompts.append(made)
    return prompts


@pytest.mark.parametrize("seed", range(40))
def test_the_expectation_is_what_an_independent_model_supplies(seed: int) -> None:
    """Here lengths of common prefixes are counted, there blocks are looked up by their content."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    block = draw.choice((16, 64, 128))
    model = CacheModel(
        block_size=block,
        recurrent=seed % 4 != 0,
        retention=draw.choice((0, 0, None, 2 * block)),
        draft_drop=draw.random() < 0.3,
        batch_tokens=draw.choice((block, 3 * block, 8192)),
    )
    prompts = family(draw, block)
    expected = hits(geometry_of(model), *prompts)
    assert expected == [model.look_up(tokens) for tokens in prompts]
    assert len(prompts) > 5


def test_prompt_that_is_the_start_of_an_earlier_one_never_hits_its_last_token() -> None:
    assert hits(attention(), range(400), range(256)) == [0, 128]


def test_nothing_is_expected_of_a_cache_that_is_off() -> None:
    assert hits(attention(caching=False), range(500), range(500)) == [0, 0]


def test_a_reason_goes_with_every_expectation() -> None:
    long = [prompt(300, 700, 5 + n) for n in range(3)]
    first, second, third = expect(recurrent(), prompts_of(long))
    assert first.rule == "first sighting"
    assert second.rule == (
        "attention matches 256 of 300 shared tokens, no state was kept within them; one is kept at 256 from now on"
    )
    assert third.rule == "attention matches 256 of 300 shared tokens, and a state was kept at 256"
    assert expect(attention(), prompts_of(long))[1].rule == "shared part: floor(300/128)*128"
    assert "the least hit is 128" in expect(attention(), prompts_of([range(90), range(90)]))[1].rule


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param({"cache_mode": "all"}, "mamba_cache_mode=all", id="unknown-mode"),
        pytest.param({"version": "0.28.0"}, "0.29 and later, not for 0.28.0", id="older"),
        pytest.param({"version": "0.30.1", "draft_drop": True}, "0.31 and later, not for 0.30.1", id="older-draft"),
        pytest.param({"version": "0.1.dev19262+gb6bbf29dd"}, "not for 0.1.dev", id="version-that-cannot-be-placed"),
        pytest.param({"attention_block": 1024}, "decode context parallelism", id="context-parallel"),
        pytest.param({"sliding_window": True}, "sliding window", id="sliding-window"),
    ],
)
def test_an_engine_without_a_rule_is_refused_and_not_guessed(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(NoRuleError, match=why):
        expect(replace(recurrent(), **fields), prompts_of([range(3)]))


def test_attention_only_has_a_rule_whatever_the_version() -> None:
    assert rule_for(replace(attention(), version="")).name == "whole-blocks"
    assert rule_for(recurrent()).name == "kept-states"


def test_what_the_engine_does_not_tell_is_not_guessed_where_it_matters() -> None:
    long = [prompt(300, 700, 5 + n) for n in range(3)]
    untold = geometry_of(CacheModel(block_size=128, recurrent=True, retention=None), tells_batch=False)
    with pytest.raises(
        NoRuleError, match=r"any\.2 would hit 0 or 256 tokens: .* how many tokens one prefill step takes"
    ):
        expect(untold, prompts_of(long))
    short = [prompt(300, 340, 5 + n) for n in range(3)]
    with pytest.raises(NoRuleError, match="from inside a step"):
        expect(recurrent(match_unit=32), prompts_of(short))
    assert hits(untold, *short) == [0, 256, 256]
