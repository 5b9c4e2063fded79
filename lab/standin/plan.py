"""From packages.yml to packages: pure planning, nothing is written here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kimi_runbook.errors import RunbookError
from lab.standin.kimi_standin import NOTICE
from lab.standin.shared_library import shared_library

HERE = Path(__file__).parent
CATALOGUE = HERE / "packages.yml"
MAINTAINER = "kimi-runbook lab <lab@kimi-runbook.invalid>"
LIBRARY = "/usr/lib/kimi-standin"
REVISION = "-1"

# Isolated, no site packages, no bytecode files; the tree the program lies in also holds the library.
PROGRAM = """\
#!/usr/bin/python3 -ISB
# {notice}.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[{depth}] / "usr/lib/kimi-standin"))
from kimi_standin import {module}

sys.exit({module}.{function}([{arguments}*sys.argv[1:]]))
"""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a package: content with mode, or where a symbolic link points."""

    path: str
    content: bytes = b""
    mode: int = 0o644
    link_to: str | None = None


@dataclass(frozen=True, slots=True)
class PackagePlan:
    """One .deb to build.

    Attributes:
        repository: Repository it belongs to (``cuda``, ``container-toolkit``).
        control: Fields of DEBIAN/control in order.
        files: What it installs.
        scripts: Maintainer scripts by name.
        triggers: Lines of DEBIAN/triggers.
    """

    repository: str
    control: tuple[tuple[str, str], ...]
    files: tuple[FilePlan, ...]
    scripts: tuple[tuple[str, str], ...]
    triggers: tuple[str, ...]

    @property
    def name(self) -> str:
        """The package's name."""
        return dict(self.control)["Package"]

    @property
    def version(self) -> str:
        """The package's Debian version."""
        return dict(self.control)["Version"]

    @property
    def filename(self) -> str:
        """The .deb's file name."""
        return f"{self.name}_{self.version}_{dict(self.control)['Architecture']}.deb"


def plan_packages(path: Path = CATALOGUE) -> list[PackagePlan]:
    """Return every package of the catalogue in every version.

    Raises:
        RunbookError: The catalogue has a kind of content this module does not know, or lacks a key.
    """
    catalogue = yaml.safe_load(path.read_text())
    plans: list[PackagePlan] = []
    for entry in catalogue["packages"]:
        try:
            versions = catalogue["version_sets"][entry["versions"]]
            plans += [_plan(catalogue, entry, version) for version in versions]
        except KeyError as missing:
            raise RunbookError(
                where=f"{path.name}, package {entry.get('name', '?')}",
                observed=f"no {missing} in it, or a kind of content or version set of that name is not known",
                expected="the keys its neighbours have",
                next_step="Compare it with another package of the file.",
            ) from missing
    return plans


def _plan(catalogue: Mapping[str, Any], entry: Mapping[str, Any], version: str) -> PackagePlan:
    branch = version.partition(".")[0]
    words = {
        "version": version,
        "debian": version + REVISION,
        "branch": branch,
        "cuda": catalogue["cuda_of_branch"].get(branch, ""),
    }
    words["name"] = entry["name"].format(**words)
    files = [file for content in entry["contents"] for file in CONTENTS[content["kind"]](catalogue, content, words)]
    files.append(FilePlan(f"/usr/share/doc/{words['name']}/README", f"{words['name']}: {NOTICE}.\n".encode()))
    kinds = {content["kind"] for content in entry["contents"]}
    depends = entry.get("depends", "").format(**words)
    tools = catalogue["tools_package"]
    if words["name"] != tools and kinds & {"program", "module"}:
        depends = f"{depends}, {tools}".lstrip(", ")
    control = [
        ("Package", words["name"]),
        ("Version", words["debian"]),
        ("Architecture", catalogue["architecture"]),
        ("Maintainer", MAINTAINER),
        ("Section", "non-free/kernel"),
        ("Priority", "optional"),
        ("Depends", depends),
    ]
    for field in ("provides", "conflicts", "replaces"):
        control.append((field.capitalize(), entry.get(field, "").format(**words)))
    synopsis = entry["synopsis"].format(**words)
    control.append(("Description", f"{synopsis} (kimi-runbook stand-in)\n {NOTICE}."))
    units = [content for content in entry["contents"] if content["kind"] == "unit"]
    return PackagePlan(
        repository=entry["repository"],
        control=tuple((field, value) for field, value in control if value),
        files=tuple(files),
        scripts=_scripts(units),
        triggers=("activate-noawait ldconfig",) if "library" in kinds else (),
    )


def _scripts(units: list[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return postinst and prerm for a package with units.

    Units are enabled at the first installation only. No daemon is restarted at an upgrade: it goes on as the version it
    was started with, which is for the operator's tools to notice.
    """
    if not units:
        return ()
    enabled = " ".join(unit["unit"] for unit in units if unit["enable"])
    started = " ".join(unit["unit"] for unit in units if unit.get("start"))
    names = " ".join(unit["unit"] for unit in units)
    lines = ["#!/bin/sh", "set -e", 'if [ "$1" = configure ] && command -v systemctl >/dev/null; then']
    lines += ["  if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi"]
    if enabled:
        lines += [f'  if [ -z "$2" ]; then systemctl --quiet enable {enabled}; fi']
    if started:
        lines += [f"  if [ -d /run/systemd/system ]; then systemctl --no-block restart {started}; fi"]
    lines += ["fi", ""]
    removal = ["#!/bin/sh", "set -e", 'if [ "$1" = remove ] && command -v systemctl >/dev/null; then']
    removal += [f"  if [ -d /run/systemd/system ]; then systemctl stop {names}; fi"]
    removal += [f"  systemctl --quiet disable {names}", "fi", ""]
    return (("postinst", "\n".join(lines)), ("prerm", "\n".join(removal)))


# Contents by kind: each takes the catalogue, the content's entry and the words for braces, and yields files.
Words = Mapping[str, str]
Entry = Mapping[str, Any]


def _standin_library(_catalogue: Entry, _content: Entry, _words: Words) -> Iterator[FilePlan]:
    for source in sorted((HERE / "kimi_standin").glob("*.py")):
        yield FilePlan(f"{LIBRARY}/kimi_standin/{source.name}", source.read_bytes())


def _program(_catalogue: Entry, content: Entry, words: Words) -> Iterator[FilePlan]:
    module, function = content["entry"].split(".")
    arguments = "".join(f'"{argument.format(**words)}", ' for argument in content.get("arguments", []))
    depth = content["path"].count("/") - 1
    text = PROGRAM.format(notice=NOTICE, depth=depth, module=module, function=function, arguments=arguments)
    yield FilePlan(content["path"], text.encode(), 0o755)


def _module(_catalogue: Entry, content: Entry, words: Words) -> Iterator[FilePlan]:
    facts = {
        "name": content["module"],
        "version": content.get("version", "").format(**words),
        "flavour": content.get("flavour", "kernel"),
        "license": content.get("license", "Dual BSD/GPL"),
        "depends": content.get("depends", []),
        "description": content["description"],
    }
    yield FilePlan(f"{LIBRARY}/modules/{content['module']}.json", (json.dumps(facts, indent=2) + "\n").encode())


def _library(catalogue: Entry, content: Entry, words: Words) -> Iterator[FilePlan]:
    folder, soname = catalogue["library_folder"], content["soname"]
    real = f"{soname.split('.so.')[0]}.so.{words['version']}"
    yield FilePlan(f"{folder}/{real}", shared_library(soname, f"{words['name']} {words['version']}: {NOTICE}"))
    yield FilePlan(f"{folder}/{soname}", link_to=real)


def _unit(_catalogue: Entry, content: Entry, _words: Words) -> Iterator[FilePlan]:
    source = HERE / "units" / content["unit"]
    yield FilePlan(f"/usr/lib/systemd/system/{content['unit']}", source.read_bytes())


def _file(_catalogue: Entry, content: Entry, _words: Words) -> Iterator[FilePlan]:
    yield FilePlan(content["path"], (HERE / "units" / content["source"]).read_bytes())


def _text(_catalogue: Entry, content: Entry, words: Words) -> Iterator[FilePlan]:
    text = content["text"].format(**words).rstrip("\n") + "\n"
    yield FilePlan(content["path"], text.encode(), int(content.get("mode", "0644"), 8))


CONTENTS = {
    "standin_library": _standin_library,
    "program": _program,
    "module": _module,
    "library": _library,
    "unit": _unit,
    "file": _file,
    "text": _text,
}
