"""The engine's log: phases with their times, fatal lines, ranks."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from kimi_runbook.acceptance.engine_log import fatals, parse_stamp, patterns, phases, read_log, seconds_into

LOGS = Path(__file__).parents[1] / "data" / "engine_logs"


def log_of(name: str) -> list[str]:
    return (LOGS / name).read_text(encoding="utf-8").splitlines()


def test_a_real_start_is_read_phase_by_phase() -> None:
    log = read_log(log_of("one_node_vllm_0.32.0_cpu.log"))
    assert log.ready
    assert log.fatal == ()
    assert [(rank.world_size, rank.rank, rank.backend) for rank in log.ranks] == [(1, 0, "gloo")]
    times = seconds_into(log, datetime(2026, 11, 30, 14, 52, 55, tzinfo=UTC))
    assert times["arguments"] == 0.0  # vLLM's stamps have no year, so they count from the first of them
    assert times["model_resolved"] == 8.0
    assert times["engine_done"] == 28.0
    assert "ready" not in times  # uvicorn's line has no time of its own


def test_the_runtimes_stamps_time_every_phase_from_the_containers_start() -> None:
    log = read_log(log_of("two_nodes_rank0.log"))
    times = seconds_into(log, parse_stamp("2026-11-30T14:53:00.000000001Z"))
    assert times == {
        "arguments": 3.1,
        "model_resolved": 11.0,
        "engine_init": 18.0,
        "rendezvous": 26.2,
        "kv_cache": 27.0,
        "ready": 31.5,
    }


def test_a_headless_node_has_ranks_and_no_ready_line() -> None:
    log = read_log(log_of("two_nodes_rank1.log"))
    assert not log.ready
    assert [(rank.world_size, rank.rank) for rank in log.ranks] == [(2, 1)]
    assert "headless" in log.phases


def test_only_the_lines_a_node_lets_through_are_enough() -> None:
    lines = log_of("two_nodes_rank0.log")
    filtered = [line for line in lines if any(pattern in line for pattern in patterns())]
    assert read_log(filtered) == read_log(lines)


@pytest.mark.parametrize("fatal", fatals(), ids=lambda fatal: fatal.parts[0][:40])
def test_every_fatal_pattern_is_found_and_let_through(fatal: object) -> None:
    line = "(EngineCore pid=7) ERROR 11-30 14:53:31 [core.py:1] " + " 3 ".join(fatal.parts)  # type: ignore[attr-defined]
    found = read_log([line, line]).fatal
    assert [one.kind for one in found] == [fatal.kind]  # type: ignore[attr-defined] # parametrized over Fatal
    assert any(pattern in line for pattern in patterns())


def test_nccls_lines_about_its_way_are_kept_once_and_let_through() -> None:
    line = "n:1:9 [0] NCCL INFO comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 1"
    log = read_log([line, line, "n:1:9 [0] NCCL INFO NCCL_MNNVL_ENABLE set by environment to 1."])
    assert log.transport == (line,)
    assert any(pattern in line for pattern in patterns())


def test_a_carriage_return_at_the_end_does_not_hide_a_line() -> None:
    assert read_log(["INFO:     Application startup complete.\r\n"]).ready


def test_phase_names_are_unique() -> None:
    names = [phase.name for phase in phases()]
    assert len(names) == len(set(names))
    assert names[-1] == "ready"
