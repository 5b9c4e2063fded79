"""What a healthy prefix cache must do, against figures read off a real engine."""

import pytest

from kimi_runbook.acceptance.expectation import NoRuleError, common_prefix, expect
from kimi_runbook.acceptance.geometry import Geometry


def geometry(block_size: int = 128, *, caching: bool = True, mode: str = "none") -> Geometry:
    labels = {"mamba_cache_mode": mode}
    return Geometry(
        block_size=block_size,
        num_gpu_blocks=100,
        prefix_caching=caching,
        recurrent=mode != "none",
        retention="0",
        labels=labels,
    )


def prompt(shared: int, length: int, private: int) -> list[int]:
    return [*range(shared), *([private] * (length - shared))]


@pytest.mark.parametrize(
    ("block", "length", "hits"),
    [
        pytest.param(128, 1288, 1280, id="seen-on-vllm-0.32"),
        pytest.param(128, 1280, 1152, id="multiple-of-the-block-loses-one"),
        pytest.param(128, 128, 0, id="exactly-one-block"),
        pytest.param(128, 129, 128, id="one-block-and-a-token"),
        pytest.param(64, 1288, 1280, id="other-block"),
        pytest.param(1536, 1288, 0, id="shorter-than-a-block"),
    ],
)
def test_exact_resend(block: int, length: int, hits: int) -> None:
    tokens = list(range(length))
    first, second = expect(geometry(block), [("first", tokens), ("again", tokens)])
    assert (first.hit_tokens, second.hit_tokens) == (0, hits)


@pytest.mark.parametrize(
    ("block", "shared", "hits"),
    [
        pytest.param(128, 1160, 1152, id="seen-on-vllm-0.32"),
        pytest.param(128, 1152, 1152, id="shared-part-ends-with-a-block"),
        pytest.param(128, 1151, 1024, id="one-token-short-of-a-block"),
        pytest.param(128, 127, 0, id="less-than-a-block"),
        pytest.param(256, 1160, 1024, id="other-block"),
    ],
)
def test_shared_part(block: int, shared: int, hits: int) -> None:
    prompts = [("first", prompt(shared, 1288, -1)), ("second", prompt(shared, 1288, -2))]
    second = expect(geometry(block), prompts)[1]
    assert (second.shared_tokens, second.hit_tokens) == (shared, hits)


def test_prompt_that_is_the_start_of_an_earlier_one_never_hits_its_last_token() -> None:
    second = expect(geometry(128), [("long", list(range(400))), ("short", list(range(256)))])[1]
    assert second.hit_tokens == 128


def test_nothing_is_expected_of_a_cache_that_is_off() -> None:
    tokens = list(range(500))
    assert expect(geometry(caching=False), [("first", tokens), ("again", tokens)])[1].hit_tokens == 0


def test_recurrent_state_is_refused_and_not_guessed() -> None:
    with pytest.raises(NoRuleError, match="mamba_cache_mode=align"):
        expect(geometry(mode="align"), [("first", [1, 2, 3])])


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
