"""The one error type operators see: where, observed, expected, next step."""

from __future__ import annotations


class RunbookError(Exception):
    """A request that cannot be met, told so that someone at three in the morning can act on it.

    Attributes:
        where: File, host or option the problem is about.
        observed: What is there.
        expected: What would have been right.
        next_step: The command or edit that leads on.
    """

    def __init__(self, *, where: str, observed: str, expected: str, next_step: str) -> None:
        super().__init__(where, observed, expected, next_step)
        self.where = where
        self.observed = observed
        self.expected = expected
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.where}: {self.observed}; expected {self.expected}. {self.next_step}"
