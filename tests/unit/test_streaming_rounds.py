"""Rounds of the loop: when it rests, and since when it could have known."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kimi_runbook.acceptance.streaming import rounds as rounds_module
from kimi_runbook.acceptance.streaming.poller import Poller, Timers
from kimi_runbook.acceptance.streaming.rounds import Rounds
from kimi_runbook.acceptance.streaming.run_delay import RunDelay

US = 1_000


class World(Poller):
    """A clock that goes on only when somebody waits, and sockets that become ready on demand.

    Attributes:
        now_ns: The time.
        ready: Descriptors that are ready at the next wait.
        after_ns: How long that wait takes.
        kept_off_ns: How much of it another thread had the CPU.
        rested_s: Every rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1_000_000 * US
        self.ready = self.after_ns = self.kept_off_ns = 0
        self.rested_s: list[float] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.rested_s.append(seconds)
        self.now_ns += int(seconds * 1e9)

    def wait(self, at_most_ns: int) -> list[tuple[int, int]]:
        self.now_ns += min(self.after_ns, at_most_ns)
        return [(number, 1) for number in range(self.ready)]

    def since_last_ns(self) -> int:
        return self.kept_off_ns


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(rounds_module, "time", made)
    monkeypatch.setattr(rounds_module, "RunDelay", lambda: made)
    yield made
    made.close()


def round_of(world: World, rounds: Rounds, *, ready: int, after_us: int, streams: int) -> float:
    """Let one round pass; returns the microseconds since when its bytes may have been there."""
    world.ready, world.after_ns = ready, after_us * US
    rounds.wait(world.now_ns + 10**9, streams)
    assert rounds.now_ns == world.now_ns
    return (rounds.now_ns - rounds.since_ns) / US


def test_bytes_may_have_been_there_since_the_loop_last_looked(world: World) -> None:
    rounds = Rounds(world)
    assert round_of(world, rounds, ready=1, after_us=9000, streams=1) == 0, "it slept until they came"
    world.now_ns += 4000 * US  # the loop reads
    assert round_of(world, rounds, ready=1, after_us=2, streams=1) == 4002, "they came while it read"
    assert round_of(world, rounds, ready=1, after_us=9000, streams=1) == 0


def test_a_thread_kept_off_its_cpu_could_not_look(world: World) -> None:
    rounds = Rounds(world)
    world.kept_off_ns = 7000 * US
    assert round_of(world, rounds, ready=1, after_us=9000, streams=1) == 7000
    world.now_ns += 80_000 * US  # the loop is held up, and then loses its CPU while bytes are there at once
    assert round_of(world, rounds, ready=1, after_us=7002, streams=1) == 87_002


def test_the_loop_rests_while_tokens_of_many_streams_come_one_by_one(world: World) -> None:
    rounds = Rounds(world)
    round_of(world, rounds, ready=1, after_us=150, streams=128)
    assert world.rested_s == []
    assert round_of(world, rounds, ready=3, after_us=2, streams=128) == 502, "the rest is part of the lag"
    round_of(world, rounds, ready=3, after_us=2, streams=128)
    assert world.rested_s == [0.0005, 0.0005]
    round_of(world, rounds, ready=64, after_us=2, streams=128)
    assert len(world.rested_s) == 3
    round_of(world, rounds, ready=64, after_us=2, streams=128)
    assert len(world.rested_s) == 3, "a burst is read without resting"


@pytest.mark.parametrize(
    ("streams", "after_us"),
    [
        pytest.param(128, 9000, id="tokens-are-rare"),
        pytest.param(128, 2, id="always-something-to-read"),
        pytest.param(8, 150, id="few-streams"),
        pytest.param(0, 150, id="no-kernel-stamps"),
    ],
)
def test_otherwise_it_does_not_rest(world: World, streams: int, after_us: int) -> None:
    rounds = Rounds(world)
    for _ in range(3):
        round_of(world, rounds, ready=1, after_us=after_us, streams=streams)
    assert world.rested_s == []


def test_timers_run_in_order_and_once() -> None:
    timers, done = Timers(), []
    for at_ns in (30, 10, 20):
        timers.add(at_ns, lambda at_ns=at_ns: done.append(at_ns))
    assert timers.next_ns == 10
    timers.run(20)
    assert (done, timers.next_ns) == ([10, 20], 30)
    timers.run(1000)
    assert done == [10, 20, 30]
    assert timers.next_ns > 10**18, "nothing is to be done"


def test_a_thread_that_waits_for_its_cpu_is_counted() -> None:
    """A busy process shares this one's CPU, so this one cannot have had it all the time."""
    cpus = os.sched_getaffinity(0)
    cpu = min(cpus)
    busy = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass"
    try:
        os.sched_setaffinity(0, {cpu})
        with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None
                other.stdout.readline()
                delay = RunDelay()
                until_s, total_ns = time.monotonic() + 5, 0
                while total_ns == 0 and time.monotonic() < until_s:
                    total_ns += delay.since_last_ns()
                assert total_ns > 0
                delay.close()
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, cpus)
