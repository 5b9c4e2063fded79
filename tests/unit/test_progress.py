"""Progress: what is told, what is left, and a writer that never holds up the run."""

from __future__ import annotations

import io
import time

import pytest

from kimi_runbook.acceptance.progress import Batch, Pace, Progress, begins, ended
from kimi_runbook.acceptance.progress_lines import Lines, Teller, clock, wants_live


def pace_of(planned: dict[int, int], *, observe_s: int = 0) -> Pace:
    """Return the pace of steps that send so many requests one by one."""
    return Pace({step: [Batch(requests=count)] for step, count in planned.items()}, observe_s=observe_s)


def part(step: int, what: str, done: int, total: int = 0) -> Progress:
    return Progress(step=step, name="shared prefix", what=what, done=done, total=total)


def test_nothing_is_guessed_before_a_request_is_done() -> None:
    pace = pace_of({2: 4, 3: 8})
    assert pace.left_s(0.0) is None
    pace.begin(2, 0.0)
    assert pace.left_s(5.0) is None


def test_a_steps_own_pace_counts_for_its_rest_and_the_runs_for_what_follows() -> None:
    pace = pace_of({2: 4, 3: 8, 4: 8})
    pace.begin(2, 0.0)
    pace.end(4.0)  # 4 requests in 4 s
    assert pace.left_s(4.0) == pytest.approx(16.0)
    pace.begin(3, 4.0)
    pace.note(1, 2)
    pace.note(2, 2)
    pace.note(0, 2)  # another part of two
    pace.note(2, 2)
    pace.note(0, 4)  # and one of four: 4 requests in 8 s
    assert pace.left_s(12.0) == pytest.approx(4 * 2.0 + 8 * 12.0 / 8)
    pace.end(20.0)
    pace.begin(4, 20.0)
    pace.end(21.0)
    assert pace.left_s(21.0) == 0.0


def test_more_requests_than_planned_leave_nothing_rather_than_less() -> None:
    pace = pace_of({3: 2})
    pace.begin(3, 0.0)
    pace.note(5, 5)
    assert pace.left_s(10.0) == 0.0


def test_what_runs_at_once_takes_one_turn_together() -> None:
    pace = Pace({3: [Batch(requests=10)], 4: [Batch(requests=4), Batch(requests=64, at_once=32)]})
    pace.begin(3, 0.0)
    pace.end(20.0)  # a turn takes 2 s
    assert pace.left_s(20.0) == pytest.approx(2.0 * (4 + 2))
    pace.begin(4, 20.0)
    pace.note(4, 4)
    pace.note(32, 64)
    assert pace.left_s(30.0) == pytest.approx(10.0 / 5)
    pace.note(64, 64)
    assert pace.left_s(32.0) == 0.0


def test_an_observation_takes_as_long_as_was_asked_for() -> None:
    pace = pace_of({2: 1, 6: 0}, observe_s=60)
    pace.begin(2, 0.0)
    pace.end(2.0)
    assert pace.left_s(2.0) == pytest.approx(60.0)
    pace.begin(6, 2.0)
    pace.note(20, 60)
    assert pace.left_s(22.0) == pytest.approx(40.0)
    pace.end(63.0)
    assert pace.left_s(63.0) == 0.0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3725, "1:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_lines_say_step_what_elapsed_and_left() -> None:
    lines = Lines((2, 3, 4), pace_of({2: 2, 3: 4, 4: 4}))
    assert lines.under_way(0.0) == ""
    assert lines.take(0.0, begins(2, "short request")) is None
    assert lines.under_way(1.0) == "[1/3] step 2 short request (0:01 so far)"
    assert lines.take(2.0, ended(2, "short request", "PASS")) == "[1/3] step 2 short request: PASS, 2.0 s"
    lines.take(2.0, begins(3, "shared prefix"))
    assert lines.take(4.0, part(3, "second sightings", 2, 4)) is None
    told = "[2/3] step 3 shared prefix: second sightings 2/4 (0:04 so far, about 0:06 left)"
    assert lines.under_way(4.0) == told
    assert lines.take(5.0, ended(3, "shared prefix", "FAIL")) == "[2/3] step 3 shared prefix: FAIL, 3.0 s"
    assert lines.take(5.0, ended(4, "concurrency", "NOT_RUN")) == "[3/3] step 4 concurrency: NOT_RUN"


def test_what_is_done_is_no_state_for_being_in_capitals() -> None:
    lines = Lines((3,), pace_of({3: 4}))
    lines.take(0.0, begins(3, "shared prefix"))
    assert lines.take(1.0, part(3, "TTFT", 1, 4)) is None
    assert "TTFT 1/4" in lines.under_way(1.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "err", "environment", "live"),
    [
        pytest.param(Terminal, Terminal, {"TERM": "xterm"}, True, id="terminal"),
        pytest.param(io.StringIO, Terminal, {"TERM": "xterm"}, False, id="stdout-piped"),
        pytest.param(Terminal, io.StringIO, {"TERM": "xterm"}, False, id="stderr-piped"),
        pytest.param(Terminal, Terminal, {"TERM": "dumb"}, False, id="dumb"),
        pytest.param(Terminal, Terminal, {}, False, id="no-term"),
        pytest.param(Terminal, Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False, id="no-color"),
        pytest.param(Terminal, Terminal, {"TERM": "xterm", "NO_COLOR": ""}, True, id="no-color-empty-is-unset"),
    ],
)
def test_a_live_line_needs_a_terminal(
    out: type[io.StringIO], err: type[io.StringIO], environment: dict[str, str], live: bool
) -> None:
    assert wants_live(out(), err(), environment) is live


def told(*, live: bool) -> str:
    stream = Terminal() if live else io.StringIO()
    with Teller(stream, Lines((2, 3), pace_of({2: 2, 3: 2})), live=live) as tell:
        tell(begins(2, "short request"))
        tell(part(2, "chat", 1, 2))
        tell(ended(2, "short request", "PASS"))
        tell(begins(3, "shared prefix"))
    return stream.getvalue()


def test_plain_lines_hold_no_control_characters() -> None:
    text = told(live=False)
    assert "\x1b" not in text and "\r" not in text
    assert text.startswith("[1/2] step 2 short request: PASS, ")


def test_a_live_line_is_erased_at_the_end() -> None:
    text = told(live=True)
    assert "\r\x1b[2K[1/2] step 2 short request: PASS, " in text
    assert text.endswith("\r\x1b[2K")


def test_a_terminal_that_stands_still_holds_up_nothing() -> None:
    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(30)
            return len(text)

    began_s = time.monotonic()
    with Teller(Stuck(), Lines((2,), pace_of({2: 1})), live=False) as tell:
        for _ in range(1000):
            tell(ended(2, "short request", "PASS"))
        assert time.monotonic() - began_s < 1
    assert time.monotonic() - began_s < 5


def test_a_stream_that_went_away_ends_the_writing_and_not_the_run() -> None:
    class Gone(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError(32, "Broken pipe")

    stream = Gone()
    with Teller(stream, Lines((2,), pace_of({2: 1})), live=False) as tell:
        tell(ended(2, "short request", "PASS"))
        tell(ended(2, "short request", "PASS"))
    assert stream.writes == 1
