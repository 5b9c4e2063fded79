"""The prompts of step 3, by family, with lengths taken from the engine's own block size.

==============  ====================================================================================================
zero-prefix     a system message of its own, as long as the others: nothing may hit
short-suffix    three chats that share a system message and differ in a question: their ends stay in one block
resend          the first of them sent again, twice, unchanged
long-suffix     three chats that share a system message and differ in more than a block of text each
changed-system  the first short one with its system message changed inside its last whole block
too-short       one chat shorter than a hit can be, sent twice: nothing may hit
==============  ====================================================================================================

No prompt is a multiple of the block: those were a known total miss (vllm#50235).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kimi_runbook.acceptance.geometry import Geometry
from kimi_runbook.acceptance.hit_rules import lengths
from kimi_runbook.acceptance.prompts import (
    LengthError,
    Messages,
    Prompt,
    WordRate,
    chat,
    common_prefix,
    fit,
    new_salt,
    words,
)

_T = TypeVar("_T")
Tokenize = Callable[[Messages], Sequence[int]]

ZERO, SHORT, RESEND, LONG, CHANGED, TOO_SHORT = FAMILIES = (
    "zero-prefix",
    "short-suffix",
    "resend",
    "long-suffix",
    "changed-system",
    "too-short",
)
SIGHTINGS = 3
ASKS = ("Why?", "How so?", "Since when?")  # no two begin alike, so that chats part where the question begins
_DRAWS = 10  # the second one fits as a rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths of step 3's prompts for one geometry, in tokens.

    Attributes:
        block: Tokens per block: of attention, or of recurrent state where that is kept.
        unit: Tokens between two places a hit can land on.
        same_block: Whether chats with short suffixes have to end in the block their shared part ends in.
        short_blocks, long_blocks: Whole blocks in the shared part of the two families.
    """

    block: int
    unit: int
    same_block: bool
    short_blocks: int
    long_blocks: int

    @classmethod
    def of(cls, geometry: Geometry) -> Sizes:
        """Return the sizes for a geometry: at least one block to hit after what a draft model drops."""
        block = geometry.block_size if geometry.recurrent else geometry.match_unit
        dropped = int(geometry.draft_drop)
        least = -(-lengths().least_shared // block)
        return cls(
            block=block,
            unit=geometry.match_unit,
            same_block=geometry.recurrent,
            short_blocks=max(2 + dropped, least),
            long_blocks=max(1 + dropped, least),
        )

    @property
    def spread(self) -> tuple[int, int]:
        """How far past a block boundary a part may end: enough room for a word to fit, and well clear of the next."""
        return max(1, self.block // 8), max(self.block // 2, min(self.block * 3 // 4, 24))

    @property
    def longest(self) -> int:
        """The longest prompt there can be, with room for prompts that are only about as long as another."""
        short, long = self.short_blocks * self.block, (self.long_blocks + 1) * self.block + self.spread[1]
        return max(short, long) + self.spread[1] + max(self.block // 8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What is sent, in this order.

    Attributes:
        opening: A chat sent first whose hits are not judged: where the template alone fills a block, earlier traffic
            may or may not have left that block behind; after this one it is there. None where it is shorter.
        prompts: The chats whose hits are computed and counted.
        left_out: Families that cannot be had from this engine, with the reason.
    """

    opening: Prompt | None
    prompts: tuple[Prompt, ...]
    left_out: tuple[str, ...]


def make_protocol(tokenize: Tokenize, geometry: Geometry) -> Protocol:
    """Return the protocol's prompts.

    Args:
        tokenize: Messages to token ids, as the server renders them; asks the server, so each call takes time.
        geometry: The engine's geometry.

    Raises:
        LengthError: When no draw of words fits the engine's tokenizer and block.
        EngineError: When the engine's tokenizer does not answer.
    """
    maker = _Maker(tokenize, Sizes.of(geometry))
    short = maker.drawn(maker.short)
    length = len(short[0].tokens)
    zero = [maker.drawn(partial(maker.zero, sighting, length)) for sighting in (1, 2)]
    head = common_prefix(zero[0].tokens, short[0].tokens)
    opening = None
    if head >= geometry.match_unit:
        if geometry.recurrent:
            raise LengthError(f"every chat begins with the same {head} tokens, and a hit can be {geometry.match_unit}")
        opening = replace(maker.drawn(partial(maker.zero, 1, length)), family="opening")
    long = maker.drawn(maker.long)
    changed = maker.drawn(partial(maker.changed, short[0]))
    resend = [replace(short[0], family=RESEND, sighting=sighting) for sighting in (1, 2)]
    try:
        too_short = maker.drawn(maker.too_short)
        left_out: tuple[str, ...] = ()
    except LengthError as error:
        too_short, left_out = [], (f"{TOO_SHORT}: {error}",)
    return Protocol(
        opening=opening,
        prompts=(*too_short, zero[0], *short, *resend, *long, zero[1], changed),
        left_out=left_out,
    )


class _Maker:
    """Makes the prompts of one run; each family draws its own words."""

    def __init__(self, tokenize: Tokenize, sizes: Sizes) -> None:
        self.sizes = sizes
        self._ask = tokenize
        self._asked: dict[tuple[str, str], tuple[int, ...]] = {}
        self._rate = WordRate()
        # What follows the shared part of a chat that ends with the first question, and the shortest chat there is.
        salt = new_salt()
        first, second = (self._tokens(chat(salt, ask)) for ask in ASKS[:2])
        self._suffix = len(first) - common_prefix(first, second)
        self._shortest = len(first)

    def drawn(self, make: Callable[[], _T]) -> _T:
        """Return what ``make`` makes: words are drawn again until lengths fit."""
        for _ in range(_DRAWS - 1):
            try:
                return make()
            except LengthError:
                continue
        return make()

    def short(self) -> list[Prompt]:
        """Return chats that share a system message and end soon after it."""
        sizes, salt = self.sizes, new_salt()
        shared = sizes.short_blocks * sizes.block
        least, most = shared + sizes.spread[0], shared + sizes.spread[1]
        if sizes.same_block:
            # Within the first unit of the block it does not matter whether the state at the block's start is kept along
            # with the one at the last unit (vLLM 0.32 keeps only the latter where the kernel writes it).
            least, most = shared + 1, shared + sizes.unit - self._suffix - 1
        if least > most:
            raise LengthError(f"what follows a system message is {self._suffix} tokens, and a hit can be {sizes.unit}")
        system = words(
            salt, self._fit(lambda n: chat(words(salt, n), ASKS[0]), least + self._suffix, most + self._suffix)
        )
        prompts = [self._prompt(SHORT, n, chat(system, ask)) for n, ask in enumerate(ASKS, start=1)]
        last = shared + (sizes.unit if sizes.same_block else sizes.block)
        for prompt in prompts[1:]:
            common = common_prefix(prompts[0].tokens, prompt.tokens)
            if not shared <= common < last or (sizes.same_block and len(prompt.tokens) > last):
                raise LengthError(
                    f"{prompt.label} shares {common} of {len(prompt.tokens)} tokens, wanted {shared} and some"
                )
        return prompts

    def long(self) -> list[Prompt]:
        """Return chats that share a system message and part for more than a block each."""
        block, (least, most) = self.sizes.block, self.sizes.spread
        shared, salt = self.sizes.long_blocks * block + self._suffix, new_salt()
        system = words(salt, self._fit(lambda n: chat(words(salt, n), ASKS[0]), shared + least, shared + most))
        begins = len(self._tokens(chat(system, ASKS[0]))) - self._suffix + block
        prompts = []
        for sighting in range(1, SIGHTINGS + 1):
            own = new_salt()
            count = self._fit(partial(_with_own_words, system, own), begins + least, begins + most)
            prompts.append(self._prompt(LONG, sighting, _with_own_words(system, own, count)))
        for prompt in prompts[1:]:
            common = common_prefix(prompts[0].tokens, prompt.tokens)
            if common // block != self.sizes.long_blocks or len(prompt.tokens) - common < block:
                raise LengthError(
                    f"{prompt.label} shares {common} of {len(prompt.tokens)} tokens, wanted a block to part"
                )
        return prompts

    def zero(self, sighting: int, length: int) -> Prompt:
        """Return a chat of its own, about as long as another."""
        salt, near = new_salt(), max(self.sizes.block // 8, 8)
        count = self._fit(lambda n: chat(words(salt, n), ASKS[0]), length - near, length + near)
        return self._prompt(ZERO, sighting, chat(words(salt, count), ASKS[0]))

    def changed(self, original: Prompt) -> Prompt:
        """Return a chat whose system message parts from the original's inside the last whole block both have."""
        system, ask = (str(message["content"]) for message in original.messages)
        spoken, other = system.split(" "), new_salt()
        more = int(other[0], 16) % 4  # or every draw would be as long as the last where hardly a word is replaced
        last_block = (self.sizes.short_blocks - 1) * self.sizes.block

        def keeping(count: int) -> Messages:
            kept = spoken[: min(count, len(spoken) - 1)]
            return chat(" ".join([*kept, words(other, len(spoken) - len(kept) - 1 + more)]), ask)

        def common(count: int) -> int:
            return common_prefix(original.tokens, self._tokens(keeping(count)))

        least, most = self.sizes.spread
        kept = fit(common, self._rate, at_least=last_block + least, at_most=last_block + most)
        return self._prompt(CHANGED, 1, keeping(kept))

    def too_short(self) -> list[Prompt]:
        """Return one chat, twice, that is shorter than a hit can be."""
        salt, unit = new_salt(), self.sizes.unit
        if self._shortest >= unit:
            raise LengthError(f"the shortest chat is {self._shortest} tokens, and a hit can be {unit}")
        count = self._fit(lambda n: chat(words(salt, n), ASKS[0]), self._shortest, unit - 1)
        prompt = self._prompt(TOO_SHORT, 1, chat(words(salt, count), ASKS[0]))
        return [prompt, replace(prompt, sighting=2)]

    def _fit(self, build: Callable[[int], Messages], least: int, most: int) -> int:
        return fit(lambda count: len(self._tokens(build(count))), self._rate, at_least=least, at_most=most)

    def _prompt(self, family: str, sighting: int, messages: Messages) -> Prompt:
        prompt = Prompt(family=family, sighting=sighting, messages=messages, tokens=self._tokens(messages))
        if len(prompt.tokens) % self.sizes.block == 0:
            raise LengthError(f"{prompt.label} is {len(prompt.tokens)} tokens, a multiple of {self.sizes.block}")
        return prompt

    def _tokens(self, messages: Messages) -> tuple[int, ...]:
        """Return a chat's tokens; what was asked once is not asked again."""
        key = (str(messages[0]["content"]), str(messages[1]["content"]))
        if key not in self._asked:
            self._asked[key] = tuple(self._ask(messages))
        return self._asked[key]


def _with_own_words(system: str, salt: str, count: int) -> Messages:
    return chat(system, words(salt, count))
