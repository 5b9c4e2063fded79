"""The shape of a lock or a template by data/lock.schema.json: all wrong keys at once, each with its path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from kimi_runbook.errors import RunbookError
from kimi_runbook.lock.refusal import RESOLVE, refused
from kimi_runbook.reading import describe


@cache
def lock_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a lock; its ``$defs/template`` is that of a template."""
    text = resources.files("kimi_runbook").joinpath("data", "lock.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def check_shape(data: object, source: str, *, template: bool = False) -> None:
    """Raise one RunbookError about the first wrong key, which also counts and names the others.

    Args:
        data: The parsed file.
        source: Where it came from, for messages.
        template: Accept what ``lock resolve`` fills in to be absent.
    """
    found = list(shape_errors(data, source, template=template))
    if not found:
        return
    first, rest = found[0], found[1:]
    others = f" {len(rest)} more: {'; '.join(_short(error, source) for error in rest)}." if rest else ""
    raise RunbookError(
        where=first.where, observed=first.observed, expected=first.expected, next_step=first.next_step + others
    )


def shape_errors(data: object, source: str, *, template: bool = False) -> Iterator[RunbookError]:
    """Yield one error per wrong key, in the order of their paths."""
    errors = (leaf for error in _validator(template).iter_errors(data) for leaf in _leaves(error))
    unique = {
        (path, observed): (path, observed, expected) for error in errors for path, observed, expected in _told(error)
    }
    for path, observed, expected in sorted(unique.values()):
        yield refused(source, path, observed, expected, RESOLVE)


def _short(error: RunbookError, source: str) -> str:
    return f"{error.where.removeprefix(source).removeprefix(': ')} is {error.observed}"


@cache
def _validator(template: bool) -> Draft202012Validator:
    schema = lock_schema()
    return Draft202012Validator({"$ref": "#/$defs/template", "$defs": schema["$defs"]} if template else schema)


def _leaves(error: ValidationError) -> Iterator[ValidationError]:
    """Yield the errors below allOf; a oneOf stands for itself, since its own description says what is expected."""
    if error.validator == "allOf":
        for cause in error.context or ():
            yield from _leaves(cause)
    else:
        yield error


def _told(error: ValidationError) -> Iterator[tuple[str, str, str]]:
    """Yield path, observed and expected of one schema error."""
    path, schema = list(error.absolute_path), error.schema if isinstance(error.schema, Mapping) else {}
    if error.validator == "required" and isinstance(error.instance, Mapping):
        for name in schema["required"]:
            if name not in error.instance:
                yield _dotted([*path, name]), "absent", _description([*path, name])
    elif error.validator == "additionalProperties" and isinstance(error.instance, Mapping):
        known = schema.get("properties", {})
        for name in error.instance:
            if name not in known:
                yield _dotted([*path, name]), "unknown key", f"only {', '.join(sorted(known))}"
    else:
        quote = " (quote it)" if isinstance(error.instance, int | float) and "string" in _types(schema) else ""
        yield _dotted(path), describe(error.instance), f"{_description(path)}{quote}"


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def _dotted(path: list[Any]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _description(path: list[Any]) -> str:
    """Return what the schema says is expected at a path."""
    definitions: dict[str, Any] = lock_schema()["$defs"]
    node: dict[str, Any] = definitions["template"]
    for step in path:
        if isinstance(step, int):
            below = node.get("items", {})
        else:
            below = node.get("properties", {}).get(step) or node.get("additionalProperties") or {}
        node = below if isinstance(below, dict) else {}
        if "description" not in node and "$ref" in node:
            node = definitions[str(node["$ref"]).rpartition("/")[2]]
    return str(node.get("description", "what the schema of a lock allows"))
