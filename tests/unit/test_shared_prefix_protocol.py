"""Step 3's prompts: lengths that fit whatever the tokenizer and the block, found with few questions."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kimi_runbook.acceptance.expectation import expect
from kimi_runbook.acceptance.prompts import LengthError, Messages, WordRate, common_prefix, fit, words
from kimi_runbook.acceptance.shared_prefix.protocol import FAMILIES, Sizes, make_protocol
from tests.faults.engine.cache_model import CacheModel
from tests.unit.recorded_hits import geometry_of

KINDS = {
    "attention-only": {},
    "recurrent": {"recurrent": True},
    "recurrent-with-a-match-unit": {"recurrent": True, "match_unit": 64},
    "recurrent-with-a-draft": {"recurrent": True, "draft_drop": True},
    "recurrent-with-both": {"recurrent": True, "match_unit": 64, "draft_drop": True},
    "recurrent-dense": {"recurrent": True, "retention": None, "batch_tokens": 8192},
}


class Tokenizer:
    """Renders a chat as a template would and cuts its texts into pieces; counts how often it was asked."""

    def __init__(self, cut: Callable[[str], Iterable[str]], *, head: int = 2, tail: int = 6) -> None:
        self.cut, self.head, self.tail = cut, head, tail
        self.ids: dict[str, int] = {}
        self.asked = 0

    def __call__(self, messages: Messages) -> list[int]:
        self.asked += 1
        tokens = list(range(-self.head, 0))
        for message in messages:
            pieces = [message["role"], *self.cut(message["content"]), "<end>"]
            tokens += [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]
        return tokens + [-100 - n for n in range(self.tail)]


TOKENIZERS = {
    "bytes": lambda text: text,
    "words": str.split,
    "pieces": lambda text: re.findall(r" ?\w{1,4}|\S", text),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [128, 512])
def test_the_prompts_show_what_they_are_for(kind: str, tokenizer: str, block: int) -> None:
    """Every family hits as it should on a healthy cache, and no prompt is a multiple of the block."""
    model = CacheModel(block_size=block, **KINDS[kind])
    geometry = geometry_of(model)
    for _ in range(3):
        tokenize = Tokenizer(TOKENIZERS[tokenizer])
        protocol = make_protocol(tokenize, geometry)
        expected = expect(geometry, protocol.prompts)
        for inside in (False, True):
            healthy = CacheModel(block_size=block, internal_checkpoint=inside, **KINDS[kind])
            assert [healthy.look_up(prompt.tokens) for prompt in protocol.prompts] == [e.hit_tokens for e in expected]
        hits: dict[str, list[int]] = {}
        for one in sorted(expected, key=lambda one: one.sighting):
            hits.setdefault(one.family, []).append(one.hit_tokens)
        assert set(hits) == set(FAMILIES)
        assert set(hits["zero-prefix"] + hits["too-short"]) == {0}
        assert hits["short-suffix"][0] == hits["long-suffix"][0] == 0
        assert hits["short-suffix"][1] == hits["short-suffix"][2] == hits["resend"][0] >= block
        assert hits["long-suffix"][2] >= block
        assert (hits["long-suffix"][1] == 0) == model.recurrent
        assert hits["changed-system"][0] == (0 if model.recurrent else hits["short-suffix"][1] - block)
        assert all(len(prompt.tokens) % block for prompt in protocol.prompts)
        assert max(len(prompt.tokens) for prompt in protocol.prompts) <= Sizes.of(geometry).longest
        assert not protocol.left_out
        assert protocol.opening is None
        assert tokenize.asked <= 40


@pytest.mark.parametrize("block", [16, 32, 64])
def test_small_blocks_fit_whatever_is_drawn(block: int) -> None:
    """With small blocks one draw in ten or so is a multiple of the block; it must be drawn again."""
    geometry = geometry_of(CacheModel(block_size=block))
    for _ in range(60):
        tokenize = Tokenizer(TOKENIZERS["bytes"])
        for prompt in make_protocol(tokenize, geometry).prompts:
            assert len(prompt.tokens) % block


def test_a_template_that_fills_a_block_gets_an_opening() -> None:
    geometry = geometry_of(CacheModel(block_size=16))
    protocol = make_protocol(Tokenizer(TOKENIZERS["pieces"], head=40), geometry)
    assert protocol.opening is not None
    assert common_prefix(protocol.opening.tokens, protocol.prompts[0].tokens) >= 40
    assert [family for family in protocol.left_out if family.startswith("too-short: ")]


def test_a_template_longer_than_a_hit_is_refused_where_recurrent_state_is_kept() -> None:
    """There the template's own states would have to be known."""
    geometry = geometry_of(CacheModel(block_size=128, recurrent=True, match_unit=64))
    with pytest.raises(LengthError, match="every chat begins with the same"):
        make_protocol(Tokenizer(TOKENIZERS["pieces"], head=70), geometry)


def test_a_template_whose_end_does_not_fit_is_refused() -> None:
    geometry = geometry_of(CacheModel(block_size=128, recurrent=True, match_unit=32))
    with pytest.raises(LengthError, match=r"what follows a system message is .* tokens, and a hit can be 32"):
        make_protocol(Tokenizer(TOKENIZERS["pieces"], tail=40), geometry)


def test_two_protocols_share_nothing_but_the_template() -> None:
    geometry = geometry_of(CacheModel(block_size=128))
    tokenize = Tokenizer(TOKENIZERS["bytes"])
    first, second = make_protocol(tokenize, geometry), make_protocol(tokenize, geometry)
    most = max(common_prefix(one.tokens, other.tokens) for one in first.prompts for other in second.prompts)
    assert most < 16


@pytest.mark.parametrize("per_word", [1.0, 1.3, 6.4])
def test_a_length_is_found_by_arithmetic(per_word: float) -> None:
    asked: list[int] = []

    def measure(count: int) -> int:
        asked.append(count)
        return 23 + int(count * per_word)

    rate = WordRate()
    for least, most in ((400, 430), (900, 930), (100, 112)):
        asked.clear()
        assert least <= measure(fit(measure, rate, at_least=least, at_most=most)) <= most
        assert len(asked) <= 4  # the last one is this test's own


@pytest.mark.parametrize(
    ("measure", "least", "most"),
    [
        pytest.param(lambda count: 10 * count, 11, 19, id="no-word-lands-there"),
        pytest.param(lambda count: 500 + count, 100, 200, id="even-no-word-is-too-long"),
        pytest.param(lambda _count: 7, 100, 200, id="words-add-nothing"),
    ],
)
def test_a_length_that_cannot_be_had_is_told(measure: Callable[[int], int], least: int, most: int) -> None:
    with pytest.raises(LengthError, match=f"wanted {least} to {most} tokens, got"):
        fit(measure, WordRate(), at_least=least, at_most=most)


def test_more_words_begin_with_fewer() -> None:
    assert words("salt", 40).startswith(words("salt", 12) + " ")
    assert words("salt", 3) != words("pepper", 3)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [([1, 2, 3], [1, 2, 4, 5], 2), ([1, 2], [1, 2, 3], 2), ([], [1], 0), ([5], [6], 0), ([1, 2], [1, 2], 2)],
)
def test_common_prefix(first: list[int], second: list[int], shared: int) -> None:
    assert common_prefix(first, second) == shared


def test_sizes_leave_something_to_hit_after_a_draft() -> None:
    sizes: dict[str, Any] = {
        kind: Sizes.of(geometry_of(CacheModel(block_size=1536, **more))) for kind, more in KINDS.items()
    }
    assert (sizes["recurrent"].short_blocks, sizes["recurrent"].long_blocks) == (2, 1)
    assert (sizes["recurrent-with-a-draft"].short_blocks, sizes["recurrent-with-a-draft"].long_blocks) == (3, 2)
    assert sizes["recurrent"].longest <= 4 * 1536
