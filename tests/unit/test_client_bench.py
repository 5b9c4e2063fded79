"""The client's benchmark: what it concludes, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_runbook.acceptance.null_server import Phasing
from tests.bench.client_lag import measures, tell, why_void


def figures(
    *, lag_p99: float = 0.8, late_p99: float = 0.2, failed: int = 0, kept_off: float = 0.5, **changes: Any
) -> dict[str, Any]:
    """Return the figures of a good run, with changes."""
    row = {"p50": 0.1, "p99": 0.8, "p99.9": 1.5, "p100": 2.0}
    return {
        "tokens": 51200,
        "failed": failed,
        "first_error": "POST /v1/chat/completions: dead" if failed else "",
        "wall_s": 8.01,
        "held_percent": 99.9,
        "lag_by_server_ms": row | {"p99": lag_p99},
        "lag_by_client_ms": row,
        "lag_source": "kernel",
        "ttft_off_ms": {"p50": 0.01, "p99": 0.1},
        "dispatch_ms": {"p50": 0.3, "p99": 0.9},
        "start_to_first_request_s": 0.15,
        "pss_mib": 45.0,
        "waited_for_cpu_percent": kept_off,
        "cpu_s_per_1000_tokens_main": 0.01,
        "cpu_s_per_1000_tokens_post": 0.008,
        "cpu_s_per_1000_tokens_all": 0.02,
        "server": {"late_ms": {"p50": 0.02, "p99": late_p99, "p99.9": 1.0}},
        **changes,
    }


@pytest.mark.parametrize(
    ("phasing", "seen", "code", "said"),
    [
        pytest.param(Phasing.ARRIVAL, figures(), 0, "lag p99", id="good"),
        pytest.param(Phasing.ARRIVAL, figures(lag_p99=5.0), 1, "over the bar", id="late-client"),
        pytest.param(Phasing.ARRIVAL, figures(late_p99=1.1), 3, "void: the server was late itself", id="late-server"),
        pytest.param(Phasing.STEP, figures(late_p99=1.1), 0, "lag p99", id="a-burst-takes-its-time"),
        pytest.param(Phasing.STEP, figures(late_p99=2.1), 3, "void: the server was late itself", id="late-burst"),
        pytest.param(Phasing.STEP, figures(failed=2), 3, "2 requests failed: POST", id="failed"),
        pytest.param(Phasing.STEP, figures(lag_p99=9, kept_off=2.5), 3, "had the client's CPU for 2.5 %", id="busy"),
        pytest.param(Phasing.STEP, figures(lag_p99=4, kept_off=2.5), 0, "2.5 %", id="held-all-the-same"),
    ],
)
def test_what_a_run_says(
    capsys: pytest.CaptureFixture[str], phasing: Phasing, seen: dict[str, Any], code: int, said: str
) -> None:
    assert tell(phasing, seen, 128) == code
    assert bool(why_void(phasing, seen)) is (code == 3)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"held_percent": 99.4}, "load held"),
        ({"pss_mib": 130.0}, "memory (PSS)"),
        ({"start_to_first_request_s": 1.2}, "process start to first request"),
        ({"ttft_off_ms": {"p50": 2.5, "p99": 3.0}}, "TTFT told minus true, p50"),
    ],
)
def test_each_measure_has_a_bar(change: dict[str, Any], name: str) -> None:
    assert [measure.name for measure in measures(figures(**change)) if not measure.held] == [name]


def test_the_benchmark_runs(project_root: Path) -> None:
    size = ["--streams", "4", "--requests", "8", "--tokens", "20", "--json"]
    command = [sys.executable, "-m", "tests.bench.client_lag", *size]
    done = subprocess.run(command, cwd=project_root, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 3), done.stderr  # how late it was depends on what else the machine does
    told = json.loads(done.stdout)
    assert set(told) == {"arrival", "step"}
    for one in told.values():
        assert (one["tokens"], one["failed"], one["most_in_flight"]) == (160, 0, 4)
        assert one["server"]["events"] == 160
        assert 0 < one["cpu_s_per_1000_tokens_main"] < 5
        assert 0 < one["held_percent"] <= 100
        assert one["lag_by_server_ms"]["p50"] <= one["lag_by_server_ms"]["p99"]
        assert 10 < one["pss_mib"] < 200
        assert 0 < one["start_to_first_request_s"] < 30
