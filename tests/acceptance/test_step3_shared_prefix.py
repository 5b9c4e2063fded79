from collections.abc import Callable

import pytest


@pytest.mark.smoke
@pytest.mark.step(3)
def test_shared_prefix(show_step: Callable[[int], None]) -> None:
    """A flag can be accepted and the cache inert, so hits are computed first and counted after."""
    show_step(3)
