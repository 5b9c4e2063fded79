import io

import pytest

from lab.progress import Progress, View, amount, final_line, human_bytes, human_seconds, running_line


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "2 kB"), (2_100_000_000, "2.1 GB"), (3.2e12, "3.2 TB")],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_human_seconds() -> None:
    assert [human_seconds(value) for value in (0.4, 72.9, 3600)] == ["0:00", "1:12", "60:00"]


@pytest.mark.parametrize(
    ("view", "text"),
    [
        pytest.param(
            View(number=3, total=11, name="engine image", elapsed_s=72, done=882e6, of=2.1e9),
            "[ 3/11] engine image: 42 % of 2.1 GB, 1:12",
            id="bytes",
        ),
        pytest.param(
            View(number=10, total=11, name="site.yml", elapsed_s=5, done=12, of=30, unit="tasks", note="install"),
            "[10/11] site.yml: 12 of 30 tasks, install, 0:05",
            id="counted",
        ),
        pytest.param(View(number=1, total=2, name="depot", elapsed_s=1), "[1/2] depot: 0:01", id="nothing-to-count"),
        pytest.param(
            View(number=1, total=2, name="site", elapsed_s=1, done=4, unit="tasks"),
            "[1/2] site: 4 tasks, 0:01",
            id="no-total",
        ),
    ],
)
def test_running_line(view: View, text: str) -> None:
    assert running_line(view) == text


def test_amount_of_an_empty_whole_is_no_division_by_zero() -> None:
    assert amount(View(number=1, total=1, name="x", elapsed_s=0, done=0, of=0)) == "0 B"


def test_final_line_has_outcome_and_seconds() -> None:
    assert final_line(View(number=3, total=11, name="depot", elapsed_s=2.04), "made") == "[ 3/11] depot: made, 2.0 s"


def test_a_step_without_a_terminal_ends_with_one_line() -> None:
    out = io.StringIO()
    progress = Progress(total=1, stream=out)
    with progress.step("keys") as step:
        step.outcome = "unchanged"
    assert out.getvalue().splitlines()[-1].startswith("[1/1] keys: unchanged, ")


def test_a_failed_step_says_so_and_raises_on() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="broken"), Progress(total=1, stream=out).step("keys"):
        raise ValueError("broken")
    assert "[1/1] keys: failed, " in out.getvalue()
