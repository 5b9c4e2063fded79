from collections.abc import Callable

import pytest


@pytest.mark.smoke
@pytest.mark.step(0)
def test_host(show_step: Callable[[int], None]) -> None:
    """The lock holds on every node: what runs, not what lies on disk."""
    show_step(0)
