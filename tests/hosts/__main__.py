"""Writes the matrix of fake hosts to a folder: a snapshot each, and what is expected and locked, ready for the audit.

    python -m tests.hosts FOLDER
    kimi-runbook audit FOLDER/h200_ubuntu/*.json --expected FOLDER/h200_ubuntu.expected.json \\
      --lock FOLDER/h200_ubuntu.lock.yml

One lock is for one platform on one distribution, so there is a group of hosts for each. With ``--trees`` the trees are
kept as well.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.hosts.build import build
from tests.hosts.described import Host, matrix
from tests.hosts.snapshots import snapshot
from tests.hosts.wanted import expected_of, lock_data, lock_name, questions_of


def main() -> None:
    """Write all snapshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trees", action="store_true", help="keep the trees in FOLDER/trees")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        trees = arguments.folder / "trees" if arguments.trees else Path(passing)
        for name, hosts in grouped().items():
            write(name, hosts, arguments.folder, trees)
            print(f"{arguments.folder / name}: {len(hosts)} hosts")


def grouped() -> dict[str, list[Host]]:
    """Return the hosts by the name of their lock."""
    groups: dict[str, list[Host]] = {}
    for host in matrix():
        groups.setdefault(lock_name(host), []).append(host)
    return groups


def write(name: str, hosts: list[Host], folder: Path, trees: Path) -> None:
    """Write one group: a folder of snapshots, what is expected of each host, and the lock."""
    expected = {}
    (folder / name).mkdir(parents=True, exist_ok=True)
    for host in hosts:
        seen = snapshot(build(host, trees), questions_of(host)) | {"hostname": host.name}
        (folder / name / f"{host.name}.json").write_text(json.dumps(seen, indent=1), encoding="utf-8")
        expected[host.name] = expected_of(host) | {"host": host.name}
    (folder / f"{name}.expected.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")
    lock = json.dumps(lock_data(hosts[0]), indent=1)  # YAML reads JSON
    (folder / f"{name}.lock.yml").write_text(lock, encoding="utf-8")


if __name__ == "__main__":
    main()
