"""Campaign sheet and checklist: observed or said not to be; ticked only by what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.campaign.checklist import BOXES, checklist_of
from kimi_runbook.campaign.fill import with_campaign
from kimi_runbook.campaign.run import agreed, gib, percent
from kimi_runbook.campaign.sheet import FIELDS
from kimi_runbook.campaign.values import Box, BoxState, Part
from kimi_runbook.reading import data_file
from kimi_runbook.record import Record
from tests.unit import records
from tests.unit.record_steps import KNEE, NOMINAL, PEAK, load_step, prefix_step

HOSTS = ("k3-01", "k3-02")


def part(record: Record, field: str, name: str) -> Part:
    (entry,) = [entry for entry in record.campaign if entry.id == field]
    (found,) = [part for part in entry.parts if part.name == name]
    return found


def box(checklist: Sequence[Box], id_: str) -> Box:
    (found,) = [box for box in checklist if box.id == id_]
    return found


def changed(step: int, change: Callable[[StepResult], StepResult]) -> Record:
    """Return the accepted run with one step changed, its sheet and checklist made again."""
    made = records.accepted()
    steps = tuple(change(result) if result.step == step else result for result in made.steps)
    plan = records.plan(steps=(0, 1, 2, 3, 4, 5, 6), peer_loss_drill=True)
    return with_campaign(replace(made, steps=steps), plan)


def with_figures(**figures: Any) -> Callable[[StepResult], StepResult]:
    return lambda step: replace(step, figures={**step.figures, **figures})


def test_the_code_fills_what_the_data_file_asks_for() -> None:
    data = data_file("campaign_sheet.yml")
    assert [field.text("id") for field in data.each("sheet") if field.text("id") != "date"] == list(FIELDS)
    assert [box.text("id") for box in data.each("checklist")] == list(BOXES)
    assert (len(FIELDS) + 1, len(BOXES)) == (14, 10)


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("image_and_version", "image", f"{records.REPOSITORY}:v0.33.0@{records.DIGEST}"),
        ("image_and_version", "vLLM", "0.33.0"),
        ("driver_and_cuda", "driver", "580.178.04"),
        ("driver_and_cuda", "NVML library", "580.178.04"),
        ("driver_and_cuda", "CUDA of the image", "13.0"),
        ("driver_and_cuda", "container toolkit", "1.20.0-1"),
        ("hardware", "GPUs", "8 x NVIDIA B300 per node"),
        ("hardware", "memory per GPU", "275040 MiB"),
        ("nodes_and_interconnect", "nodes", "2 (k3-01, k3-02)"),
        ("nodes_and_interconnect", "interconnect", "rdma-ib"),
        ("nodes_and_interconnect", "backend", "nccl"),
        (
            "nodes_and_interconnect",
            "peer loss",
            "k3-02 killed, seen after 11.8 s, serving again 1041 s after the restart",
        ),
        ("parallelism", "sizes", "tensor 16"),
        ("prefix_cache", "state", "on"),
        ("prefix_cache", "block", "768 tokens"),
        ("prefix_cache", "hits land on", "multiples of 128 tokens"),
        ("prefix_cache", "size", "21504 blocks, 5505024 tokens"),
        ("request_set", "requests", "11 in step 3, 700 in step 4"),
        ("concurrency_tested", "streams at once", "1, 2, 4, 8, 16, 32, 48, 64"),
        ("concurrency_tested", "knee", "48"),
        ("memory_peak", "GPU memory", "246945 MiB on k3-02 GPU 0"),
        ("memory_peak", "engine process", "43.4 GiB on k3-01"),
        ("memory_peak", "KV cache", "93.4 % used"),
        ("errors_seen", "requests", "0 of 700 requests failed under load"),
        ("errors_seen", "engine log", "no fatal line in 2 logs"),
        ("errors_seen", "while observed", "0 in 600 s"),
        ("remaining_margin", "KV cache", "53.3 % free at nominal (32), 6.6 % free at peak (64)"),
        ("remaining_margin", "GPU memory", "10.2 % free on k3-02 GPU 0"),
        ("remaining_margin", "concurrency", "1.5 x nominal held (48 of 32)"),
        ("date", "run", "2026-11-30 14:45:01 to 15:15:07 UTC"),
        ("model_and_load_format", "served as", "moonshotai/Kimi-K3"),
        ("model_and_load_format", "weights from", "/srv/models/Kimi-K3"),
        ("model_and_load_format", "load format", "fastsafetensors"),
    ],
)
def test_a_whole_run_fills_the_sheet(field: str, name: str, value: str) -> None:
    assert part(records.accepted(), field, name).value == value


def test_a_lock_is_no_observation() -> None:
    """No step compares weights, so the revision stays unobserved and the source says what the lock promises."""
    revision = part(records.accepted(), "model_and_load_format", "revision")
    assert (revision.value, revision.shown) == (None, "not observed")
    assert "the lock says 9c1f4e7" in revision.source


def test_an_endpoint_shows_no_node() -> None:
    made = records.endpoint()
    unseen = ("driver_and_cuda", "hardware", "nodes_and_interconnect", "parallelism")
    assert [entry.id for entry in made.campaign if not entry.observed] == list(unseen)
    assert part(made, "image_and_version", "image").source == "step 0 (host) is not planned"
    assert part(made, "memory_peak", "GPU memory").source == "no node in the plan: an endpoint does not show it"
    assert part(made, "prefix_cache", "block").value == "768 tokens"


def test_what_was_not_run_is_not_observed_and_says_why() -> None:
    made = records.rejected()
    for field in ("prefix_cache", "retention", "concurrency_tested"):
        (entry,) = [entry for entry in made.campaign if entry.id == field]
        assert not entry.observed
        assert all("was not run" in part.source for part in entry.parts)
    wish = part(made, "nodes_and_interconnect", "interconnect")
    assert (wish.value, wish.source) == (None, "the inventory says rdma-ib; step 5 (multi-node) was not run")
    assert part(made, "errors_seen", "chain").value == "1 of 28 checks failed"


def test_a_run_in_which_no_request_was_sent_has_no_request_set() -> None:
    of = records.plan()
    steps = records.not_run(1, 2, 3, 4, 5, after=0, state="FAIL")
    made = records.record(of, steps, observation="pending")
    (entry,) = [entry for entry in made.campaign if entry.id == "request_set"]
    assert not entry.observed


def test_another_image_than_the_locked_one_gets_neither_its_name_nor_its_cuda() -> None:
    other = "sha256:" + "a" * 64
    made = records.record(records.plan(), records.accepted().steps, observation="pending", image_digest=other)
    assert part(made, "image_and_version", "image").value == other
    cuda = part(made, "driver_and_cuda", "CUDA of the image")
    assert (cuda.value, cuda.source) == (None, "the digest that runs is not the lock's")


@pytest.mark.parametrize(
    ("retention", "rule", "value"),
    [
        ("4096", "kept-states", "4096: recurrent state is kept every 4096 tokens"),
        ("dense", "kept-states", "dense: recurrent state is kept at every block"),
        ("0", "whole-blocks", "0, without effect: this engine keeps no recurrent state"),
        ("", "kept-states", None),
    ],
)
def test_retention_says_what_it_keeps(retention: str, rule: str, value: str | None) -> None:
    steps = [with_figures(rule=rule)(step) if step.step == 3 else step for step in records.accepted().steps]
    made = records.record(records.plan(), steps, observation="pending", retention=retention)
    assert part(made, "retention", "interval").value == value


def test_what_only_the_operator_said_was_not_observed() -> None:
    made = changed(3, with_figures(witnesses={"block_size": "the operator", "match_unit": "engine log"}))
    block, unit = part(made, "prefix_cache", "block"), part(made, "prefix_cache", "hits land on")
    assert (block.value, block.source) == (None, "the operator said 768 tokens; the engine does not tell")
    assert (unit.value, unit.source) == ("multiples of 128 tokens", "engine log")


def test_a_launch_without_a_load_format_has_vllms_default() -> None:
    plan = records.plan()
    bare = {
        name: replace(launch, argv=tuple(a for a in launch.argv if a not in ("--load-format", "fastsafetensors")))
        for name, launch in plan.launch.items()
    }
    made = with_campaign(records.accepted(), replace(plan, launch=bare))
    assert str(part(made, "model_and_load_format", "load format").value).startswith("auto (")


def test_arguments_that_are_not_the_launchs_prove_nothing() -> None:
    def spoil(step: StepResult) -> StepResult:
        bad = [replace(check, state=State.FAIL) if check.name == "k3-02.arguments" else check for check in step.checks]
        return replace(step, checks=tuple(bad), state=State.FAIL)

    made = changed(0, spoil)
    assert part(made, "parallelism", "sizes").value is None
    assert part(made, "model_and_load_format", "load format").value is None


def test_a_ladder_without_a_knee_says_how_far_it_was_looked_for() -> None:
    made = changed(4, with_figures(knee=None))
    assert part(made, "concurrency_tested", "knee").value == f"none up to {PEAK}"
    assert part(made, "remaining_margin", "concurrency").value == "2 x nominal held (64 of 32)"


def test_failures_and_fatal_lines_are_errors_seen() -> None:
    ladder = [{**rung, "failed": 3 if rung["concurrency"] == PEAK else 0} for rung in load_step([]).figures["ladder"]]
    assert part(changed(4, with_figures(ladder=ladder)), "errors_seen", "requests").value == (
        "3 of 700 requests failed under load"
    )

    def fatal(step: StepResult) -> StepResult:
        line = "nccl: NCCL error: unhandled system error"
        found = [
            replace(check, state=State.FAIL, observed=line) if check.name == "k3-01.no-fatal-line" else check
            for check in step.checks
        ]
        return replace(step, checks=tuple(found), state=State.FAIL)

    assert part(changed(1, fatal), "errors_seen", "engine log").value == "nccl: NCCL error: unhandled system error"


def test_nodes_that_differ_are_each_named() -> None:
    assert agreed({"a": "1", "b": "1"}) == "1"
    assert agreed({"a": "1", "b": "2"}) == "a: 1; b: 2"
    assert agreed({"a": "1", "b": None}) == "a: 1; b: not observed"
    assert agreed({"a": None}) is None
    assert agreed({}) is None


def test_a_small_size_does_not_become_zero() -> None:
    assert [gib(size) for size in (3 * 1024**2, 5 * 1024**3)] == ["3.0 MiB", "5.0 GiB"]


def test_a_small_share_does_not_become_zero() -> None:
    assert [percent(share) for share in (0, 0.0007, 0.5)] == ["0.0 %", "below 0.1 %", "50.0 %"]


@pytest.mark.parametrize(
    ("make", "ticked", "open_"),
    [
        pytest.param(
            records.accepted,
            {"started-before-load", "hit-rate-with-memory", "nominal-and-peak", "extend-when-limited"},
            {"margin-after-retries"},
            id="accepted",
        ),
        pytest.param(records.rejected, {"started-before-load"}, set(), id="rejected"),
        pytest.param(
            records.endpoint,
            {"started-before-load", "nominal-and-peak", "extend-when-limited"},
            {"margin-after-retries"},
            id="endpoint",
        ),
        pytest.param(records.inconclusive, {"started-before-load"}, {"hit-rate-with-memory"}, id="inconclusive"),
    ],
)
def test_boxes_are_ticked_by_what_was_measured(make: Callable[[], Record], ticked: set[str], open_: set[str]) -> None:
    checklist = make().checklist
    assert {box.id for box in checklist if box.state is BoxState.TICKED} == ticked
    assert {box.id for box in checklist if box.state is BoxState.OPEN} == open_
    for one in checklist:
        assert one.evidence
        if one.state is BoxState.NOT_MEASURED:
            assert "measured by" in one.evidence


def test_a_hit_rate_alone_does_not_tick() -> None:
    alone = box(records.endpoint().checklist, "hit-rate-with-memory")
    assert alone.state is BoxState.NOT_MEASURED
    assert "hits (" in alone.evidence
    both = box(records.accepted().checklist, "hit-rate-with-memory")
    assert both.evidence.startswith("43.2 % hits (10624 of 24612 tokens); at most 246945 MiB")


def judged(*steps: StepResult, **plan: Any) -> tuple[Box, ...]:
    of = records.plan(**plan)
    return checklist_of(of, steps, records.fingerprint(of))


def rung(**changes: Any) -> StepResult:
    """Return step 4 with changes to its nominal rung."""
    step = load_step(HOSTS)
    ladder = [{**one, **changes} if one["concurrency"] == NOMINAL else one for one in step.figures["ladder"]]
    return replace(step, figures={**step.figures, "ladder": ladder})


@pytest.mark.parametrize(
    ("step", "says"),
    [
        pytest.param(rung(failed=2), "2 requests failed", id="failed"),
        pytest.param(rung(preemptions=1.0), "1 request preempted", id="preempted"),
        pytest.param(rung(preemptions=None), "preempted not observed", id="not-observed"),
        pytest.param(rung(running_peak=16.0, waiting_peak=16.0), "at most 16 ran at once while 16 waited", id="held"),
        pytest.param(with_figures(knee=16)(load_step(HOSTS)), "the knee is at 16", id="knee-below-nominal"),
        pytest.param(with_figures(nominal=7)(load_step(HOSTS)), "has no rung at nominal", id="nominal-not-run"),
    ],
)
def test_a_limited_nominal_load_leaves_the_box_open(step: StepResult, says: str) -> None:
    found = box(judged(step), "extend-when-limited")
    assert found.state is BoxState.OPEN
    assert says in found.evidence


def test_a_wait_of_one_sample_is_no_limit() -> None:
    assert box(judged(rung(waiting_peak=3.0)), "extend-when-limited").state is BoxState.TICKED


def test_a_peak_that_is_nominal_tells_nothing_apart() -> None:
    same = with_figures(peak=NOMINAL)(load_step(HOSTS))
    assert box(judged(same), "nominal-and-peak").state is BoxState.OPEN
    missing = with_figures(peak=128)(load_step(HOSTS))
    assert box(judged(missing), "nominal-and-peak").state is BoxState.OPEN


def test_a_failed_step_ticks_nothing() -> None:
    red = Check(name="x", state=State.FAIL, observed="seen", expected="wanted")
    broken = [
        StepResult.of(step.step, step.name, [*step.checks, red], step.figures)
        for step in (prefix_step(HOSTS), load_step(HOSTS))
    ]
    assert {box.state for box in judged(*broken)} == {BoxState.OPEN, BoxState.NOT_MEASURED}


def test_a_model_without_tools_is_told_in_a_box_that_stays_unmeasured() -> None:
    made = changed(2, with_figures(abilities={"tools": "absent"}))
    tools = box(made.checklist, "tools-and-results")
    assert tools.state is BoxState.NOT_MEASURED
    assert "step 2's one tool: absent" in tools.evidence


def test_nothing_planned_measures_nothing() -> None:
    assert {box.state for box in judged()} == {BoxState.NOT_MEASURED}


def test_an_observation_that_comes_later_is_put_into_the_sheet() -> None:
    earlier = records.record(records.plan(), records.accepted().steps[:-1], observation="pending")
    assert [entry.id for entry in earlier.campaign if any(p.name == "while observed" for p in entry.parts)] == []
    whole = replace(earlier, steps=records.accepted().steps, observation="complete")
    assert part(with_campaign(whole, records.plan()), "errors_seen", "while observed").value == "0 in 600 s"
    assert KNEE > NOMINAL  # or the margin above would be another
