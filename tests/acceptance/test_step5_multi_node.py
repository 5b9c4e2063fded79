from collections.abc import Callable

import pytest


@pytest.mark.smoke
@pytest.mark.step(5)
def test_multi_node(show_step: Callable[[int], None]) -> None:
    """Two engines on two nodes answer as well as one over both, so look at who runs where and what moved."""
    show_step(5)
