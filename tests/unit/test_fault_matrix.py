"""Every fault of the fake engine, driven through steps 2 to 4 in order.

The first red check is the one that owns the fault, its message names it, and the verdict is not to accept. Red is FAIL
or INCONCLUSIVE; a warning lets the chain go on, and a busy machine may add one of its own.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kimi_runbook.acceptance.chain import Chain
from kimi_runbook.acceptance.client import EngineClient
from kimi_runbook.acceptance.ladder import drive as ladder_drive
from kimi_runbook.acceptance.ladder.rungs import settings as ladder_rules
from kimi_runbook.acceptance.result import Check, State
from kimi_runbook.acceptance.short_request import answers, keep_alive
from kimi_runbook.acceptance.short_request.look import settings as short_request_rules
from kimi_runbook.reading import Fields
from kimi_runbook.verdict import Verdict, VerdictName
from tests.faults.engine.cache_model import CacheModel, Flaw
from tests.faults.engine.fake_engine import FakeEngine, Fault
from tests.faults.engine.site import context

STEPS = (2, 3, 4)
LIMITS = {
    "max_tokens": 16,
    "chat_template_kwargs": {"thinking": False},
    "abilities": {"tools": "required", "reasoning": "required", "images": "required"},
}


class Owner(NamedTuple):
    """Which check of which step a fault belongs to, how it ends there, and what its message has to say."""

    step: int
    check: str
    state: State
    says: str


FAIL, WARN, INCONCLUSIVE = State.FAIL, State.WARN, State.INCONCLUSIVE

OWNERS = {
    # step 2: the API as a whole
    Fault.UNHEALTHY: Owner(2, "engine-healthy", FAIL, "HTTP 503"),
    Fault.KEEP_ALIVE_CLOSE: Owner(2, "keep-alive", FAIL, "without announcing it"),
    Fault.PEER_KILLED: Owner(2, "chat-answer", FAIL, "HTTP 503, the engine is dead"),
    Fault.ERROR_IN_200: Owner(2, "chat-answer", FAIL, "an error inside a 200"),
    Fault.EMPTY_ANSWER: Owner(2, "chat-answer", FAIL, "0 characters of content"),
    Fault.FINISH_ERROR: Owner(2, "chat-finish-reason", FAIL, "finish_reason 'error'"),
    Fault.USAGE_WRONG: Owner(2, "chat-usage", FAIL, "usage that adds up"),
    Fault.STREAM_CUT: Owner(2, "stream-answer", FAIL, "before the answer's end"),
    Fault.STALL: Owner(2, "stream-answer", FAIL, "stalled"),
    Fault.NO_STREAM_USAGE: Owner(2, "stream-usage", FAIL, "no usage"),
    Fault.COMPLETIONS_BROKEN: Owner(2, "completion-answer", FAIL, "HTTP 500"),
    # step 2: abilities
    Fault.REASONING_ABSENT: Owner(2, "reasoning", FAIL, "not offered"),
    Fault.REASONING_LEAKS: Owner(2, "reasoning", FAIL, "<|close|>"),
    Fault.REASONING_ALWAYS: Owner(2, "reasoning-off", FAIL, "thinking: false"),
    Fault.TOOLS_REFUSED: Owner(2, "tool-call", FAIL, "--enable-auto-tool-choice"),
    Fault.REFUSAL_UNPRINTABLE: Owner(2, "tool-call", FAIL, "not offered"),
    Fault.TOOLS_LIMITED: Owner(2, "tool-call-answer", FAIL, "limits how much may be asked"),
    Fault.TOOL_CALL_OBJECT: Owner(2, "tool-call-arguments", FAIL, "arguments are a JSON object, no text"),
    Fault.TOOL_CALL_EMPTY: Owner(2, "tool-call", FAIL, "no tool call"),
    Fault.TOOL_CALL_MALFORMED: Owner(2, "tool-call-arguments", FAIL, "arguments are no JSON"),
    Fault.TOOL_CALL_WRONG_TYPE: Owner(2, "tool-call-schema", FAIL, "rpm: '900'"),
    Fault.TOOL_STREAM_BROKEN: Owner(2, "tool-call-stream-arguments", FAIL, "arguments are no JSON"),
    Fault.IMAGE_REFUSED: Owner(2, "image-input", FAIL, "At most 0 image(s)"),
    Fault.IMAGE_DROPPED: Owner(2, "image-input", FAIL, "never reached the model"),
    # step 2: refusals
    Fault.BAD_REQUEST_ACCEPTED: Owner(2, "refuses-unknown-model", FAIL, "HTTP 200"),
    Fault.REFUSAL_WITHOUT_BODY: Owner(2, "refuses-unknown-model", FAIL, "without an error body"),
    # step 3
    Fault.METRICS_500: Owner(3, "metrics", FAIL, "HTTP 500"),
    Fault.METRICS_TEXT: Owner(3, "metrics", FAIL, "not a Prometheus exposition"),
    Fault.CACHING_OFF: Owner(3, "prefix-caching-on", FAIL, "enable_prefix_caching"),
    Fault.BLOCK_TOO_LARGE: Owner(3, "block-fits-context", FAIL, "100000"),
    Fault.HITS_ZERO: Owner(3, "short-suffix.counted-hits", FAIL, "expected"),
    Fault.HITS_STOP: Owner(3, "*.counted-hits", FAIL, "expected"),
    Fault.COUNTERS_FROZEN: Owner(3, "witnesses-agree", FAIL, "expected"),
    Fault.CACHED_TOKENS_MISSING: Owner(3, "cached-tokens", INCONCLUSIVE, "--enable-prompt-tokens-details"),
    Fault.CACHED_TOKENS_NULL: Owner(3, "cached-tokens", INCONCLUSIVE, "--enable-prompt-tokens-details"),
    Fault.CACHED_TOKENS_WRONG: Owner(3, "witnesses-agree", FAIL, "expected"),
    Fault.GEOMETRY_ABSENT: Owner(3, "geometry", INCONCLUSIVE, "cache_config_info"),
    Fault.SECOND_ENGINE: Owner(3, "engines-reporting", INCONCLUSIVE, "2 engines"),
    Fault.RESTART_IN_WINDOW: Owner(3, "window", INCONCLUSIVE, "process_start_time_seconds"),
    Fault.OTHER_TRAFFIC: Owner(3, "window", INCONCLUSIVE, "tokens"),
    Fault.TOKENIZE_KEPT: Owner(3, "prompts", INCONCLUSIVE, "does not pass this route on"),
    Fault.TEMPLATE_DIFFERS: Owner(3, "prompt-tokens", INCONCLUSIVE, "/tokenize"),
    # step 4
    Fault.OOM_UNDER_LOAD: Owner(4, "nominal.out-of-memory", FAIL, "under load, at 3 streams"),
    Fault.OTHER_TRAFFIC_UNDER_LOAD: Owner(4, "no-other-traffic", INCONCLUSIVE, "ran where"),
    Fault.DIES_UNDER_LOAD: Owner(4, "nominal.engine-alive", FAIL, "after 3 streams at once"),
}
# Not broken, but not well: the chain accepts and says so.
TOLD = {
    Fault.SLOW_FIRST_TOKEN: Owner(2, "stream-first-token", WARN, "within 0.05 s"),
    Fault.STREAM_BUFFERED: Owner(2, "stream-in-pieces", WARN, "response buffering"),
    Fault.PREEMPTS: Owner(4, "no-preemption", WARN, "preemptions, the first at 1 streams"),
    Fault.CACHE_FULL: Owner(4, "kv-headroom", WARN, "97.0%"),
    Fault.FEW_SLOTS: Owner(4, "no-queue", WARN, "at most 1 of 3 ran at once"),
}
# Warnings that depend on times, so on what else this machine does.
OF_A_BUSY_MACHINE = {"client-lag", "sampled-under-load", "first-token-ratio", "stream-first-token", "knee"}
# Healthy, and no fault of the engine at all.
ACCEPTED = {Fault.RECURRENT, Fault.HEALTH_KEPT}
# Seen only over time: test_acceptance_step6.py.
OVER_TIME = {Fault.KV_LEAKS, Fault.SLOWS_DOWN}

# Seen before the chain begins: test_endpoint_look.py, test_accept.py.
BEFORE_THE_CHAIN = {Fault.GZIP_ANYWAY, Fault.KEY_REPEATED}

# The faults the acceptance is asked to find, by name.
ASKED_FOR = {
    "engine without prefix caching": Fault.CACHING_OFF,
    "hits never": Fault.HITS_ZERO,
    "counters frozen": Fault.COUNTERS_FROZEN,
    "metrics 500": Fault.METRICS_500,
    "cached_tokens null": Fault.CACHED_TOKENS_NULL,
    "restart mid-window": Fault.RESTART_IN_WINDOW,
    "stall": Fault.STALL,
    "truncated stream": Fault.STREAM_CUT,
    "HTTP 200 with an error body": Fault.ERROR_IN_200,
    "tool call malformed": Fault.TOOL_CALL_MALFORMED,
    "keep-alive close": Fault.KEEP_ALIVE_CLOSE,
    "peer killed": Fault.PEER_KILLED,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules with shorter times, so that the whole table takes half a minute."""
    short: dict[str, Any] = short_request_rules().mapping()
    short["keep_alive"]["idle_s"] = 0.02
    monkeypatch.setattr(keep_alive, "settings", lambda: Fields(short, "quick"))
    often: dict[str, Any] = ladder_rules().mapping()
    often["ladder"]["sample_every_s"] = 0.04
    monkeypatch.setattr(ladder_drive, "settings", lambda: Fields(often, "quick"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first token is late after 50 ms."""
    rules: dict[str, Any] = short_request_rules().mapping()
    rules["stream"]["first_token_s"] = 0.05
    monkeypatch.setattr(answers, "settings", lambda: Fields(rules, "impatient"))


class Driven(NamedTuple):
    """What a run of the chain came to: checks that are not green in order, the verdict, and how each step ended."""

    unmet: list[tuple[int, Check]]
    verdict: Verdict
    states: dict[int, State]

    @property
    def red(self) -> list[tuple[int, Check]]:
        """The checks that failed or could not be answered."""
        return [(step, check) for step, check in self.unmet if check.state in (FAIL, INCONCLUSIVE)]


def drive(engine: FakeEngine, run_dir: Path) -> Driven:
    silent = {Fault.STALL, Fault.PEER_KILLED} & engine.faults
    asked = context(engine.url, run_dir, steps=STEPS, model_limits=LIMITS, concurrency=3)
    asked.client = EngineClient(engine.url, timeout_s=0.3 if silent else 5)
    engine.first_token_delay_s = 0.08 if Fault.SLOW_FIRST_TOKEN in engine.faults else 0.0
    chain = Chain(asked)
    for step in STEPS:
        slow = step == 4 or Fault.STREAM_BUFFERED in engine.faults  # step 4 needs time to sample in
        engine.token_delay_s = 0.008 if slow else 0.0012
        chain.run(step)
    record = chain.record()
    assert record.verdict is not None
    unmet = [(step.step, check) for step in record.steps for check in step.unmet()]
    return Driven(unmet, record.verdict, {step.step: step.state for step in record.steps})


def owns(owner: Owner, step: int, check: Check) -> bool:
    name = owner.check.removeprefix("*")
    named = check.name.endswith(name) if owner.check.startswith("*") else check.name == name
    return (step, check.state) == (owner.step, owner.state) and named


@pytest.mark.parametrize("fault", OWNERS, ids=lambda fault: fault.name)
def test_a_fault_is_owned_named_and_not_accepted(fault: Fault, tmp_path: Path) -> None:
    owner = OWNERS[fault]
    with FakeEngine(fault) as engine:
        driven = drive(engine, tmp_path)
    step, first = driven.red[0]
    assert owns(owner, step, first), f"step {step}: {first.sentence()}"
    assert owner.says in first.sentence()
    assert first.next_step
    assert driven.verdict.name is not VerdictName.ACCEPT
    assert driven.verdict.name.exit_code != 0
    assert all(driven.states[after] is State.NOT_RUN for after in STEPS if after > owner.step)


@pytest.mark.parametrize("fault", TOLD, ids=lambda fault: fault.name)
@pytest.mark.usefixtures("impatient")
def test_what_is_not_well_is_accepted_and_told(fault: Fault, tmp_path: Path) -> None:
    owner = TOLD[fault]
    with FakeEngine(fault) as engine:
        driven = drive(engine, tmp_path)
    assert not driven.red, [check.sentence() for _, check in driven.red]
    step, told = next((step, check) for step, check in driven.unmet if check.name == owner.check)
    assert owns(owner, step, told), f"step {step}: {told.sentence()}"
    assert owner.says in told.sentence()
    assert driven.verdict.name is VerdictName.ACCEPT
    assert (step, told.name) in [(reason.step, reason.check) for reason in driven.verdict.reasons]


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param({"block_size": 64}, id="attention"),
        pytest.param({"block_size": 128, "recurrent": True}, id="recurrent-state"),
    ],
)
@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_a_healthy_engine_is_accepted(cache: dict[str, Any], openmetrics: bool, tmp_path: Path) -> None:
    with FakeEngine(cache=CacheModel(**cache), openmetrics=openmetrics) as engine:
        driven = drive(engine, tmp_path)
    assert not driven.red, [check.sentence() for _, check in driven.red]
    assert driven.verdict.name is VerdictName.ACCEPT
    assert {check.name for _, check in driven.unmet} <= OF_A_BUSY_MACHINE


@pytest.mark.parametrize("fault", ACCEPTED - {Fault.RECURRENT}, ids=lambda fault: fault.name)
def test_what_is_no_fault_of_the_engine_is_accepted(fault: Fault, tmp_path: Path) -> None:
    with FakeEngine(fault) as engine:
        driven = drive(engine, tmp_path)
    assert not driven.red, [check.sentence() for _, check in driven.red]
    assert driven.verdict.name is VerdictName.ACCEPT


@pytest.mark.parametrize("flaw", Flaw)
def test_a_cache_that_is_wrong_is_not_accepted(flaw: Flaw, tmp_path: Path) -> None:
    recurrent = flaw in (Flaw.STATE_LOST, Flaw.JUNCTION_LOST)
    with FakeEngine(cache=CacheModel(block_size=128, recurrent=recurrent, flaw=flaw)) as engine:
        driven = drive(engine, tmp_path)
    step, first = driven.red[0]
    assert step == 3
    assert first.name.endswith("counted-hits"), first.sentence()
    assert driven.verdict.name is not VerdictName.ACCEPT


def test_every_fault_has_a_place_in_the_table() -> None:
    placed = [*OWNERS, *TOLD, *ACCEPTED, *OVER_TIME, *BEFORE_THE_CHAIN]
    assert sorted(placed) == sorted(Fault)


def test_the_faults_that_were_asked_for_are_red() -> None:
    assert len(ASKED_FOR) == 12
    assert set(ASKED_FOR.values()) <= set(OWNERS)
