"""``kimi-runbook report``: write a finished run's reports again from its record.json.

Exit code 0: the run was accepted; 1: the answer was no; 3: it was inconclusive.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kimi_runbook.commands import Commands
from kimi_runbook.report import FORMS, headline, older, regenerate, run_of, verdict_of, what_next
from kimi_runbook.report.text import clean


def register(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("report", help="write a run's reports again", description=__doc__)
    named = "run directory, e.g. runs/20261130T144501Z-0a1b, or its record.json"
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=named)
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the reports, print the headline and every file written, and return the verdict's exit code."""
    run_dir = run_of(arguments.run_dir)
    record = regenerate(run_dir)
    if arguments.json:
        print(record.dumps(), end="")
    else:
        print(clean(headline(record)))
        if older(record):
            print(older(record))
        for name in FORMS:
            print(run_dir / name)
        print(clean(what_next(record)))
    return verdict_of(record).name.exit_code
