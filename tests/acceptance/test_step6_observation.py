from collections.abc import Callable

import pytest


@pytest.mark.smoke
@pytest.mark.step(6)
def test_observation(show_step: Callable[[int], None]) -> None:
    """A service can pass every request and still fill its memory, so watch it for a while."""
    show_step(6)
