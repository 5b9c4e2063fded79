"""Reads a frozen value object from JSON by its annotations: one declaration says name, type and what may be missing.

Fields nobody declared are ignored, since a newer module may report them; a declared one that is missing takes the
class's default, and one of the wrong type is a RunbookError that names the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kimi_runbook.reading import Fields, plain

Value = TypeVar("Value")
Reader = Callable[[Fields, str], Any]


def read(kind: type[Value], source: Fields) -> Value:
    """Return a value of a dataclass, its fields read by name.

    A field without a default is required. Annotations may be str, int, float, bool, object, another dataclass, a
    ``tuple[X, ...]`` or a ``Mapping[str, X]`` of those, each with ``| None``; null then says: it could not be told.

    Raises:
        RunbookError: a required field is missing, or a field is of the wrong type.
    """
    values: dict[str, object] = {}
    for one in _plan(kind):
        if source.raw(one.name) is not None or one.required:
            values[one.name] = one.reader(source, one.name)
        elif one.nullable and one.name in source.names():
            values[one.name] = None  # null was said: it could not be told, whatever the default
    return kind(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    name: str
    reader: Reader
    required: bool
    nullable: bool


_PLANS: dict[object, tuple[_Part, ...]] = {}


def _plan(kind: type[Any]) -> tuple[_Part, ...]:
    if kind not in _PLANS:
        _PLANS[kind] = _parts(kind)
    return _PLANS[kind]


def _parts(kind: type[Any]) -> tuple[_Part, ...]:
    hints = get_type_hints(kind)
    return tuple(
        _Part(
            name=field.name,
            reader=_reader(_without_none(hints[field.name])),
            required=field.default is MISSING and field.default_factory is MISSING,
            nullable=_without_none(hints[field.name]) is not hints[field.name],
        )
        for field in fields(kind)
    )


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    (inner,) = (part for part in get_args(hint) if part is not NoneType)
    return inner


def _reader(hint: Any) -> Reader:
    """Return what reads one annotation; TypeError for one nobody declared, which a test of every class would meet."""
    plain_types: dict[Any, Reader] = {
        str: lambda source, name: source.optional_text(name) if source.raw(name) is not None else source.text(name),
        int: Fields.integer,
        float: Fields.number,
        bool: lambda source, name: source.flag(name, False),
        object: lambda source, name: plain(source.raw(name)),
    }
    if hint in plain_types:
        return plain_types[hint]
    if is_dataclass(hint):
        return lambda source, name: read(hint, source.fields(name))  # type: ignore[arg-type]  # a class, not a value
    inner = get_args(hint)
    if get_origin(hint) is tuple:
        return _row_reader(inner[0])
    if get_origin(hint) is Mapping:
        return _mapping_reader(inner[1])
    raise TypeError(f"no reader for {hint}")


def _row_reader(hint: Any) -> Reader:
    if hint is str:
        return Fields.texts
    if hint is int:
        return Fields.integers
    return lambda source, name: tuple(read(hint, row) for row in source.each(name))


def _mapping_reader(hint: Any) -> Reader:
    inner = _without_none(hint)
    reader = _reader(inner)

    def every(source: Fields, name: str) -> dict[str, object]:
        nested = source.fields(name)
        return {key: None if nested.raw(key) is None else reader(nested, key) for key in nested.names()}

    def without_null(source: Fields, name: str) -> dict[str, object]:
        nested = source.fields(name)
        return {key: reader(nested, key) for key in nested.names()}

    return every if inner is not hint else without_null
