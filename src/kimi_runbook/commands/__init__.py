"""The commands of ``kimi-runbook``, one module each; a module dropped in here is a command.

A command module has ``register(commands)``, which adds its parser and sets ``run`` as the parser's default: a function
from the parsed arguments to the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import TypeAlias

# In quotes, because argparse makes its class generic for type checkers only.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What a command adds its parser to."""

FINE = 0
"""The answer is yes: accepted, same, nothing above a warning."""

NO = 1
"""The answer is no: rejected, drift, regression, a stop or failure found."""

UNUSABLE = 2
"""Wrong usage or unreadable input."""

INCONCLUSIVE = 3
"""The question could not be answered."""

CANCELLED = 130
"""Interrupted from the keyboard."""


def register_all(commands: Commands) -> None:
    """Let every command module add its parser, in alphabetical order."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{module.name}").register(commands)
    for parser in commands.choices.values():
        # A command's text is its module's, laid out as it stands there; the marks of code are for other readers.
        parser.description = (parser.description or "").replace("``", "").strip()
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
