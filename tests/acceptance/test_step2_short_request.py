from collections.abc import Callable

import pytest


@pytest.mark.smoke
@pytest.mark.step(2)
def test_short_request(show_step: Callable[[int], None]) -> None:
    """Metrics can look healthy while nobody gets an answer, so ask one."""
    show_step(2)
