"""`kimi-runbook accept` as a program of its own: what it prints, what it leaves, how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kimi_runbook import cli
from kimi_runbook.acceptance.chain import STEPS, Chain
from kimi_runbook.acceptance.context import Context
from kimi_runbook.acceptance.endpoint import Options, Seen, plan_of
from kimi_runbook.acceptance.result import Check, State, StepResult
from kimi_runbook.commands import accept as accept_command
from kimi_runbook.commands.accept import command_line, options_of, without
from kimi_runbook.record import Record, load_record
from tests.faults.engine.fake_engine import MODEL, FakeEngine, Fault

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-hunter2-0123456789"
CLOSED = "http://127.0.0.1:1"
SEEN = Seen(models=(MODEL,), version="0.32.0", engines=1)


def command(url: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "kimi_runbook", "accept", "--endpoint", url, *more]


def environment(**more: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"], "TERM": "xterm", **more}


def accept(url: str, cwd: Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, *more),
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def the_run(cwd: Path) -> Path:
    (run_dir,) = (cwd / "runs").iterdir()
    return run_dir


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as running:
        running.token_delay_s = 0.001
        yield running


def test_a_healthy_endpoint_is_accepted(engine: FakeEngine, tmp_path: Path) -> None:
    done = accept(f"{engine.url}/v1", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stderr.splitlines()
    assert told[0].startswith("steps 2 short request, 3 shared prefix, 4 concurrency; not planned: 0 host, 1 start")
    assert told[1] == f"{MODEL} at {engine.url}, vLLM 0.32.0; 1 engine reports on 1 metrics URL"
    steps = [line for line in told if re.match(r"\[\d/3\] step \d .*: (PASS|WARN), ", line)]
    assert [line.partition(":")[0] for line in steps] == [
        "[1/3] step 2 short request",
        "[2/3] step 3 shared prefix",
        "[3/3] step 4 concurrency",
    ]
    run_dir = the_run(tmp_path)
    assert "verdict: accept" in done.stdout
    for name in ("record.json", "report.md", "junit.xml"):
        assert f"runs/{run_dir.name}/{name}" in done.stdout and (run_dir / name).stat().st_size
    assert done.stdout.splitlines()[-1] == f"next: kimi-runbook accept --endpoint {engine.url} --observe 3600"
    record = load_record(run_dir)
    assert all(step.state.lets_next_layer_run for step in record.steps)
    assert record.observation == "not planned"
    assert "playbooks" not in done.stdout


def test_about_as_many_requests_are_sent_as_were_announced(engine: FakeEngine, tmp_path: Path) -> None:
    done = accept(engine.url, tmp_path)
    match = re.search(r"^about (\d+) requests", done.stderr, re.MULTILINE)
    assert match is not None
    assert len(engine.requests) == pytest.approx(int(match[1]), rel=0.2)


def test_what_an_engine_says_can_be_printed(tmp_path: Path) -> None:
    with FakeEngine(Fault.REFUSAL_UNPRINTABLE) as running:
        done = accept(running.url, tmp_path, "--require", "tools")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\ufffd[2Jtools" in done.stdout
    assert "tool calls (required)" in done.stdout


def test_a_key_the_engine_repeats_is_printed_nowhere(tmp_path: Path) -> None:
    with FakeEngine(Fault.KEY_REPEATED) as running:
        running.token_delay_s = 0.001
        done = accept(running.url, tmp_path, "--api-key-env", "VLLM_KEY", VLLM_KEY=KEY)
    assert "vLLM 0.32.0Bearer [API key]" in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert not [path for path in the_run(tmp_path).rglob("*") if path.is_file() and KEY in path.read_text("utf-8")]


def test_a_standard_output_that_is_full_is_named(engine: FakeEngine, tmp_path: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            command(engine.url),
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kimi-runbook: standard output: cannot be written")
    assert f"kimi-runbook report runs/{the_run(tmp_path).name}" in last


def test_more_tokens_than_the_model_has_are_no_fault_of_the_service(engine: FakeEngine, tmp_path: Path) -> None:
    done = accept(engine.url, tmp_path, "--max-tokens", "4096")
    assert done.returncode == 2
    assert "--max-tokens: 4096; expected less than the model's longest context, 4096 tokens" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_contradicted_option_is_not_proposed_again(engine: FakeEngine, tmp_path: Path) -> None:
    done = accept(engine.url, tmp_path, "--block-size", "7", "--match-unit", "64")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"then: kimi-runbook accept --endpoint {engine.url} --match-unit 64"


def test_a_short_observation_is_not_proposed_again(engine: FakeEngine, tmp_path: Path) -> None:
    done = accept(engine.url, tmp_path, "--observe", "1")
    assert done.returncode == 3, done.stdout
    assert done.stdout.splitlines()[-1] == f"then: kimi-runbook accept --endpoint {engine.url} --observe 3600"


def test_json_is_the_record_and_nothing_else(engine: FakeEngine, tmp_path: Path) -> None:
    done = accept(engine.url, tmp_path, "--json", "--runs-dir", "elsewhere")
    (run_dir,) = (tmp_path / "elsewhere").iterdir()
    assert done.stdout == (run_dir / "record.json").read_text(encoding="utf-8")
    assert Record.from_json(json.loads(done.stdout)).run_id == run_dir.name


def test_output_that_is_no_terminal_has_no_control_characters(engine: FakeEngine, tmp_path: Path) -> None:
    done = accept(engine.url, tmp_path)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout + done.stderr)


def test_on_a_terminal_one_line_is_drawn_over_itself(engine: FakeEngine, tmp_path: Path) -> None:
    engine.token_delay_s = 0.004
    master, slave = pty.openpty()
    running = subprocess.Popen(command(engine.url), cwd=tmp_path, env=environment(), stdout=slave, stderr=slave)
    os.close(slave)
    text = b""
    while chunk := read(master):
        text += chunk
    assert running.wait(timeout=60) == 0
    drawn = [line for line in text.decode().replace("\r\n", "\n").split("\r\x1b[2K") if "so far" in line]
    assert any("[2/3] step 3 shared prefix" in line for line in drawn), text
    assert all(len(line.splitlines()[0]) <= 80 for line in drawn)


def read(master: int) -> bytes:
    """Return what a pseudo-terminal has to say, b"" once nobody holds its other end."""
    try:
        return os.read(master, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("fault", "code", "verdict", "step"),
    [
        pytest.param(Fault.HITS_ZERO, 1, "tune", 3, id="no-hits"),
        pytest.param(Fault.METRICS_500, 1, "fix_environment", 3, id="metrics-broken"),
        pytest.param(Fault.ERROR_IN_200, 1, "fix_environment", 2, id="engine-dead"),
        pytest.param(Fault.OTHER_TRAFFIC, 3, "inconclusive", 3, id="other-traffic"),
    ],
)
def test_the_exit_code_says_the_verdict(fault: Fault, code: int, verdict: str, step: int, tmp_path: Path) -> None:
    with FakeEngine(fault) as engine:
        engine.token_delay_s = 0.001
        done = accept(engine.url, tmp_path)
        again = f"then: kimi-runbook accept --endpoint {engine.url}"
    assert done.returncode == code
    assert f"verdict: {verdict}" in done.stdout
    mend, last = done.stdout.splitlines()[-2:]
    assert last == again
    assert mend.startswith("next: ") and mend.removeprefix("next: ") in done.stdout.partition("  because ")[2]
    states = {result.step: result.state for result in load_record(the_run(tmp_path)).steps}
    assert not states[step].lets_next_layer_run
    assert all(state.lets_next_layer_run for number, state in states.items() if number < step)


def test_a_defect_of_a_step_is_shown_and_the_record_kept(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Context) -> StepResult:
        raise ZeroDivisionError("division by zero")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accept_command, "Chain", lambda context: Chain(context, {**STEPS, 3: broken}))
    assert cli.main(["accept", "--endpoint", engine.url]) == 3
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err
    states = [step.state for step in load_record(the_run(tmp_path)).steps]
    assert states == [State.PASS, State.INCONCLUSIVE, State.NOT_RUN]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(("--endpoint", CLOSED), "refused; expected a connection", id="closed-port"),
        pytest.param(("--endpoint", CLOSED, "--request-set", "poc"), "expected one of smoke", id="request-set"),
        pytest.param(("--endpoint", CLOSED, "--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set", id="no-key"),
        pytest.param(("--endpoint", CLOSED, "--engine-log", "absent"), "absent cannot be read", id="no-log"),
    ],
)
def test_what_cannot_be_asked_leaves_nothing_behind(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["accept", *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_sent(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").write_text("a file", encoding="utf-8")
    assert cli.main(["accept", "--endpoint", engine.url, "--runs-dir", str(tmp_path / "runs")]) == 2
    (told,) = capsys.readouterr().err.splitlines()  # and nothing that sounds as if the run had begun
    assert "--runs-dir DIR" in told
    assert engine.requests == []


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--require", "tools,telepathy", "telepathy is not among tools, reasoning, images"),
        ("--require", ",", "nothing is not among"),
        ("--retention", "sparse", "'sparse' is neither a number of tokens nor dense"),
        ("--concurrency", "0", "'0' is no whole number of at least 1"),
        ("--chat-template-kwargs", "[1]", "no JSON object"),
        ("--chat-template-kwargs", "{", "no JSON ("),
    ],
)
def test_values_that_make_no_sense(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["accept", "--endpoint", CLOSED, option, value])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_what_metrics_do_not_tell_comes_from_the_log_and_the_options(tmp_path: Path) -> None:
    """As with vLLM's Rust front end; the log is of a whole start of vLLM 0.32, which had the default block."""
    log = ROOT / "tests" / "data" / "engine_logs" / "one_node_vllm_0.32.0_cpu.log"
    with FakeEngine(Fault.GEOMETRY_ABSENT) as engine:
        engine.token_delay_s = 0.001
        untold = accept(engine.url, tmp_path, "--runs-dir", "untold")
        by_options = accept(engine.url, tmp_path, "--block-size", "64", "--cache-mode", "none", "--runs-dir", "options")
        told = accept(engine.url, tmp_path, "--engine-log", str(log), "--block-size", "64")
    assert untold.returncode == 3
    assert "--engine-log" in untold.stdout and "--block-size" in untold.stdout
    assert by_options.returncode == 0, by_options.stdout
    assert told.returncode == 0, told.stdout
    assert load_record(the_run(tmp_path)).fingerprint.block_size_tokens == 64


def test_a_required_ability_that_is_refused_fails_the_run(tmp_path: Path) -> None:
    with FakeEngine(Fault.IMAGE_REFUSED) as engine:
        engine.token_delay_s = 0.001
        probed = accept(engine.url, tmp_path)
        required = accept(engine.url, tmp_path, "--require", "images")
    assert probed.returncode == 0, probed.stdout
    assert required.returncode == 1
    assert "because image-input" in required.stdout


def interrupted(
    engine: FakeEngine, cwd: Path, number: signal.Signals, when: Callable[[], bool], *, again: bool = False
) -> tuple[int, str, Record]:
    """Run until something is true, send a signal (twice), and return exit code, output and the record left."""
    running = subprocess.Popen(
        command(engine.url, "--max-tokens", "64"),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        give_up_s = time.monotonic() + 60
        while not when():
            assert running.poll() is None and time.monotonic() < give_up_s, running.communicate()
            time.sleep(0.01)
        running.send_signal(number)
        if again:
            running.send_signal(number)
        output, _ = running.communicate(timeout=30)
    finally:
        running.kill()
    return running.returncode, output, load_record(the_run(cwd))


def in_step_3(run_dir_of: Path) -> Callable[[], bool]:
    return lambda: any(run_dir_of.glob("runs/*/expectation.json"))


def under_load(engine: FakeEngine) -> Callable[[], bool]:
    return lambda: engine.running >= 2


@pytest.mark.parametrize(
    ("number", "code", "again"),
    [
        pytest.param(signal.SIGINT, 130, False, id="ctrl-c"),
        pytest.param(signal.SIGINT, 130, True, id="ctrl-c-twice"),
        pytest.param(signal.SIGTERM, 143, False, id="sigterm"),
        pytest.param(signal.SIGHUP, 129, False, id="terminal-gone"),
    ],
)
def test_an_interrupt_in_step_3_leaves_a_usable_record(
    number: signal.Signals, code: int, again: bool, engine: FakeEngine, tmp_path: Path
) -> None:
    returned, output, record = interrupted(engine, tmp_path, number, in_step_3(tmp_path), again=again)
    assert returned == code, output
    assert [step.state for step in record.steps] == [State.PASS, State.INCONCLUSIVE, State.NOT_RUN]
    assert record.steps[1].note == "interrupted"
    assert "step 3 (shared prefix) is INCONCLUSIVE" in record.steps[2].note
    assert "verdict: inconclusive" in output and "Traceback" not in output
    for name in ("report.md", "junit.xml"):
        assert (the_run(tmp_path) / name).stat().st_size
    left_over = [path.name for path in the_run(tmp_path).iterdir() if path.name.startswith(".")]
    assert left_over == []


def test_an_interrupt_under_load_does_not_wait_for_the_streams(engine: FakeEngine, tmp_path: Path) -> None:
    def when() -> bool:
        if engine.running < 2:
            return False
        engine.token_delay_s = 5  # the streams under way would now take minutes
        return True

    began_s = time.monotonic()
    returned, output, record = interrupted(engine, tmp_path, signal.SIGINT, when)
    assert returned == 130, output
    assert time.monotonic() - began_s < 30
    assert [step.state for step in record.steps] == [State.PASS, State.PASS, State.INCONCLUSIVE]


def test_an_interrupt_before_anything_was_asked_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        running = subprocess.Popen(command(url), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
        connection, _ = server.accept()  # it waits for an answer now
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=30)
        connection.close()
    assert running.returncode == 130
    assert told == "kimi-runbook: cancelled\n"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_killed_leaves_the_steps_it_had_finished(engine: FakeEngine, tmp_path: Path) -> None:
    returned, _, record = interrupted(engine, tmp_path, signal.SIGKILL, under_load(engine))
    assert returned == -signal.SIGKILL
    assert [step.state for step in record.steps][:2] == [State.PASS, State.PASS]


def test_no_file_of_a_run_holds_the_key(engine: FakeEngine, tmp_path: Path) -> None:
    seen: list[str | None] = []
    handler = engine._server.RequestHandlerClass

    class Keyed(handler):  # type: ignore[misc, valid-type]
        """Asks for the key, and repeats it in every refusal, as servers should not."""

        def parse_request(self) -> bool:
            good = super().parse_request()
            seen.append(self.headers.get("Authorization") if good else None)
            if good and self.path.startswith("/v1") and seen[-1] != f"Bearer {KEY}":
                self._error(401, "Unauthorized")
                self.close_connection = True
                return False
            return bool(good)

        def _error(self, status: int, message: str) -> None:
            super()._error(status, f"{message} (Authorization: {self.headers.get('Authorization')})")

    engine._server.RequestHandlerClass = Keyed
    done = accept(engine.url, tmp_path, "--api-key-env", "TEST_VLLM_KEY", TEST_VLLM_KEY=KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Bearer {KEY}" in seen
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 4
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in done.stdout + done.stderr
    assert "(Authorization: Bearer [API key])" in (the_run(tmp_path) / "record.json").read_text(encoding="utf-8")


def record_with(text: str) -> Record:
    check = Check(name="x", state=State.FAIL, observed=text, expected="wanted", evidence=text)
    result = StepResult.of(2, "short request", [check], {"figures": [{text: text, "n": 1}]})
    with FakeEngine() as engine:
        plan = plan_of(Options(endpoint=engine.url, metrics=(engine.url,)), SEEN, "run", Path("runs/run"))
        chain = Chain(Context.of(plan, {}), {2: lambda _: result})
        chain.run(2)
        return chain.record()


def test_a_secret_that_an_answer_repeated_is_taken_out_of_the_record() -> None:
    record = without(KEY, record_with(f"header {KEY!r}"))
    assert KEY not in record.dumps()
    assert "header '[API key]'" in record.dumps()


@pytest.mark.parametrize("secret", ["", "x", "EMPTY"])
def test_a_placeholder_for_a_key_blots_out_nothing(secret: str) -> None:
    record = record_with("EMPTY x")
    assert without(secret, record) == record


@pytest.mark.parametrize(
    ("options", "command_again"),
    [
        ((), ""),
        (("--metrics", f"{CLOSED}/metrics"), ""),
        (
            (
                *("--metrics", "http://127.0.0.1:2/metrics", "--metrics", "http://127.0.0.1:3/metrics"),
                *("--model", "a model", "--require", "tools,images", "--max-tokens", "64"),
                *("--chat-template-kwargs", '{"thinking": false}', "--concurrency", "8", "--peak", "16"),
                *("--observe", "60", "--api-key-env", "KEY", "--ca-file", "ca.pem", "--proxy", "http://127.0.0.1:9"),
                *("--engine-log", "engine.log", "--engines", "2", "--block-size", "1536", "--match-unit", "128"),
                *("--retention", "dense", "--runs-dir", "kept"),
            ),
            " --metrics http://127.0.0.1:2/metrics --metrics http://127.0.0.1:3/metrics --model 'a model' --require "
            "tools,images --max-tokens 64 --chat-template-kwargs '{\"thinking\": false}' --concurrency 8 --peak 16 "
            "--observe 60 --api-key-env KEY --ca-file ca.pem --proxy http://127.0.0.1:9 --engine-log engine.log "
            "--engines 2 --block-size 1536 --match-unit 128 --retention dense --runs-dir kept",
        ),
    ],
)
def test_the_next_command_asks_the_same_again(options: tuple[str, ...], command_again: str) -> None:
    """What the command line says comes back whole, in an order of its own, with what is the default left out."""
    arguments = cli.build_parser().parse_args(["accept", "--endpoint", CLOSED, *options])
    again = command_line(options_of(arguments), arguments.runs_dir)
    assert again == f"kimi-runbook accept --endpoint {CLOSED}{command_again}"
    read_again = cli.build_parser().parse_args(shlex.split(again)[1:])
    assert command_line(options_of(read_again), read_again.runs_dir) == again


def test_nothing_of_ansible_or_pytest_is_imported() -> None:
    asked = (
        "import sys, kimi_runbook.cli as cli; cli.build_parser();"
        "from kimi_runbook.commands import accept;"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"ansible", "ansible_runner", "pytest", "_pytest", "testinfra", "paramiko"} & set(
        re.findall(r"'(\w+)'", done.stdout)
    )
