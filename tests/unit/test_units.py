"""Unit files: quoting that systemd itself reads back, and the engine's unit."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kimi_runbook.errors import RunbookError
from kimi_runbook.units import render_engine_unit, systemd_escape

NASTY = [
    *("plain", "a b", "$HOME", "${HOME}", "$$", "100%", "%n", "%%", "back\\slash", "\\", 'quote"d', "it's", ""),
    *(";", '{"a": [1, "b c"], "d": "$e %f"}', "tab\there", "new\nline", "é", "end\\", "#hash", "~/x", "*?", "\x01"),
    *("-x", "@x", "!x", "|", "&&", "\\x41", "--a=b,c:d/e"),
]
MANAGER = Path("/lib/systemd/systemd")


def read_back(command: str) -> list[str]:
    """Split a command as systemd.service(5) and systemd.syntax(7) describe: quotes and escapes, then %, then $."""
    words = []
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|[^\s"]+', command):
        word = token
        if word.startswith('"'):
            word = re.sub(
                r"\\(x([0-9a-f]{2})|.)",
                lambda match: (
                    chr(int(match[2], 16)) if match[2] else {"n": "\n", "t": "\t", "r": "\r"}.get(match[1], match[1])
                ),
                word[1:-1],
            )
        assert not re.search(r"(?<!%)(%%)*%(?!%)", word), f"specifier in {word!r}"
        assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", word), f"variable in {word!r}"
        words.append(word.replace("%%", "%").replace("$$", "$"))
    return words


def latin(words: list[str]) -> list[str]:
    """Return each byte as a character, the form in which read_back sees escaped bytes."""
    return [word if word.isprintable() else word.encode().decode("latin-1") for word in words]


def test_arguments_come_back_unchanged() -> None:
    argv = ["/usr/bin/docker", *NASTY]
    assert read_back(systemd_escape(argv)) == latin(argv)


def test_escaped_command_is_one_line() -> None:
    assert len(systemd_escape(["/bin/x", "a\nb\rc\u2028d"]).splitlines()) == 1


@pytest.mark.parametrize("argv", [[], ["docker"], ["-/bin/x"], ["@/bin/x"], ["/bin/a b"], ["/bin/$x"], [""]])
def test_program_must_be_a_plain_path(argv: list[str]) -> None:
    with pytest.raises(RunbookError, match="absolute path"):
        systemd_escape(argv)


@pytest.mark.parametrize("argument", ["a\0b", "a\ud800b"])
def test_what_no_program_can_be_given_is_refused(argument: str) -> None:
    with pytest.raises(RunbookError, match="NUL"):
        systemd_escape(["/bin/x", argument])


def unit(**changes: object) -> str:
    options: dict[str, object] = {
        "description": "vLLM engine, 100% of it",
        "container": "kimi-engine",
        "stop_timeout_s": 60,
        "start_timeout_s": 120,
        "restart": "on-failure",
    }
    argv = ["/usr/bin/docker", "run", "--name", "kimi-engine", "image", *NASTY]
    return render_engine_unit(argv, **(options | changes))  # type: ignore[arg-type] # the cases are typed loosely


def directive(text: str, name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)
    return str(value)


def test_engine_unit() -> None:
    text = unit()
    assert directive(text, "Requires") == "docker.service"
    assert "docker.service" in directive(text, "After").split()
    assert directive(text, "ExecStop") == "/usr/bin/docker stop --time 60 kimi-engine"
    assert directive(text, "Restart") == "on-failure"
    assert directive(text, "TimeoutStartSec") == "120"
    assert int(directive(text, "TimeoutStopSec")) > 60  # docker gets to kill before systemd does
    assert directive(text, "Description") == "vLLM engine, 100%% of it"
    for command in re.findall(r"^Exec\w+=(.*)$", text, re.MULTILINE):
        assert command.startswith("/")  # a leading "-" would hide failures


@pytest.mark.parametrize(
    ("listed", "removal", "rc", "removed"),
    [
        pytest.param("", 0, 0, False, id="nothing-stale"),
        pytest.param("c0ffee", 0, 0, True, id="stale"),
        pytest.param("c0ffee", 1, 1, True, id="removal-fails"),
        pytest.param(None, 0, 7, False, id="docker-does-not-answer"),
    ],
)
def test_stale_container_is_removed_and_no_failure_hidden(
    tmp_path: Path, listed: str | None, removal: int, rc: int, removed: bool
) -> None:
    fake = tmp_path / "docker"
    listing = "exit 7" if listed is None else f"echo {shlex.quote(listed)}" if listed else ":"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase $1 in ps) {listing};; rm) exit {removal};; esac\n',
        encoding="utf-8",
    )
    fake.chmod(0o755)
    text = render_engine_unit(
        [str(fake)], description="x", container="kimi-engine", stop_timeout_s=1, start_timeout_s=1
    )
    done = subprocess.run(read_back(directive(text, "ExecStartPre")), check=False, timeout=20)
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert done.returncode == rc
    assert calls[0].endswith("--filter name=^/kimi-engine$")
    assert calls[1:] == (["rm --force c0ffee"] if removed else [])


@pytest.mark.parametrize("changes", [{"container": "a b"}, {"container": "-x"}, {"restart": "sometimes"}])
def test_unit_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RunbookError):
        unit(**changes)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("true") or "/bin/true"
    path = tmp_path / "kimi-engine.service"
    path.write_text(unit().replace("/usr/bin/docker", program), encoding="utf-8")
    (tmp_path / "docker.service").write_text("[Service]\nExecStart=/bin/true\n", encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "kimi-engine" not in done.stderr, done.stderr


@pytest.mark.skipif(
    not MANAGER.exists() or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs systemd, and root to drop from: its test mode refuses to run as root",
)
def test_systemd_splits_the_command_as_meant() -> None:
    """Ask systemd itself: its test mode prints each command as it understood it, quoted for a shell."""
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())  # tmp_path is closed to other users
    try:
        units = folder / "systemd" / "user"
        units.mkdir(parents=True)
        bare = "[Unit]\nDescription=x\nDefaultDependencies=no\n"
        command = systemd_escape(["/bin/true", *NASTY])
        (units / "t.service").write_text(f"{bare}[Service]\nExecStart={command}\n", encoding="utf-8")
        (units / "default.target").write_text(f"{bare}Wants=t.service\n", encoding="utf-8")
        subprocess.run(["chown", "-R", "65534:65534", str(folder)], check=True)
        done = subprocess.run(
            ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", str(MANAGER), "--user", "--test"],
            env={
                "XDG_CONFIG_HOME": str(folder),
                "XDG_RUNTIME_DIR": str(folder),
                "HOME": str(folder),
                "PATH": "/usr/bin:/bin",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        shutil.rmtree(folder)
    (understood,) = re.findall(r"Command Line: (/bin/true .*)", done.stdout + done.stderr)
    # systemd prints C-quoted words; "$" is still doubled, as it is only read when the command is run.
    shown = [
        word[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape") if word.startswith('"') else word
        for word in re.findall(r'"(?:[^"\\]|\\.)*"|[^\s"]+', understood.replace("\\$", "$"))
    ]
    assert [word.replace("$$", "$") for word in shown[1:]] == latin(NASTY)
