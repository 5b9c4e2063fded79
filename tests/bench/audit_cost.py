"""What an audit costs the controller, beside `ansible -m setup` on the same hosts in the same minute.

    python -m tests.bench.audit_cost [--pairs 5] [--names 18]

Needs the lab up. The two hosts are audited under one name each, and again under many, as that many replicas of two
nodes, so that what one more host costs can be told from what starting costs: the difference of the two divided by the
names more. Names of one host share its ssh connection, in both commands alike. Prints medians;
docs/performance.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "inventories/lab"
AIM = 1.3
"""Controller CPU of an audit over that of `setup`, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One command: CPU of the controller with everything it started, and wall time, in seconds."""

    cpu_s: float
    wall_s: float


def inventory_of(names: int, folder: Path) -> Path:
    """Write an inventory of the lab's two hosts under so many names in all; its group variables are the lab's own."""
    site = yaml.safe_load((LAB / "hosts.yml").read_text(encoding="utf-8"))
    hosts = site["all"]["children"]["gpu_nodes"]["children"]["engine"]["hosts"]
    site["all"]["vars"]["ansible_ssh_common_args"] = f"-F {ROOT / '.lab/ssh_config'}"
    site["all"]["children"]["gpu_nodes"]["children"]["engine"]["hosts"] = {
        f"{name}-{number:03d}": {
            **variables,
            "ansible_host": name,
            "engine_nodes": [f"{rank}-{number:03d}" for rank in hosts],
        }
        for number in range(names // len(hosts))
        for name, variables in hosts.items()
    }
    target = folder / f"inventory-{names}"
    target.mkdir()
    (target / "hosts.yml").write_text(yaml.safe_dump(site), encoding="utf-8")
    (target / "group_vars").symlink_to(LAB / "group_vars")
    for beside in ("keys", "lock.yml"):
        (target / beside).symlink_to(LAB / beside)
    return target / "hosts.yml"


def cost_of(command: Sequence[str], statuses: Sequence[int]) -> Cost:
    """Run a command and return what it cost; RuntimeError with its output when it ends with another status."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    if done.returncode not in statuses:
        raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(cpu_s=cpu_s, wall_s=wall_s)


def pair(inventory: Path, names: int, folder: Path) -> Mapping[str, Cost]:
    """Run both commands once, one after the other, on an inventory of so many names."""
    runs = tempfile.mkdtemp(dir=folder)
    # 2 is an audit with a stop code: many names on one address are no fleet to serve with, and it says so.
    audit = cost_of(
        ["ansible-playbook", "-i", str(inventory), "playbooks/audit.yml", "--extra-vars", f"runs_dir={runs}"], (0, 2)
    )
    (snapshots,) = Path(runs).glob("*/snapshots.json")
    seen = json.loads(snapshots.read_text(encoding="utf-8"))
    setup = cost_of(["ansible", "-i", str(inventory), "gpu_nodes", "-m", "setup"], (0,))
    if len(seen) != names:
        raise RuntimeError(f"{snapshots} holds {len(seen)} hosts, expected {names}")
    return {"audit": audit, "setup": setup}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in pairs and print; returns 0 when the aim is met, 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.audit_cost", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="pairs per size (default: %(default)s)")
    parser.add_argument(
        "--names", type=int, default=18, help="names the hosts go by in the large case (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    os.environ["ANSIBLE_CONFIG"] = str(ROOT / "ansible.cfg")
    sizes = (2, options.names)
    measured: dict[tuple[int, str], list[Cost]] = {}
    with tempfile.TemporaryDirectory() as folder:
        inventories = {size: inventory_of(size, Path(folder)) for size in sizes}
        for _ in range(options.pairs):
            for size, inventory in inventories.items():
                for name, cost in pair(inventory, size, Path(folder)).items():
                    measured.setdefault((size, name), []).append(cost)
    cpu = {key: statistics.median(cost.cpu_s for cost in costs) for key, costs in measured.items()}
    wall = {key: statistics.median(cost.wall_s for cost in costs) for key, costs in measured.items()}
    for size in sizes:
        ratios = [
            audit.cpu_s / setup.cpu_s
            for audit, setup in zip(measured[size, "audit"], measured[size, "setup"], strict=True)
        ]
        told = [f"{name} {cpu[size, name]:.2f} CPU-s in {wall[size, name]:.1f} s" for name in ("audit", "setup")]
        spread = f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{size} names: {', '.join(told)}; ratio of CPU in {options.pairs} pairs: {spread}")
    more = options.names - 2
    each = {name: (cpu[options.names, name] - cpu[2, name]) / more for name in ("audit", "setup")}
    ratio = each["audit"] / each["setup"]
    told = [f"{name} {each[name]:.3f} CPU-s" for name in ("audit", "setup")]
    print(f"one more host: {', '.join(told)}; ratio {ratio:.2f} (aim {AIM:g})")
    return 0 if ratio <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
