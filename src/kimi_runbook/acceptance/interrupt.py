"""A run that is told to stop: one KeyboardInterrupt where it stands, and quiet while its files are written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

# A terminal's Ctrl-C, what `kill`, systemd and CI systems send, and what an ssh session leaves behind when it breaks.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns signals that end a program into KeyboardInterrupt; use it as a context manager in the main thread.

    A signal that is ignored already stays ignored (``nohup``, a shell's background job). A second signal interrupts
    again, so that no clean-up can hang for ever, until ``hold`` is called: from then on nothing interrupts.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._held = False
        self._earlier: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a shell reports for a program that ended by this signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + int(self.received or signal.SIGINT)

    def hold(self) -> None:
        """Let nothing interrupt from here on."""
        self._held = True

    def __enter__(self) -> Interrupts:
        """Take the signals over; outside the main thread there are none to take."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                earlier = signal.getsignal(number)
                if earlier is not signal.SIG_IGN:
                    self._earlier[number] = earlier
                    signal.signal(number, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Give the signals back."""
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if not self._held:
            raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a short piece of work end whatever signal comes, then interrupt: for what must not be left half done.

    Outside the main thread signals do not arrive, so there is nothing to hold back.

    Raises:
        KeyboardInterrupt: On the way out, when a signal came meanwhile.
    """
    with Interrupts() as interrupts:
        interrupts.hold()
        yield
    if interrupts.received:
        raise KeyboardInterrupt
