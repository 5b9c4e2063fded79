from collections.abc import Callable

import pytest


@pytest.mark.smoke
@pytest.mark.step(1)
def test_start(show_step: Callable[[int], None]) -> None:
    """A port can answer while a worker is already dying, so the log of every node is read."""
    show_step(1)
