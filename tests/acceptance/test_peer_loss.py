from collections.abc import Callable

import pytest


@pytest.mark.destructive
@pytest.mark.drill
@pytest.mark.step(5)
def test_peer_loss(show_step: Callable[..., None]) -> None:
    """A lost node is seldom what the last line says, so lose one on purpose and look at what tells."""
    show_step(5, drill=True)
