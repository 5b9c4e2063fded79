"""Which environment variables and options may be read, compared and written down: an allow-list, and what is a secret.

The snapshot takes only the variables :func:`may_report` lets through, so only those may be compared; any other name
would differ for ever. The patterns stand in data/secrets.yml, and in plugins/module_utils/redaction.py as well,
since a node has no library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kimi_runbook.reading import data_file

_NAMES = data_file("secrets.yml").fields("names")

STEERING = re.compile(_NAMES.text("steering"))
"""Names that steer the engine; anything else could be a secret."""

SECRET = re.compile(_NAMES.text("secret"), re.IGNORECASE)
"""Names whose values are secrets; counts of tokens and TOKENIZERS_PARALLELISM are none."""

SECRET_OPTIONS = _NAMES.texts("options")
"""Options of ``vllm serve`` whose values are secrets. Source: vLLM 0.27.1 to 0.33, entrypoints, engine/arg_utils.py."""


def looks_secret(name: str) -> bool:
    """Return whether a variable's name says that its value is a secret."""
    return bool(SECRET.search(name))


def may_report(name: str) -> bool:
    """Return whether a variable's value may leave its host: it steers the engine and is no secret."""
    return bool(STEERING.fullmatch(name)) and not looks_secret(name)


def reportable(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be compared and written into a file, by name."""
    return {name: value for name, value in sorted(env.items()) if may_report(name)}


def shown(name: str, value: str | None) -> str:
    """Return a variable's value for a message: itself, ``unset``, or a word in place of what must not be shown."""
    if value is None:
        return "unset"
    return value if may_report(name) else "(not shown)"


def differing(actual: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Return the reportable names whose wanted value is not the actual one, sorted."""
    return tuple(name for name, value in reportable(wanted).items() if actual.get(name) != value)


def secret_options(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the options among the arguments whose values are secrets, sorted."""
    return tuple(sorted({argument.partition("=")[0] for argument in arguments} & set(SECRET_OPTIONS)))
