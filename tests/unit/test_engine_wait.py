"""When the engine was seen to become ready, as the service gap needs it."""

import json
import sys
import time

import engine_wait
import pytest
from ansible.module_utils.testing import patch_module_args
from scripted_server import ScriptedServer, answering, json_answer

UP, DOWN = answering(json_answer(b"")), answering(json_answer(b"", status=b"503 Starting"))


@pytest.fixture
def wait(tmp_path, monkeypatch, capsys):
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!{sys.executable}\nimport sys\nprint('active' if 'ActiveState' in sys.argv else 'abc')\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def run(*scripts, round_s=30, elapsed_s=0):
        with ScriptedServer(*scripts) as server:
            told = {"url": f"{server.url}/health", "unit": "x.service", "timeout_s": 60, "poll_s": 0.01}
            with patch_module_args({**told, "round_s": round_s, "elapsed_s": elapsed_s}), pytest.raises(SystemExit):
                engine_wait.main()
        return json.loads(capsys.readouterr().out)

    return run


def test_a_look_that_found_it_not_ready_dates_its_readiness(wait):
    before = time.time()
    result = wait(DOWN, DOWN, UP)
    assert (result["ready"], result["became_ready"]) == (True, True)
    assert before <= result["ready_at"] <= time.time()


def test_ready_at_the_first_look_says_nothing_of_when(wait):
    assert wait(UP)["became_ready"] is False


def test_ready_at_the_first_look_of_a_later_round_became_so_in_between(wait):
    assert wait(UP, elapsed_s=30)["became_ready"] is True


def test_a_round_that_ends_before_readiness_dates_nothing(wait):
    result = wait(DOWN, round_s=0)
    assert (result["ready"], result["ready_at"], result["became_ready"]) == (False, None, False)
