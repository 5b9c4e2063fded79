"""Signals that end a program become one interrupt, and none once files are being written."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from kimi_runbook.acceptance.interrupt import Interrupts


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers as they were, whatever a test does."""
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_interrupts_and_names_the_exit_code(number: signal.Signals, code: int) -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert (interrupts.received, interrupts.exit_code) == (number, code)


def test_the_first_signal_names_the_exit_code_and_a_second_interrupts_again() -> None:
    with Interrupts() as interrupts:
        for number in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert interrupts.exit_code == 143


def test_nothing_interrupts_once_held() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.received is signal.SIGINT


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.received is None


def test_handlers_are_given_back() -> None:
    earlier = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not earlier
    assert signal.getsignal(signal.SIGTERM) is earlier
