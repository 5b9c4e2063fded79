"""Rules from checks to a verdict."""

import pytest

from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.reading import data_file
from kimi_runbook.verdict import Verdict, VerdictName, judge_steps


def step(number: int, state: State, *names: str) -> StepResult:
    checks = [Check(name=name, state=state, observed="seen", expected="wanted", evidence="here") for name in names]
    return StepResult.of(
        number, f"step{number}", checks or [Check(name="ok", state=state, observed="", expected="")], {}
    )


def passes(*numbers: int) -> list[StepResult]:
    return [step(number, State.PASS, "ok") for number in numbers]


@pytest.mark.parametrize(
    ("number", "check", "name"),
    [
        (0, "k3-a.driver-loaded", VerdictName.FIX_ENVIRONMENT),
        (1, "k3-b.no-fatal-line", VerdictName.FIX_ENVIRONMENT),
        (2, "refuses-unknown-model", VerdictName.FIX_ENVIRONMENT),
        (3, "metrics", VerdictName.FIX_ENVIRONMENT),
        (3, "prefix-caching-on", VerdictName.TUNE),
        (3, "block-fits-context", VerdictName.TUNE),
        (3, "second.counted-hits", VerdictName.TUNE),
        (3, "cached-tokens", VerdictName.MIGRATE),
        (2, "tool-call", VerdictName.TUNE),
        (2, "tool-call-schema", VerdictName.MIGRATE),
        (4, "nominal.streams-complete", VerdictName.FIX_ENVIRONMENT),
        (4, "peak.streams-complete", VerdictName.EXTEND),
        (4, "c2.out-of-memory", VerdictName.TUNE),
        (6, "hits-keep-coming", VerdictName.TUNE),
        (6, "no-restart", VerdictName.FIX_ENVIRONMENT),
        (5, "k3-b.traffic", VerdictName.FIX_ENVIRONMENT),
        (3, "witnesses-agree", VerdictName.MIGRATE),
        (3, "counters-move", VerdictName.FIX_ENVIRONMENT),
        (3, "something-new", VerdictName.FIX_ENVIRONMENT),
    ],
)
def test_a_failed_check_decides(number: int, check: str, name: VerdictName) -> None:
    later = [StepResult.not_run(n, f"step{n}", "one layer at a time") for n in range(number + 1, 6)]
    verdict = judge_steps([*passes(*range(number)), step(number, State.FAIL, check), *later])
    assert verdict.name is name
    assert verdict.reasons[0].check == check
    assert verdict.reasons[0].evidence == "here"
    assert verdict.next_command
    assert verdict.name.exit_code == 1


def test_hits_and_answers_both_wrong_is_the_cache_and_not_the_version() -> None:
    verdict = judge_steps([step(3, State.FAIL, "cached-tokens", "second.counted-hits")])
    assert verdict.name is VerdictName.TUNE
    assert {reason.check for reason in verdict.reasons} == {"cached-tokens", "second.counted-hits"}


def test_everything_passed_is_accepted() -> None:
    verdict = judge_steps(passes(0, 1, 2, 3, 4, 5))
    assert (verdict.name, verdict.advice, verdict.name.exit_code) == (VerdictName.ACCEPT, (), 0)


@pytest.mark.parametrize(
    ("check", "advice"), [("no-preemption", "tune"), ("peak.no-preemption", "extend"), ("kv-headroom", "extend")]
)
def test_a_warning_is_advice_and_no_refusal(check: str, advice: str) -> None:
    verdict = judge_steps([*passes(2, 3), step(4, State.WARN, check)])
    assert (verdict.name, verdict.advice) == (VerdictName.ACCEPT, (advice,))
    assert verdict.reasons[0].check == check


@pytest.mark.parametrize("state", [State.INCONCLUSIVE, State.NOT_RUN])
def test_what_is_not_known_is_never_a_pass(state: State) -> None:
    verdict = judge_steps([*passes(0, 1), step(2, state, "x")])
    assert (verdict.name, verdict.name.exit_code) == (VerdictName.INCONCLUSIVE, 3)
    assert "step 2" in verdict.why


def test_no_steps_prove_nothing() -> None:
    assert judge_steps([]).name is VerdictName.INCONCLUSIVE


def test_checks_that_saw_one_event_share_a_reason() -> None:
    """One out-of-memory, told by three checks, beside a failure of its own."""

    def saw(name: str, observed: str) -> Check:
        return Check(name=name, state=State.FAIL, observed=observed, expected="answers")

    oom = "POST http://k3/v1/chat/completions: HTTP 500: CUDA out of memory"
    failed = [
        saw("nominal.out-of-memory", f"out of memory under load, at 4 streams: {oom}"),
        saw("nominal.streams-complete", f"2 of 8 complete at 4 at once: 6 HTTP 500; the first: {oom}"),
        saw("other", "HTTP 500: CUDA out of memory"),
        saw("nominal.in-flight", "3 streams"),
        saw("peak.in-flight", "3 streams"),  # too short to be one event
    ]
    reasons = judge_steps([StepResult.of(4, "concurrency", failed, {})]).reasons
    first = "nominal.out-of-memory (also nominal.streams-complete, other): out of memory under load, at 4 streams"
    assert reasons[0].text.startswith(first)
    assert [reason.check for reason in reasons[1:]] == ["nominal.in-flight", "peak.in-flight"]


def test_a_verdict_survives_json() -> None:
    verdict = judge_steps([step(4, State.FAIL, "streams-complete")])
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_rule_names_are_unique() -> None:
    names = [rule.text("id") for rule in data_file("verdict_rules.yml").each("rules")]
    assert len(names) == len(set(names))
