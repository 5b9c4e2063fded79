"""Writes a fake host: one folder that the probes read in place of ``/``.

Shapes say how a value looks on a host: which files, links and command answers it leads to, in the form real tools give
them, each with the place that form was read at. So a host with another driver version has it wherever it would show.

A shape names one of ``file``, ``link`` (with ``to``), ``folder`` or ``command`` (with ``rc`` and ``stderr`` where they
are not 0 and empty) and what stands there, ``text`` or a template of its own in ``output``; a file's ``initramfs`` puts
its text into an archive under that name, its ``size`` makes it one hole of so many bytes. It is written ``when`` an
expression holds, once for each item of a list or mapping (``each``: ``item``, ``key``) and for each pair of ``parts``
(``part``). Templates are Jinja with ``<< value >>`` and ``<% statement %>``, since Docker's own formats are in braces.
Commands are answered by the rule of plugins/module_utils/command_run.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from plugins.module_utils.command_run import answer_name
from tests.hosts.archive import initramfs
from tests.hosts.derived import context
from tests.hosts.described import DATA, Host


def build(host: Host, folder: Path) -> Path:
    """Write a host's tree into a new folder below ``folder`` and return it."""
    tree = _Tree(folder / host.name)
    names = context(host.values)
    for shape in shapes():
        for occasion in _occasions(shape, names):
            _write(tree, shape, occasion)
    return tree.root


@cache
def shapes() -> tuple[Mapping[str, Any], ...]:
    """Return every shape, each with the day its form is of (``as_of``)."""
    found: list[Mapping[str, Any]] = []
    for path in sorted((DATA / "shapes").glob("*.yml")):
        described = yaml.safe_load(path.read_text(encoding="utf-8"))
        found += [{**shape, "as_of": described["as_of"]} for shape in described["shapes"]]
    return tuple(found)


def _occasions(shape: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the names a shape is written with: once, once for each item and part, or not at all."""
    for key, item in _pairs(shape.get("each"), names):
        named = {**names, "key": key, "item": item}
        if "when" in shape and not _value(shape["when"], named):
            continue
        for part in _pairs(shape.get("parts"), named):
            yield {**named, "part": part}


def _pairs(expression: str | None, names: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a mapping, the pairs of a list of pairs, or the numbered items of another list."""
    if expression is None:
        return [(None, None)]
    items = _value(expression, names)
    if isinstance(items, Mapping):
        return list(items.items())
    return [tuple(item) if isinstance(item, list | tuple) else (number, item) for number, item in enumerate(items)]


class _Tree:
    """A folder that stands for a host's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: set[Path] = set()

    def place(self, absolute: str) -> Path:
        """Return where an absolute path of the host lies, its folder made."""
        path = self.root / absolute.lstrip("/")
        self.folder(path.parent)
        return path

    def folder(self, path: Path) -> None:
        """Make a folder, once."""
        if path not in self._made:
            path.mkdir(parents=True, exist_ok=True)
            self._made.add(path)

    def put(self, absolute: str, content: str | bytes) -> None:
        """Write a file."""
        self.place(absolute).write_bytes(content.encode() if isinstance(content, str) else content)


def _write(tree: _Tree, shape: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    if "command" in shape:
        _write_answer(tree, shape, names)
    elif "link" in shape:
        tree.place(_text(shape["link"], names)).symlink_to(_text(shape["to"], names))
    elif "folder" in shape:
        tree.folder(tree.root / _text(shape["folder"], names).lstrip("/"))
    elif "initramfs" in shape:
        text = _content(shape, names).encode()
        tree.put(_text(shape["file"], names), initramfs(_text(shape["initramfs"], names) if text else "", text))
    elif "size" in shape:
        place = tree.place(_text(shape["file"], names))
        place.touch()
        os.truncate(place, int(_text(shape["size"], names)))
    else:
        tree.put(_text(shape["file"], names), _content(shape, names))


def _write_answer(tree: _Tree, shape: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    name = f".commands/{answer_name(_text(shape['command'], names).split(' '))}"
    tree.put(name, _content(shape, names))
    for ending in ("rc", "stderr"):
        if ending in shape:
            tree.put(f"{name}.{ending}", _text(str(shape[ending]), names))


def _content(shape: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    if "output" in shape:
        return _environment().get_template(shape["output"]).render(names)
    return _text(shape["text"], names)


def _text(template: str, names: Mapping[str, Any]) -> str:
    return _template(template).render(names) if "<" in template else template


def _value(expression: str, names: Mapping[str, Any]) -> Any:
    return _expression(expression)(**names)


@cache
def _template(text: str) -> jinja2.Template:
    return _environment().from_string(text)


@cache
def _expression(text: str) -> Any:
    return _environment().compile_expression(text, undefined_to_none=False)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - the output of tools, not HTML
        loader=jinja2.FileSystemLoader(DATA / "output"),
    )
    environment.filters["json"] = json.dumps
    environment.filters["epoch"] = lambda moment: int(moment.timestamp())
    environment.filters["hex"] = lambda number, width: f"{number:0{width}x}"
    return environment
