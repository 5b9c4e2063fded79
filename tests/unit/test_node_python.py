"""What runs on nodes keeps to Python 3.9: RHEL 9 has it, Ubuntu 22.04 has 3.10."""

import ast
import re
from pathlib import Path

import host_probe
import host_snapshot
import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE_SIDE = sorted([*ROOT.glob("plugins/modules/*.py"), *ROOT.glob("plugins/module_utils/*.py")])
NEWER_MODULES = {"tomllib"}  # 3.11
NEWER_NAMES = {("datetime", "UTC"), ("enum", "StrEnum"), ("itertools", "pairwise"), ("contextlib", "chdir")}


def newer_than_3_9(source: str) -> list[str]:
    """Return what of a source a Python 3.9 would refuse or not find; syntax it cannot read raises SyntaxError."""
    tree = ast.parse(source, feature_version=(3, 9))
    annotations = {id(part) for node in ast.walk(tree) for part in annotated(node)}
    return [word for node in ast.walk(tree) if id(node) not in annotations for word in newer(node)]


def annotated(node: ast.AST) -> list[ast.AST]:
    """Return all nodes of a node's annotations, which are text at run time."""
    found = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [part for root in found if isinstance(root, ast.AST) for part in ast.walk(root)]


def newer(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in NEWER_MODULES]
    if isinstance(node, ast.ImportFrom):
        named = [alias.name for alias in node.names if (node.module, alias.name) in NEWER_NAMES]
        return named + [node.module for _ in (1,) if node.module in NEWER_MODULES]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [node.attr] if (node.value.id, node.attr) in NEWER_NAMES else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "zip" and any(keyword.arg == "strict" for keyword in node.keywords):
            return ["zip(strict=)"]
        if node.func.id in ("isinstance", "issubclass") and any(
            isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr) for part in node.args[1:]
        ):
            return ["a union of types at run time"]
    return []


@pytest.mark.parametrize("path", NODE_SIDE, ids=lambda path: path.name)
def test_nothing_newer_than_python_3_9(path):
    source = path.read_text(encoding="utf-8")
    assert newer_than_3_9(source) == []
    assert "from __future__ import annotations" in source


@pytest.mark.parametrize(
    "source",
    [
        "import datetime\ndatetime.datetime.now(datetime.UTC)",
        "from datetime import UTC",
        "import tomllib",
        "from tomllib import loads",
        "zip(a, b, strict=True)",
        "isinstance(x, int | str)",
    ],
)
def test_the_check_sees_what_is_newer(source):
    assert newer_than_3_9(source)


@pytest.mark.parametrize("source", ["match x:\n    case 1: pass", "try:\n    pass\nexcept* OSError:\n    pass"])
def test_the_check_sees_newer_syntax(source):
    with pytest.raises(SyntaxError):
        newer_than_3_9(source)


def test_a_snapshot_of_an_empty_tree_is_whole(tmp_path):
    def nothing(argv, **_):
        raise FileNotFoundError(argv[0])

    wanted = dict.fromkeys(("packages", "files", "units", "modules", "ports", "container_files"), ())
    seen = host_snapshot.take(
        host_probe.Probe(root=tmp_path, run=nothing), {**wanted, "image": "", "engine_container": ""}
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", seen["taken_at"])
    assert seen["schema_version"] == 1
