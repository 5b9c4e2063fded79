"""Trends told from noise: slope, test, interval."""

import random

import pytest

from kimi_runbook.acceptance.observation.judge import is_proven
from kimi_runbook.acceptance.observation.trend import thinned, trend


def test_the_slope_of_a_straight_line() -> None:
    found = trend([(float(s), 2.0 + 0.5 * s) for s in range(20)])
    assert found is not None
    assert (found.slope_per_s, found.low_per_s, found.high_per_s) == (0.5, 0.5, 0.5)
    assert found.p_value < 1e-6
    assert found.change == 9.5


def test_outliers_do_not_move_the_slope() -> None:
    values = [(float(s), 1.0 + 0.01 * s + (50.0 if s in (3, 17) else 0.0)) for s in range(30)]
    found = trend(values)
    assert found is not None
    assert found.slope_per_s == pytest.approx(0.01, rel=0.05)
    assert is_proven(found)


def test_kendall_against_a_worked_example() -> None:
    """Ten values, counted by hand: 40 pairs in order, 3 against, 2 ties; variance (10*9*25 - 2*18)/18 = 123."""
    values = [1.0, 2.0, 2.0, 4.0, 3.0, 5.0, 4.0, 7.0, 6.0, 8.0]
    found = trend([(float(position), value) for position, value in enumerate(values)])
    assert found is not None
    # z = (40 - 3 - 1) / sqrt(123)
    assert found.p_value == pytest.approx(0.00117, rel=0.02)


def test_noise_is_no_trend_more_often_than_the_p_value_says() -> None:
    draw = random.Random(7)  # noqa: S311 - a fixed seed for a test
    proven = 0
    for _ in range(300):
        found = trend([(float(s), draw.gauss(1.0, 0.2)) for s in range(30)])
        assert found is not None
        proven += is_proven(found)
    assert proven <= 9  # 3 expected at p = 0.01; ten or more have a chance below 1 in 1000


def test_the_interval_covers_the_true_slope() -> None:
    draw = random.Random(11)  # noqa: S311 - a fixed seed for a test
    covered = 0
    for _ in range(200):
        found = trend([(float(s), 0.01 * s + draw.gauss(0.0, 0.1)) for s in range(30)])
        assert found is not None
        covered += found.low_per_s <= 0.01 <= found.high_per_s
    assert covered >= 182  # 190 expected


@pytest.mark.parametrize("count", [0, 1, 2])
def test_two_points_are_no_trend(count: int) -> None:
    assert trend([(float(s), 1.0) for s in range(count)]) is None


def test_a_constant_series_has_no_trend() -> None:
    found = trend([(float(s), 0.0) for s in range(30)])
    assert found is not None
    assert (found.slope_per_s, found.p_value) == (0.0, 1.0)


def test_a_strict_order_of_few_samples_is_no_proof() -> None:
    found = trend([(float(s), float(s)) for s in range(7)])
    assert found is not None
    assert not is_proven(found)


def test_long_series_are_thinned_to_medians() -> None:
    series = [(float(s), float(s % 10)) for s in range(1000)]
    found = thinned(series, 100)
    assert len(found) == 100
    assert {value for _, value in found} == {4.5}
