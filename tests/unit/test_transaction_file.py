"""The state file on the host: its states, its lease under odd clocks, and what a kill, a race or a full disk leaves."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import host_probe
import host_snapshot
import pytest
import transaction_file as tf

from kimi_runbook.host_facts import TransactionFacts
from kimi_runbook.reading import Fields
from kimi_runbook.shapes import read

UTILS = Path(tf.__file__).parent


def request(run="r1", **more):
    wanted = {"owner": "ops@desk", "ttl_s": 100, "take_over": "", "lock_digest": "l", "plan_digest": "p"}
    return {"run": run, **wanted, "step": "", "reason": "", "end": "done", **more}


def at(up, wall=None, boot="b1"):
    return {"wall": 1000.0 + (up if wall is None else wall), "up": float(up), "boot": boot}


def opened(*steps, run="r1", start=0):
    state, _ = tf.begin(None, request(run), at(start))
    for n, name in enumerate(steps, 1):
        state = tf.step(state, request(run, step=name), at(start + 10 * n))
    return state


def test_a_whole_change():
    state = tf.commit(opened("drain", "gpu_driver", "restore"), request(), at(45))
    assert (state["state"], state["lease"], state["interrupted"], state["begun"]) == ("done", None, [], [])
    assert state["durations"] == {"drain": [10], "gpu_driver": [10], "restore": [15]}
    assert [(row["run"], row["end"]) for row in state["history"]] == [("r1", "done")]


def test_what_a_killed_run_leaves_is_taken_up():
    killed = opened("drain", "gpu_driver")
    assert killed["interrupted"] == ["gpu_driver"]
    state, note = tf.begin(killed, request("r2", take_over="r1"), at(30))
    assert (state["interrupted"], state["begun"]) == (["gpu_driver"], ["drain", "gpu_driver"])
    assert "took over from run r1 of ops@desk" in note
    assert "at step gpu_driver" in note
    assert tf.step(state, request("r2", step="drain"), at(31))["interrupted"] == ["gpu_driver", "drain"]


def test_a_run_killed_between_begin_and_its_first_step_loses_nothing():
    state, _ = tf.begin(opened("drain", "gpu_driver"), request("r2", take_over="r1"), at(30))
    again, _ = tf.begin(state, request("r3", take_over="r2"), at(40))
    assert again["interrupted"] == ["gpu_driver"]
    later = tf.step(again, request("r3", step="drain"), at(41))
    assert "gpu_driver" not in later["durations"], "what was interrupted was not measured"


def test_failure_gives_the_lease_back_and_keeps_step_and_reason():
    state = tf.fail(opened("drain", "rdma"), request(reason="modprobe: no"), at(30))
    assert (state["state"], state["step"], state["reason"], state["lease"]) == ("failed", "rdma", "modprobe: no", None)
    again, note = tf.begin(state, request("r2"), at(99))
    assert (again["state"], again["interrupted"], note) == ("open", ["rdma"], "")


@pytest.mark.parametrize("action", ["step", "fail", "commit"])
def test_a_run_whose_lease_was_taken_does_nothing_more(action):
    state, _ = tf.begin(opened("drain"), request("r2", take_over="r1"), at(20))
    with pytest.raises(tf.Refused, match="run r2 of ops@desk has taken the lease; expected run r1"):
        tf.CHANGES[action](state, request("r1", step="rdma"), at(21))


def test_no_step_without_begin():
    with pytest.raises(tf.Refused, match="no run holds a lease"):
        tf.step(None, request(step="rdma"), at(0))


@pytest.mark.parametrize(
    ("now", "granted"),
    [
        pytest.param(at(109), False, id="alive"),
        pytest.param(at(111), True, id="expired"),
        pytest.param(at(20, wall=10**6), False, id="wall-clock-jumped-ahead"),
        pytest.param(at(111, wall=-(10**6)), True, id="wall-clock-jumped-back"),
        pytest.param(at(1, wall=50, boot="b2"), False, id="rebooted-soon"),
        pytest.param(at(1, wall=200, boot="b2"), True, id="rebooted-long-ago"),
        pytest.param(at(500, wall=-(10**6), boot="b2"), False, id="rebooted-with-a-clock-behind"),
    ],
)
def test_lease_under_odd_clocks(now, granted):
    held = opened("drain")  # renewed at 10
    if granted:
        assert "took the expired lease of run r1" in tf.begin(held, request("r2"), now)[1]
    else:
        with pytest.raises(tf.Refused, match="add -e take_over=r1"):
            tf.begin(held, request("r2"), now)
    assert tf.begin(held, request("r1"), now)[1] == "", "the same run always goes on"


def test_take_over_names_one_run_only():
    with pytest.raises(tf.Refused, match="take_over=r1"):
        tf.begin(opened("drain"), request("r3", take_over="r2"), at(20))


def test_steps_renew_the_lease():
    assert tf.lease_view(opened("drain", "rdma")["lease"], at(25)) == {
        "run": "r1",
        "owner": "ops@desk",
        "age_s": 5,
        "expires_in_s": 95,
    }


def test_a_step_over_a_reboot_is_measured_by_the_wall_clock():
    state = tf.step(opened("gpu_driver"), request(step="rdma"), at(3, wall=310, boot="b2"))
    assert state["durations"] == {"gpu_driver": [300]}
    state = tf.step(opened("gpu_driver"), request(step="rdma"), at(3, wall=-310, boot="b2"))
    assert state["durations"] == {}, "a clock that went back measures nothing"


def test_the_file_does_not_grow_for_ever(tmp_path):
    for n in range(60):
        tf.apply(str(tmp_path), "begin", request(f"r{n}"))
        tf.apply(str(tmp_path), "step", request(f"r{n}", step="rdma"))
        tf.apply(str(tmp_path), "fail", request(f"r{n}", reason="x" * 10**5))
    assert (tmp_path / tf.FILE).stat().st_size < 64 << 10


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema_version": 1}', '{"schema_version": 2}', "\x00\x00", '{"schema_version": null}']
)
def test_a_file_that_makes_no_sense_is_an_unfinished_run_of_nobody(tmp_path, text):
    (tmp_path / tf.FILE).write_text(text)
    with pytest.raises(tf.Refused, match="take_over=unreadable"):
        tf.apply(str(tmp_path), "begin", request("r2"))
    _, after, note = tf.apply(str(tmp_path), "begin", request("r2", take_over="unreadable"))
    assert (after["state"], after["begun"]) == ("open", ["drain"])
    assert "nobody knows" in note
    assert (tmp_path / f"{tf.FILE}.unreadable").read_text() == text
    assert tf.read(str(tmp_path))["run"] == "r2"


def test_an_old_unreadable_file_has_no_living_owner(tmp_path):
    (tmp_path / tf.FILE).write_text("{")
    os.utime(tmp_path / tf.FILE, (1, 1))
    assert "expired lease" in tf.apply(str(tmp_path), "begin", request("r2"))[2]


@pytest.mark.parametrize("key", sorted(opened()))
def test_a_state_without_one_of_its_keys_is_unreadable(tmp_path, key):
    state = opened("drain")
    del state[key]
    assert tf.parse(json.dumps(state), at(0))["state"] == tf.UNREADABLE


def _try_to_begin(folder, run, start, answers):
    start.wait()
    try:
        tf.apply(folder, "begin", request(run))
        answers.put(run)
    except tf.Refused:
        answers.put("")


def test_of_two_runs_at_the_same_moment_one_gets_the_host(tmp_path):
    context = multiprocessing.get_context("fork")
    for n in range(15):
        folder = str(tmp_path / str(n))
        start, answers = context.Event(), context.Queue()
        runs = [context.Process(target=_try_to_begin, args=(folder, f"r{k}", start, answers)) for k in range(3)]
        for process in runs:
            process.start()
        start.set()
        told = [answers.get(timeout=20) for _ in runs]
        for process in runs:
            process.join(20)
        winners = [run for run in told if run]
        assert len(winners) == 1
        assert tf.read(folder)["lease"]["run"] == winners[0]


_WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import transaction_file as tf
request = dict(run="r1", owner="o", ttl_s=100, take_over="", lock_digest="", plan_digest="", reason="", end="done")
tf.apply(sys.argv[2], "begin", dict(request, step=""))
print("begun", flush=True)
n = 0
while True:
    n += 1
    tf.apply(sys.argv[2], "step", dict(request, step="s%d" % (n % 7)))
"""


def test_a_writer_killed_at_any_instruction_leaves_a_whole_file(tmp_path):
    for n in range(12):
        folder = tmp_path / str(n)
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(UTILS), str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "begun\n"
            time.sleep(0.013 * n)
            process.send_signal(signal.SIGKILL)
        assert tf.read(str(folder))["state"] == "open"
        after = tf.apply(str(folder), "begin", request("r2", take_over="r1"))[1]
        assert after["run"] == "r2"


def full(monkeypatch, times):
    """Let the next ``times`` syncs of a file find the disk full."""
    left, real = [times], os.fsync

    def fsync(descriptor):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(tf.os, "fsync", fsync)


def test_a_full_disk_uses_the_reserve_to_say_why(tmp_path, monkeypatch):
    folder = str(tmp_path)
    tf.apply(folder, "begin", request())
    assert (tmp_path / tf.RESERVE).stat().st_size == 128 << 10
    full(monkeypatch, 1)
    tf.apply(folder, "fail", request(reason="No space left on device"))
    assert tf.read(folder)["state"] == "failed"
    assert not (tmp_path / tf.RESERVE).exists()
    tf.apply(folder, "begin", request("r2"))
    assert (tmp_path / tf.RESERVE).exists()


def test_a_full_disk_leaves_the_state_before(tmp_path, monkeypatch):
    folder = str(tmp_path)
    tf.apply(folder, "begin", request())
    before = (tmp_path / tf.FILE).read_text()
    full(monkeypatch, 2)
    with pytest.raises(OSError, match="No space left"):
        tf.apply(folder, "step", request(step="rdma"))
    assert (tmp_path / tf.FILE).read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [tf.FILE, tf.LOCK]


def test_nothing_begins_without_room_for_the_reserve(tmp_path, monkeypatch):
    full(monkeypatch, 1)
    with pytest.raises(OSError, match="No space left"):
        tf.apply(str(tmp_path), "begin", request())
    assert tf.read(str(tmp_path)) is None


def test_checking_writes_nothing(tmp_path):
    folder = str(tmp_path / "none")
    assert tf.apply(folder, "begin", request(), check=True)[1]["state"] == "open"
    assert tf.apply(folder, "step", request(step="rdma"), check=True) == (None, None, "")
    assert not (tmp_path / "none").exists()
    tf.apply(folder, "begin", request())
    with pytest.raises(tf.Refused):
        tf.apply(folder, "begin", request("r2"), check=True)


def test_a_lock_nobody_lets_go_of_is_named(tmp_path):
    with tf.locked(str(tmp_path)), pytest.raises(tf.Refused, match="fuser -v"), tf.locked(str(tmp_path), wait_s=0.1):
        pass


@pytest.mark.parametrize(
    "state", [opened("drain"), tf.fail(opened("rdma"), request(reason="x"), at(9)), tf.parse("", at(0))]
)
def test_the_library_reads_what_the_module_shows(state):
    facts = read(TransactionFacts, Fields(json.loads(json.dumps(tf.view(state, at(30)))), "snapshot"))
    assert (facts.state, facts.step, list(facts.interrupted)) == (state["state"], state["step"], state["interrupted"])


def test_a_snapshot_names_the_run_and_hides_secrets(tmp_path):
    """The names of runs look random, and redaction takes what looks random for a secret."""
    folder = tmp_path / "var/lib/kimi-runbook"
    run = "20261130T235156Z-e2b7"
    reason = "curl -H 'Authorization: Bearer hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345' failed"
    for action in ("begin", "fail"):
        tf.apply(str(folder), action, request(run, reason=reason))
    tf.apply(str(folder), "begin", request(run))
    seen = host_snapshot.standing(host_probe.Probe(root=tmp_path), "/var/lib/kimi-runbook")
    assert seen["run"] == seen["lease"]["run"] == run
    tf.apply(str(folder), "fail", request(run, reason=reason))
    seen = host_snapshot.standing(host_probe.Probe(root=tmp_path), "/var/lib/kimi-runbook")
    assert "hf_AbCd" not in json.dumps(seen)
    assert host_snapshot.standing(host_probe.Probe(root=tmp_path / "none"), "/var/lib/kimi-runbook") is None
