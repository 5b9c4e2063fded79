"""Commands end within their limit with everything they started, and a tree answers instead of the machine."""

import os
import signal
import subprocess
import sys
import time

import host_probe
import pytest
from ansible.module_utils import command_run
from host_tree import Tree


@pytest.mark.parametrize(
    ("words", "name"),
    [
        pytest.param(["modinfo", "-k", "6.8.0-90-generic", "nvidia"], "modinfo -k 6.8.0-90-generic nvidia", id="plain"),
        pytest.param(["docker", "info", "--format", "{{json .}}"], "docker info --format _json ._", id="braces"),
        pytest.param(["mokutil", "--test-key", "/a/b"], "mokutil --test-key %a%b", id="path"),
        pytest.param(["a", "x" * 300], "a " + "x" * 158, id="cut"),
    ],
)
def test_answer_name(words, name):
    assert command_run.answer_name(words) == name


def test_a_tree_answers_and_never_the_machine(tmp_path):
    tree = Tree(tmp_path)
    tree.say("uname -r", "6.8\n", err="hm")
    probe = tree.probe()
    assert probe.command("uname", "-r") == (0, "6.8\n", "hm")
    assert probe.command("uname", "-r", "-v") == (0, "6.8\n", "hm")  # trailing words may be left out
    assert probe.command("uname") is None
    assert probe.command("true") is None
    assert probe.errors == []


@pytest.mark.parametrize(
    ("rc", "message"),
    [
        pytest.param("timeout", "no answer within 10 s", id="hangs"),
        pytest.param("denied", "Permission denied", id="may-not-run"),
        pytest.param("garbage", "invalid literal", id="no-number"),
    ],
)
def test_a_tree_can_hang_and_refuse(tmp_path, rc, message):
    tree = Tree(tmp_path)
    tree.say("nvidia-smi", rc=rc)
    probe = tree.probe()
    assert probe.command("nvidia-smi", "-q") is None
    assert [message in error["message"] for error in probe.errors] == [True]


def test_a_missing_program_is_an_error_only_where_it_is_needed(tmp_path):
    probe = Tree(tmp_path).probe()
    assert probe.command("ofed_info") is None
    assert probe.errors == []
    assert probe.command("systemctl", needed=True) is None
    assert probe.errors == [{"probe": "systemctl", "message": "not installed"}]


def test_the_whole_session_of_a_command_is_killed(tmp_path):
    script = f"{sys.executable} -c 'import time; time.sleep(60)' & echo $! > {tmp_path}/child; wait"
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        command_run.run(["sh", "-c", script], timeout=1)
    assert time.monotonic() - started < 5
    assert_ends(int((tmp_path / "child").read_text()))


def test_the_limit_holds_although_the_one_who_asked_was_killed(tmp_path):
    """coreutils' timeout stands around the command; without it a SIGKILL of the module would leave it running."""
    script = f"echo $$ > {tmp_path}/child; exec sleep 60"
    code = f"import command_run; command_run.run(['sh', '-c', {script!r}], timeout=1)"
    path = os.path.dirname(command_run.__file__)  # noqa: PTH120 - for PYTHONPATH
    asker = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 10
    while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline, "the command has not started"
        time.sleep(0.02)
    asker.kill()
    asker.wait()
    assert_ends(int((tmp_path / "child").read_text()))


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]  # noqa: PTH123, SIM115 - one line
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} was still there")


def test_an_endless_answer_is_stopped():
    probe = host_probe.Probe(run=lambda argv, timeout: command_run.run(argv, timeout, limit=1 << 20))
    assert probe.command("yes") is None
    assert probe.errors == [{"probe": "yes", "message": "stopped: it printed far more than an answer"}]


def test_commands_speak_the_c_locale_and_read_nothing():
    probe = host_probe.Probe()
    rc, out, _ = probe.command("sh", "-c", "echo $LC_ALL; cat")
    assert (rc, out) == (0, "C\n")


def test_when_the_budget_is_used_up_nothing_more_is_asked():
    probe = host_probe.Probe(budget_s=0)
    assert probe.command("true") is None
    assert probe.apart("weights", lambda: 1) is None
    assert [error["message"] for error in probe.errors] == ["not asked: the 0 s for the whole snapshot are used up"] * 2


def test_a_question_apart_answers_breaks_and_hangs():
    probe = host_probe.Probe(timeout_s=1)
    assert probe.apart("one", lambda: {"a": [1]}) == {"a": [1]}
    assert probe.apart("two", lambda: 1 / 0) is None
    assert probe.apart("three", lambda: time.sleep(30)) is None
    assert [(error["probe"], error["message"]) for error in probe.errors] == [
        ("two", "ZeroDivisionError: division by zero"),
        ("three", "no answer within 1 s"),
    ]
