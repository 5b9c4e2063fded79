"""A step that was interrupted from the keyboard, with what it had found until then."""

from __future__ import annotations

from kimi_runbook.acceptance.result import StepResult


class StepInterruptedError(KeyboardInterrupt):
    """The operator's interrupt, on its way up.

    Attributes:
        partial: What the step had found; its state is never better than INCONCLUSIVE.
    """

    def __init__(self, partial: StepResult) -> None:
        super().__init__()
        self.partial = partial
