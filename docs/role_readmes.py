"""Writes roles/<role>/README.md from meta/argument_specs.yml, which Ansible itself checks, and from the tasks' tags.

``python docs/role_readmes.py`` writes them; a unit test fails when one is not what it would be now.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parents[1] / "roles"


def readme(role: str, specs: dict[str, Any], tasks: list[dict[str, Any]]) -> str:
    """Return the README of one role."""
    main = specs["main"]
    lines = [f"# {role}", "", f"{main['short_description']}.", "", "```yaml", "roles:", f"  - role: {role}", "```", ""]
    options = main.get("options", {})
    if options:
        lines += ["| variable | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(name, option) for name, option in options.items()]
        lines.append("")
    tags = sorted({tag for task in tasks for tag in task.get("tags", []) if tag != "always"})
    if tags:
        lines += [f"Tags: {', '.join(f'`{tag}`' for tag in tags)}.", ""]
    entries = [f"`{name}`: {spec['short_description']}." for name, spec in specs.items() if name != "main"]
    if entries:
        lines += ["Other entry points:", "", *[f"- {entry}" for entry in entries], ""]
    return "\n".join([*lines, "Written by `make docs`; change `meta/argument_specs.yml` instead.", ""])


def _row(name: str, option: dict[str, Any]) -> str:
    default = "required" if option.get("required") else f"`{json.dumps(option.get('default'), ensure_ascii=False)}`"
    if not option.get("required") and "default" not in option:
        default = "see `defaults/main.yml`"
    kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
    description = re.sub(r"C\(([^)]*)\)", r"`\1`", str(option["description"]))
    cells = [f"`{name}`", kind, default, description]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def all_readmes() -> dict[Path, str]:
    """Return every role's README by the path it belongs to."""
    found = {}
    for specs in sorted(ROLES.glob("*/meta/argument_specs.yml")):
        folder = specs.parents[1]
        tasks = yaml.safe_load((folder / "tasks/main.yml").read_text(encoding="utf-8"))
        loaded = yaml.safe_load(specs.read_text(encoding="utf-8"))["argument_specs"]
        found[folder / "README.md"] = readme(folder.name, loaded, tasks)
    return found


if __name__ == "__main__":
    for path, text in all_readmes().items():
        path.write_text(text, encoding="utf-8")
