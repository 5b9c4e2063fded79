"""Salted chat prompts of a wanted length in the server's own tokens.

Text is sent, as clients do, and the server's tokenizer says how many tokens it is: a template, a merge at the seam of
two parts or a begin token would spoil any count made here. Every text begins with a salt drawn for the run, so that no
earlier run, and no other client, can have warmed the cache for it.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

_WORDS = (
    *("rack", "node", "fabric", "switch", "cable", "port", "lane", "driver", "kernel", "module", "engine", "block"),
    *("cache", "token", "batch", "shard", "queue", "worker", "socket", "window", "canary", "drain", "record", "gauge"),
)
_TRIES = 8  # two or three do: tokens grow nearly in step with words


class LengthError(Exception):
    """No text of the wanted length was found; the message says how near it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request's prompt: what is sent and what the server makes of it.

    Attributes:
        family: Which series it belongs to.
        sighting: Its place in the series, from 1.
        messages: The chat.
        tokens: The server's token ids.
    """

    family: str
    sighting: int
    messages: Messages
    tokens: tuple[int, ...]

    @property
    def label(self) -> str:
        """Name of the request: family and sighting."""
        return f"{self.family}.{self.sighting}"


def new_salt() -> str:
    """Return a salt no prompt has begun with before."""
    return secrets.token_hex(8)


def words(salt: str, count: int) -> str:
    """Return so many words, the same for the same salt, with the salt in front; more words begin with fewer."""
    draw = random.Random(salt)  # noqa: S311 - text to fill a prompt, no secret
    return " ".join([salt, *(draw.choice(_WORDS) for _ in range(count))])


def chat(system: str, user: str) -> Messages:
    """Return a chat of a system message, which is the part requests share, and a user message."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences share from their start."""
    shared = min(len(first), len(second))
    if first[:shared] == second[:shared]:
        return shared
    return next(position for position in range(shared) if first[position] != second[position])


@dataclass(slots=True)
class WordRate:
    """How many tokens a word makes, as far as this tokenizer has shown; better with each prompt that was fitted."""

    tokens_per_word: float = 3.0
    overhead: float = 0.0

    def words_for(self, tokens: float) -> int:
        """Return how many words make about so many tokens."""
        return max(0, round((tokens - self.overhead) / self.tokens_per_word))


def fit(measure: Callable[[int], int], rate: WordRate, *, at_least: int, at_most: int) -> int:
    """Return a word count whose text lies in a range of tokens, found by arithmetic and checked with the tokenizer.

    Args:
        measure: Word count to tokens; asks the server, so each call counts.
        rate: What is known of the tokenizer; improved by what is seen here.
        at_least, at_most: The range, in tokens, both ends included.

    Raises:
        LengthError: When no word count gives such a text.
    """
    seen: dict[int, int] = {}
    middle = (at_least + at_most) / 2
    count = rate.words_for(middle)
    for _ in range(_TRIES):
        seen[count] = measure(count)
        if at_least <= seen[count] <= at_most:
            return count
        _learn(rate, seen, count)
        guess = rate.words_for(middle)
        below = [number for number, tokens in seen.items() if tokens < at_least]
        above = [number for number, tokens in seen.items() if tokens > at_most]
        low, high = max(below, default=-1), min(above, default=None)
        if high is not None:
            if high - low < 2:
                break
            guess = min(max(guess, low + 1), high - 1)
        count = max(guess, low + 1)
    raise LengthError(f"wanted {at_least} to {at_most} tokens, got {sorted(seen.values())}")


def _learn(rate: WordRate, seen: dict[int, int], count: int) -> None:
    """Take the slope between the two counts that lie furthest apart, and the offset from the latest."""
    few, many = min(seen), max(seen)
    if many > few and seen[many] > seen[few]:
        rate.tokens_per_word = (seen[many] - seen[few]) / (many - few)
    elif len(seen) == 1 and count:
        rate.tokens_per_word = max(rate.tokens_per_word, 0.5)
    rate.overhead = seen[count] - rate.tokens_per_word * count
