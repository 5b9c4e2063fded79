"""Reading single options out of an engine's command line."""

from __future__ import annotations

from collections.abc import Sequence


def option(args: Sequence[str], *names: str) -> str | None:
    """Return the value of an option, the last one given, under any of its names; None where it is not given.

    Both ``--name value`` and ``--name=value`` are read.
    """
    found = None
    for position, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else next(iter(args[position + 1 : position + 2]), None)
    return found


def count(args: Sequence[str], *names: str) -> int:
    """Return the whole number an option gives, 1 where it is not given or is no number."""
    value = option(args, *names)
    return int(value) if value is not None and value.isdigit() else 1
