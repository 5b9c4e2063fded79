"""Salted chat prompts of a wanted length in the server's own tokens.

Text is sent, as clients do, and the server's tokenizer says how many tokens it is: a template, a merge at the seam of
two parts or a begin token would spoil any count made here. The salt is drawn per step, so that no earlier run, and no
other client, can have warmed the cache for these prompts.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Tokenize = Callable[[Messages], Sequence[int]]

_WORDS = (
    *("rack", "node", "fabric", "switch", "cable", "port", "lane", "driver", "kernel", "module", "engine", "block"),
    *("cache", "token", "batch", "shard", "queue", "worker", "socket", "window", "canary", "drain", "record", "gauge"),
)
_FIRST_GUESS_TOKENS_PER_WORD = 4.0
_ROUNDS = 30


class LengthError(Exception):
    """No text of the wanted length was found; the message says how near it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: what is sent and what the server makes of it."""

    label: str
    messages: Messages
    tokens: tuple[int, ...]


def new_salt() -> str:
    """Return a salt no prompt has begun with before."""
    return secrets.token_hex(8)


def words(salt: str, count: int) -> str:
    """Return so many words, the same for the same salt, with the salt in front."""
    draw = random.Random(salt)  # noqa: S311 - text to fill a prompt, no secret
    return " ".join([salt, *(draw.choice(_WORDS) for _ in range(count))])


def chat(system: str, user: str) -> Messages:
    """Return a chat of a system message, which is the part requests share, and a user message."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def fit(
    tokenize: Tokenize, build: Callable[[int], Messages], *, at_least: int, at_most: int
) -> tuple[Messages, tuple[int, ...]]:
    """Return the messages ``build(n)`` whose token count lies in a range, found by asking the tokenizer.

    Args:
        tokenize: Messages to token ids, as the server renders them.
        build: Word count to messages; more words make more tokens.
        at_least, at_most: The range, in tokens, both ends included.

    Raises:
        LengthError: When no word count gives such a prompt.
    """
    low, high = 0, None
    count = max(0, int(at_least / _FIRST_GUESS_TOKENS_PER_WORD))
    seen: list[int] = []
    for _ in range(_ROUNDS):
        messages = build(count)
        tokens = tuple(tokenize(messages))
        seen.append(len(tokens))
        if at_least <= len(tokens) <= at_most:
            return messages, tokens
        if len(tokens) < at_least:
            low = count + 1
            step = max(1, int((at_least - len(tokens)) / _FIRST_GUESS_TOKENS_PER_WORD))
            count = count + step if high is None else (low + high) // 2
        else:
            high = count - 1
            count = (low + high) // 2
        if high is not None and (low > high or count < 0):
            break
    raise LengthError(f"wanted {at_least} to {at_most} tokens, got {seen}")
