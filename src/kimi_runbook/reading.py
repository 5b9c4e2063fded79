"""Typed reading of untrusted mappings and files: every wrong shape becomes one clear RunbookError."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import yaml

from kimi_runbook.errors import RunbookError


# PyYAML's parser in C, where it was built with one, reads the data files ten times as fast.
class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # a class either way
    """SafeLoader that refuses duplicate keys: in a lock the second one would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Build one mapping, failing with its line when a key occurs twice."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"the key {key!r} occurs twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        result: dict[object, object] = super().construct_mapping(node, deep=deep)
        return result


def read_text(path: Path) -> str:
    """Return the text of a file; RunbookError when it is missing, unreadable or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunbookError(
            where=str(path), observed="no such file", expected="a readable file", next_step="Check the path."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunbookError(
            where=str(path),
            observed=f"cannot be read ({error})",
            expected="a readable UTF-8 file",
            next_step="Check its permissions and its encoding.",
        ) from error


def parse_yaml(text: str, source: str) -> object:
    """Parse YAML (JSON is a subset); RunbookError with line and column when the syntax is wrong."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - _StrictLoader is a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        problem = " ".join(part for part in (error.context, error.problem) if part) or "malformed YAML"
        raise RunbookError(
            where=place, observed=problem, expected="well-formed YAML", next_step="Correct that line."
        ) from error
    except yaml.YAMLError as error:
        raise RunbookError(
            where=source, observed=str(error), expected="well-formed YAML", next_step="Correct the file."
        ) from error


def parse_json(text: str, source: str) -> object:
    """Parse JSON; RunbookError with line and column where the syntax is wrong, or beyond all measure."""
    try:
        parsed: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise RunbookError(
            where=f"{source}:{error.lineno}:{error.colno}",
            observed=error.msg,
            expected="well-formed JSON",
            next_step="Write the file again with the command that makes it.",
        ) from error
    except (RecursionError, ValueError) as error:  # nested or with numbers beyond all measure
        raise RunbookError(
            where=source,
            observed=f"cannot be parsed ({type(error).__name__})",
            expected="well-formed JSON",
            next_step="Write the file again with the command that makes it.",
        ) from error
    return parsed


def canonical_json(value: object) -> str:
    """Return the one JSON form used for digests: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest_of(value: object) -> str:
    """Return ``sha256:<hex>`` of the canonical JSON of a value."""
    return "sha256:" + hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


@cache
def data_file(name: str) -> Fields:
    """Return one of the package's YAML fact files, e.g. ``data_file("findings.yml")``."""
    text = resources.files("kimi_runbook").joinpath("data", name).read_text(encoding="utf-8")
    return Fields(parse_yaml(text, f"data/{name}"), f"data/{name}")


class Fields:
    """One mapping with the place it came from; each getter checks the type and names the place when it is wrong.

    A key that is absent and a key that is null read the same: None from the ``optional_`` getters, an error from
    the others.
    """

    def __init__(self, value: object, where: str, next_step: str = "Correct that field.") -> None:
        if not isinstance(value, Mapping):
            raise RunbookError(where=where, observed=describe(value), expected="a mapping", next_step=next_step)
        self._values: Mapping[object, object] = value
        self.where = where
        self._next_step = next_step

    def _wrong(self, key: str, expected: str) -> RunbookError:
        observed = describe(self._values[key]) if key in self._values else "absent"
        return RunbookError(
            where=f"{self.where}: {key}", observed=observed, expected=expected, next_step=self._next_step
        )

    def mapping(self) -> dict[str, object]:
        """Return the whole mapping as a dict, nested containers rebuilt as dict and list."""
        return {str(key): plain(value) for key, value in self._values.items()}

    def names(self) -> tuple[str, ...]:
        """Return the keys, in file order."""
        return tuple(str(key) for key in self._values)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise RunbookError when a key is not among the known ones."""
        unknown = [str(key) for key in self._values if key not in known]
        if unknown:
            raise RunbookError(
                where=self.where,
                observed=f"unknown key {', '.join(sorted(unknown))}",
                expected=f"only {', '.join(sorted(known))}",
                next_step="Remove it, or correct its spelling.",
            )

    def raw(self, key: str) -> object:
        """Return the value as it is, None when absent."""
        return self._values.get(key)

    def optional_text(self, key: str) -> str | None:
        """Return a string, or None."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            hint = " (quote it)" if isinstance(value, int | float) and not isinstance(value, bool) else ""
            raise self._wrong(key, f"a string{hint}")
        return value

    def text(self, key: str) -> str:
        """Return a string that is not empty."""
        value = self.optional_text(key)
        if not value or not value.strip():
            raise self._wrong(key, "a string that is not empty")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return an integer, or None."""
        value = self._values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str) -> float:
        """Return a number, whole or not."""
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def integer(self, key: str) -> int:
        """Return an integer."""
        value = self.optional_integer(key)
        if value is None:
            raise self._wrong(key, "an integer")
        return value

    def optional_flag(self, key: str) -> bool | None:
        """Return a boolean, or None."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean, the default when absent."""
        value = self.optional_flag(key)
        return default if value is None else value

    def optional_fields(self, key: str) -> Fields | None:
        """Return a nested mapping, or None."""
        value = self._values.get(key)
        return None if value is None else Fields(value, f"{self.where}: {key}", self._next_step)

    def fields(self, key: str) -> Fields:
        """Return a nested mapping."""
        nested = self.optional_fields(key)
        if nested is None:
            raise self._wrong(key, "a mapping")
        return nested

    def optional_sequence(self, key: str) -> Sequence[object] | None:
        """Return a list, or None."""
        value = self._values.get(key)
        if value is not None and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
            raise self._wrong(key, "a list")
        return value

    def each(self, key: str) -> tuple[Fields, ...]:
        """Return a list of mappings, empty when absent."""
        items = self.optional_sequence(key) or ()
        return tuple(Fields(item, f"{self.where}: {key}[{n}]", self._next_step) for n, item in enumerate(items))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty when absent."""
        items = self.optional_sequence(key) or ()
        if not all(isinstance(item, str) for item in items):
            raise self._wrong(key, "a list of strings")
        return tuple(str(item) for item in items)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers, empty when absent."""
        items = self.optional_sequence(key) or ()
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self._wrong(key, "a list of integers")
        return tuple(int(str(item)) for item in items)

    def text_map(self, key: str) -> dict[str, str]:
        """Return a mapping of strings to strings, empty when absent."""
        nested = self.optional_fields(key)
        return {} if nested is None else {name: nested.optional_text(name) or "" for name in nested.names()}

    def require_schema(self, version: int) -> None:
        """Raise RunbookError unless ``schema_version`` is the one this library reads."""
        if self._values.get("schema_version") != version:
            raise self._wrong("schema_version", str(version))


def plain(value: object) -> object:
    """Return the value with its mappings and lists rebuilt as dict and list.

    Callers may hand in lazy containers (Ansible does); encoders that bypass iteration would see their raw insides.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def describe(value: object) -> str:
    """Return a short description of a wrong value for a message."""
    if value is None:
        return "nothing"
    if isinstance(value, str | int | float | bool):
        text = repr(value)
        return text if len(text) <= 80 else text[:77] + "..."
    return {"dict": "a mapping", "list": "a list"}.get(type(value).__name__, f"a {type(value).__name__}")
