"""The node's side of evidence: limits on time and size, order of importance, and what a limit leaves behind."""

import base64
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import evidence_probe as probe
import node_evidence
import pytest

SLEEPS = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('begun', flush=True); time.sleep(60)"


def ask(part, timeout_s=10, limit=4096, mark=None):
    return node_evidence.ask(part, timeout_s, probe.Keeper(limit, mark))


def python(code, **part):
    return {"name": "part", "argv": [sys.executable, "-c", code], **part}


@pytest.mark.parametrize(
    ("part", "text", "reason", "notes"),
    [
        pytest.param(python("print('x')"), "x\n", "", [], id="answer"),
        pytest.param(python("print('x'); exit(3)", exit=[3]), "x\n", "", [], id="stopped-unit-is-an-answer"),
        pytest.param(python("import sys; sys.exit('no GPU')"), None, "exit 1: no GPU", [], id="failed"),
        pytest.param(
            python("import sys; print('half'); sys.exit('no GPU')"), "half\n", "", ["exit 1: no GPU"], id="failed-half"
        ),
        pytest.param(python("pass"), None, "nothing printed", [], id="silent"),
        pytest.param(python("import sys; sys.stderr.write('no rows')"), None, "no rows", [], id="only-standard-error"),
        pytest.param({"name": "part", "argv": ["no-such-program-here"]}, None, "no such program", [], id="no-program"),
        pytest.param({"name": "part", "file": "/no/such"}, None, "no such file: /no/such", [], id="no-file"),
        pytest.param(
            python("import sys; sys.stderr.write('e')", stderr=True), "e", "", [], id="standard-error-belongs-to-it"
        ),
    ],
)
def test_a_part_is_an_answer_or_a_reason(part, text, reason, notes):
    row = ask(part)
    assert (row["text"], row["reason"], row["notes"]) == (text, reason, notes)


def alive(marker):
    """Return the processes that have a marker in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes())
        except OSError:
            continue  # gone, or another user's
    return found


def wait_until_none(marker, seconds=10):
    deadline = time.monotonic() + seconds
    while alive(marker) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return alive(marker)


def test_what_takes_too_long_is_ended_with_its_children_and_what_it_printed_is_kept(monkeypatch):
    monkeypatch.setenv("EVIDENCE_TEST", "limit-of-one-part")
    begun = time.monotonic()
    row = ask(python(SLEEPS), timeout_s=1)
    assert time.monotonic() - begun < 8
    assert (row["text"], row["notes"]) == ("begun\n", ["ended at its limit of 1 s"])
    assert [line for line in wait_until_none("EVIDENCE_TEST=limit-of-one-part") if b"sleep" in line] == []


def test_a_command_that_ignores_the_request_to_end_is_killed():
    row = ask(
        python("import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"), 1
    )
    assert row["notes"] == ["ended at its limit of 1 s"]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_nothing_outlives_its_limit_when_the_module_is_ended(how, tmp_path, project_root):
    marker = f"ended-by-{how}-{os.getpid()}"
    part = {**python(SLEEPS), "timeout_s": 3}
    module = subprocess.Popen(
        [sys.executable, project_root / "plugins/modules/node_evidence.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "EVIDENCE_TEST": marker, "PYTHONPATH": str(shipped(tmp_path, project_root))},
    )
    module.stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": {"parts": [part]}}).encode())
    module.stdin.close()
    deadline = time.monotonic() + 20
    while not any(line.startswith(b"sleep") for line in alive(f"EVIDENCE_TEST={marker}")):
        assert time.monotonic() < deadline, "the command never began"
        threading.Event().wait(0.05)
    module.send_signal(getattr(__import__("signal"), how))
    module.wait(10)
    assert wait_until_none(f"EVIDENCE_TEST={marker}", 15) == []


def shipped(tmp_path, project_root):
    """Return a folder from which the module imports its helper as Ansible ships it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import ansible.module_utils as utils\n"
        f"utils.__path__.append({str(project_root / 'plugins/module_utils')!r})\n"
        "import ansible.module_utils.basic as basic, sys\n"
        "from ansible.module_utils.testing import patch_module_args\n"
    )
    return tmp_path


def test_a_long_text_keeps_head_end_and_the_lines_around_the_first_failure():
    lines = [f"line {number:06}\n" for number in range(20_000)]
    lines[9_000] = "ERROR Traceback (most recent call last):\n"
    lines[9_001] = "ERROR ValueError: the cause\n"
    keeper = probe.Keeper(40_000, "Traceback")
    for start in range(0, len(lines), 700):
        keeper.feed("".join(lines[start : start + 700]).encode())
    text = keeper.text()
    assert text.startswith("line 000000\n")
    assert text.endswith("line 019999\n")
    assert "ValueError: the cause" in text
    assert "line 008999\n" in text
    assert text.count("bytes left out here]") == 2
    assert sum(len(data) for _, data in keeper.pieces()) <= 40_000
    assert keeper.notes()[0].startswith(f"cut: {sum(len(data) for _, data in keeper.pieces())} of {keeper.total} bytes")


@pytest.mark.parametrize("place", [0, 10, 400, 1_500, 1_990])
def test_a_failure_is_kept_wherever_it_stands_and_nothing_twice(place):
    lines = [f"line {number:06}\n" for number in range(2_000)]
    lines[place] = "Traceback here\n"
    keeper = probe.Keeper(4_000, "Traceback")
    for line in lines:
        keeper.feed(line.encode())
    text = keeper.text()
    kept = [line for line in text.splitlines() if line.startswith("line ")]
    assert "Traceback here" in text
    assert kept == sorted(set(kept))


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5_000])
def test_what_fits_is_kept_as_it_is(size):
    keeper = probe.Keeper(5_000, "Traceback")
    keeper.feed(b"x" * size)
    assert keeper.text() == "x" * size
    assert keeper.notes() == []


def collect(parts, clock=time.monotonic, **limits):
    params = {"timeout_s": 60, "limit_kib": 100, "total_s": 300, "total_kib": 1000, "mark": "", "env_shown": "(?!)"}
    asked = []

    def asking(part, timeout_s, keeper, variables):
        asked.append((part["name"], timeout_s, keeper.limit // 1024))
        return {"name": part["name"], "text": part["prints"], "reason": "", "notes": [], "skipped": False}

    rows = node_evidence.collect({**params, "env_hidden": "", **limits, "parts": parts}, clock, asking)
    return asked, rows


def test_parts_are_asked_in_order_of_importance_and_returned_in_the_order_of_the_question():
    parts = [
        {"name": name, "priority": place, "prints": "x"} for name, place in (("c", 3), ("a", 1), ("d", None), ("b", 1))
    ]
    asked, rows = collect(parts)
    assert [name for name, _, _ in asked] == ["a", "b", "c", "d"]
    assert [row["name"] for row in rows] == ["c", "a", "d", "b"]


def test_the_size_of_the_whole_leaves_out_the_least_important():
    parts = [{"name": "c", "priority": 3, "prints": "x"}, {"name": "a", "priority": 1, "prints": "x" * 99 * 1024}]
    parts.append({"name": "b", "priority": 2, "prints": "x" * 1024})
    asked, rows = collect(parts, total_kib=100)
    assert [(name, limit) for name, _, limit in asked] == [("a", 100), ("b", 1)]
    assert rows[0]["text"] is None
    assert rows[0]["reason"] == "not asked: all parts together may take 100 KiB, which more important ones did"


def test_the_time_of_the_whole_leaves_out_the_least_important():
    ticks = iter([0.0, 0.0, 8.0, 9.5])
    parts = [{"name": name, "priority": place, "prints": "x"} for place, name in enumerate("abc", 1)]
    asked, rows = collect(parts, clock=lambda: next(ticks), total_s=10)
    assert [(name, timeout) for name, timeout, _ in asked] == [("a", 10.0), ("b", 2.0)]
    assert rows[2]["reason"].startswith("not asked: all parts together may take 10 s")


def test_a_part_that_needs_what_is_not_there_is_skipped():
    row = ask({"name": "pods.yml", "argv": ["kubectl"], "needs": ["no-such-program-here", "/no/such", "/"]})
    assert (row["text"], row["skipped"]) == (None, True)
    assert row["reason"] == "not on this host: no-such-program-here, /no/such"


def process(proc, pid, argv, environ=(), ticks=500):
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes("".join(f"{word}\0" for word in argv).encode())
    (folder / "stat").write_text(f"{pid} (VLLM::Engine (x)) S 1 " + " ".join(["0"] * 17) + f" {ticks} 0\n")
    (folder / "cgroup").write_text("0::/system.slice/docker-x.scope\n")
    (folder / "environ").write_bytes("".join(f"{entry}\0" for entry in environ).encode())


def test_processes_are_told_with_their_real_arguments_and_only_steering_variables(tmp_path):
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1795996800\n")
    process(tmp_path, 41, ["python3", "-m", "vllm", "serve", "/m m"], ["NCCL_NET=IB", "NCCL_KEY=x", "SITE=opensesame"])
    process(tmp_path, 42, ["bash"])
    process(tmp_path, 43, [])
    keeper = probe.Keeper(4096)
    probe.read_processes("vllm", r"NCCL_\w+", "key", keeper, proc=str(tmp_path))
    (row,) = json.loads(keeper.text())
    assert row["argv"] == ["python3", "-m", "vllm", "serve", "/m m"]
    assert (row["pid"], row["ppid"]) == (41, 1)
    assert row["started_at"] == time.strftime(
        "%Y-%m-%dT%H:%M:%SZ", time.gmtime(1795996800 + 500 // os.sysconf("SC_CLK_TCK"))
    )
    assert row["environment"] == {"NCCL_NET": "IB"}
    assert row["environment_not_shown"] == ["NCCL_KEY", "SITE"]
    assert "opensesame" not in keeper.text()


def test_no_process_that_matches_is_a_reason(tmp_path):
    row = node_evidence.ask({"name": "p", "processes": "no-such-command-line-anywhere"}, 5, probe.Keeper(4096))
    assert row["reason"] == "no process whose command line matches no-such-command-line-anywhere"


def test_several_files_carry_their_names(tmp_path):
    (tmp_path / "a.conf").write_text("1\n")
    (tmp_path / "b.conf").write_text("2\n")
    row = ask({"name": "p", "file": f"{tmp_path}/*.conf"})
    assert row["text"] == f"==> {tmp_path}/a.conf <==\n1\n==> {tmp_path}/b.conf <==\n2\n"


class Version(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "0.33.1"}')

    def log_message(self, *_):
        """Keep the test's output clean."""


def test_a_page_of_the_host_is_asked_without_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Version) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        row = ask({"name": "p", "url": f"http://127.0.0.1:{server.server_port}/version"}, 5)
        thread.join()
    assert row["text"] == '{"version": "0.33.1"}'
    assert "refused" in ask({"name": "p", "url": f"http://127.0.0.1:{server.server_port}/"}, 5)["reason"]


def test_texts_travel_compressed():
    row = node_evidence.packed({"name": "p", "text": "x" * 10_000})
    assert len(row["data"]) < 200
    assert zlib.decompress(base64.b64decode(row["data"])).decode() == "x" * 10_000
    assert node_evidence.packed({"name": "p", "text": None})["data"] is None
