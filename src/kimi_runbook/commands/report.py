"""``kimi-runbook report``: write a finished run's reports again from its record.json.

Exit code 0: the run was accepted; 1: the answer was no; 3: it was inconclusive.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kimi_runbook.commands import Commands
from kimi_runbook.report import FORMS, headline, older, regenerate, verdict_of


def register(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("report", help="write a run's reports again", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory, e.g. runs/20261130T144501Z-0a1b")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the reports, print the headline and every file written, and return the verdict's exit code."""
    record = regenerate(arguments.run_dir)
    verdict = verdict_of(record)
    if arguments.json:
        print(record.dumps(), end="")
    else:
        print(headline(record))
        if older(record):
            print(older(record))
        for name in FORMS:
            print(arguments.run_dir / name)
        print(f"next: {verdict.next_command}")
    return verdict.name.exit_code
