"""``kimi-runbook scan``: look for secrets in every file of a run before it leaves the house.

Exit code: 0 when nothing looks like a secret, 1 when something does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from kimi_runbook.commands import FINE, NO, Commands
from kimi_runbook.evidence.scan import scan_folder


def register(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("scan", help="look for secrets in every file of a run", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run's folder, or any other")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_scan)


def _scan(arguments: argparse.Namespace) -> int:
    findings = scan_folder(arguments.folder)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(str(finding) for finding in findings) or "nothing looks like a secret")
    return NO if findings else FINE
