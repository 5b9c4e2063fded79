from collections.abc import Callable

import pytest


@pytest.mark.smoke
@pytest.mark.step(4)
def test_concurrency(show_step: Callable[[int], None]) -> None:
    """One request proves a path; several at once prove a service."""
    show_step(4)
