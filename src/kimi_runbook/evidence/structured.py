"""Redaction of formats that are known: JSON, YAML, environments, command lines. Pure.

A document that cannot be read as what it should be (cut off, broken) is redacted as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import yaml

from kimi_runbook.environment import SECRET_OPTIONS
from kimi_runbook.evidence import rules
from kimi_runbook.evidence.public import private_hex
from kimi_runbook.evidence.text import Tag, named, redact_text, variable
from kimi_runbook.reading import plain

YAML_LIMIT = 1 << 19
"""Longest YAML that is read as YAML: parsing takes some 10 seconds a MiB."""

_ARGUMENTS = re.compile(r"(?i)^(?:args?|argv|cmd|command|cmdline|entrypoint|runtime_?args|healthcheck|test)$")
_USERS = re.compile(r"(?i)^(?:user|username|login|logname|owner)$")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=")
_VARIABLE_LINE = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_.]*)=(.*)", re.DOTALL)


class _Loader(yaml.SafeLoader):
    """SafeLoader that leaves dates as they are written."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def redact_json(text: str, tag: Tag) -> str:
    """Return a JSON document, or one document a line, with secrets hidden."""
    try:
        documents = [json.loads(text)]
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            documents = [json.loads(line) for line in lines]
        except ValueError:
            return redact_text(text, tag)
        return "\n".join(json.dumps(redact_value(document, tag)) for document in documents)
    return json.dumps(redact_value(documents[0], tag), indent=2)


def redact_yaml(text: str, tag: Tag) -> str:
    """Return a YAML stream with secrets hidden; order and meaning stay, comments and quotes do not."""
    if len(text) > YAML_LIMIT:
        return _named_values(redact_text(text, tag), tag)
    try:
        documents = [plain(document) for document in yaml.load_all(text, Loader=_Loader)]
    except yaml.YAMLError:
        return _named_values(redact_text(text, tag), tag)
    if not any(isinstance(document, dict | list) for document in documents):
        return redact_text(text, tag)
    return yaml.safe_dump_all([redact_value(item, tag) for item in documents], sort_keys=False, width=10_000)


def redact_environment(text: str, tag: Tag) -> str:
    """Return ``NAME=value`` entries, ended by a line's end or NUL, with every value hidden that may not be shown."""
    entries = text.split("\x00") if "\x00" in text else text.split("\n")
    found, shown = [], True
    for entry in entries:
        if not entry.strip() or entry.lstrip().startswith("#"):
            found.append(redact_text(entry, tag))
        elif match := _VARIABLE_LINE.fullmatch(entry):
            value = variable(match[1], match[2], tag)
            shown = value == match[2]
            found.append(entry[: match.start(2)] + value)
        elif shown:
            found.append(redact_text(entry, tag))
        else:  # a further line of a value that is hidden
            found.append(tag("value", entry))
    return "\n".join(found)


def redact_arguments(arguments: Sequence[object], tag: Tag) -> list[object]:
    """Return a command line with the values of secret options hidden."""
    found: list[object] = []
    option, many = "", False
    for argument in arguments:
        if not isinstance(argument, str):
            found.append(redact_value(argument, tag))
            continue
        name, equals, value = argument.partition("=")
        if re.fullmatch(r"--?[A-Za-z][\w-]*", name):
            option, many = name, name in SECRET_OPTIONS
            found.append(f"{name}={named(name, redact_text(value, tag), tag)}" if equals else argument)
        elif option in ("-e", "--env") and equals:
            found.append(f"{name}={variable(name, value, tag)}")
        elif option and rules.is_secret(option, argument):
            found.append(tag("secret", argument))
        else:
            found.append(redact_text(argument, tag))
        if not argument.startswith("-") and not many:
            option = ""
    return found


def redact_value(value: object, tag: Tag, key: str = "") -> object:
    """Return a JSON value with secrets hidden; the key it stands under says much about it."""
    if isinstance(value, dict):
        return _mapping(value, tag)
    if isinstance(value, list):
        return _sequence(value, tag, key)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return named(key, str(value), tag) if rules.is_secret(key, str(value)) else value
    return _text(str(value), tag, key)


def _mapping(value: dict[str, object], tag: Tag) -> dict[str, object]:
    name = value.get("name")
    if set(value) == {"name", "value"} and isinstance(name, str) and isinstance(value["value"], str):  # Kubernetes env
        return {"name": name, "value": variable(name, value["value"], tag)}
    return {redact_text(key, tag): redact_value(item, tag, key) for key, item in value.items()}


def _sequence(value: list[object], tag: Tag, key: str) -> list[object]:
    texts = [item for item in value if isinstance(item, str)]
    if key.lower() in ("env", "environment") and texts and all(_ASSIGNED.match(item) for item in texts):
        return [_variable(item, tag) if isinstance(item, str) else redact_value(item, tag) for item in value]
    if _ARGUMENTS.match(key) or any(item.startswith("--") for item in texts):
        return redact_arguments(value, tag)
    return [redact_value(item, tag, key) for item in value]


def _variable(entry: str, tag: Tag) -> str:
    name, _, value = entry.partition("=")
    return f"{name}={variable(name, value, tag)}"


def _text(value: str, tag: Tag, key: str) -> str:
    if rules.is_secret(key, value):
        return tag("secret", value)
    if _USERS.match(key) and re.fullmatch(r"[A-Za-z_][\w.@-]*", value) and not rules.is_account(value):
        return tag("user", value)
    if value[:1] in "{[" and value.strip()[-1:] in "}]":  # a document within, as kubectl's last-applied-configuration
        try:
            return json.dumps(redact_value(json.loads(value), tag))
        except ValueError:
            return redact_text(value, tag)
    if rules.is_public_key(key) and list(private_hex(value)):
        return _keeping_hex(value, tag)
    return redact_text(value, tag)


def _keeping_hex(value: str, tag: Tag) -> str:
    """Return a value below a key that says its hexadecimal numbers are public."""
    pieces, done = [], 0
    for start, end in private_hex(value):
        pieces += [redact_text(value[done:start], tag), value[start:end]]
        done = end
    return "".join(pieces) + redact_text(value[done:], tag)


def _named_values(text: str, tag: Tag) -> str:
    """Return YAML as text with the values of ``- name: X``, ``value: Y`` hidden, as Kubernetes writes variables."""

    def one(match: re.Match[str]) -> str:
        return match[1] + variable(match[2], match[3], tag)

    return re.sub(r"(- name: [\"']?([A-Za-z_]\w*)[\"']?\n[ \t]+value: )(.*)", one, text)
