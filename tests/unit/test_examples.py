"""The example inventories parse without a warning, with lock and keys beside them, and site.yml takes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.skipif(not (BIN / "ansible-playbook").exists(), reason="ansible-core is not installed here")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("example", ["b300-rdma", "gb300-nvl72"])
def test_an_example_parses_with_its_lock_and_keys_beside_it(example, tmp_path):
    site = tmp_path / example
    shutil.copytree(ROOT / "inventories/examples" / example, site)
    shutil.copy(site / "lock.template.yml", site / "lock.yml")
    (site / "keys").mkdir()
    (site / "keys/cuda-archive.asc").write_text("key", encoding="utf-8")
    graph = run("ansible-inventory", "-i", str(site), "--graph")
    assert graph.returncode == 0, graph.stderr
    assert "WARNING" not in graph.stderr
    groups = {line.strip().lstrip("|- ").rstrip(":") for line in graph.stdout.splitlines() if "@" in line}
    assert groups == {"@all", "@ungrouped", "@gpu_nodes", "@engine"}
    checked = run("ansible-playbook", "-i", str(site), "--syntax-check", "site.yml")
    assert checked.returncode == 0, checked.stderr
