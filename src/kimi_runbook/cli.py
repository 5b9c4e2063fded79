"""The command line: ``kimi-runbook COMMAND ...``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NoReturn

from kimi_runbook.commands import CANCELLED, UNUSABLE, Commands, register_all
from kimi_runbook.errors import RunbookError

_PIPE_CLOSED = 128 + 13  # what a shell reports for a program that SIGPIPE ended
_EPILOG = (
    "exit codes: 0 fine, 1 the answer is no, 2 usage or unreadable input, 3 inconclusive, 130 cancelled, 143 ended"
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where the usual parser prints all options before it."""

    def error(self, message: str) -> NoReturn:
        """End with the message and exit code 2."""
        self.exit(UNUSABLE, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command registered."""
    parser = Parser(
        prog="kimi-runbook",
        description="From bare GPU hosts to an accepted Kimi K3 service on vLLM.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands: Commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    register_all(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors an operator can act on go to stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks ends no run
    arguments = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except RunbookError as error:
        print(f"kimi-runbook: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("kimi-runbook: cancelled", file=sys.stderr)
        return CANCELLED
    except BrokenPipeError:
        # Whoever read the output has gone. Python flushes once more at its end, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _version() -> str:
    try:
        return metadata.version("kimi-runbook")
    except metadata.PackageNotFoundError:
        return "not installed (run from a source tree)"
