"""A site's own step beside a drain: one request, or one program. Secrets stay in the environment."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, plain

_KEYS = ("url", "method", "headers_env", "body", "status", "command", "timeout_s")
_STATUS = (200, 201, 202, 204)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """What a site wants to be called.

    Attributes:
        name: The inventory's variable, for messages.
        url: Address of a request; empty where a program is run.
        method: Method of the request.
        headers_env: Header to the name of the environment variable that holds its value.
        body: JSON body of the request; None for none.
        status: Statuses that mean it was done.
        command: Program with its arguments; empty where a request is sent.
        timeout_s: Seconds it may take.
    """

    name: str
    url: str = ""
    method: str = "POST"
    headers_env: Mapping[str, str] = field(default_factory=dict)
    body: object = None
    status: Sequence[int] = _STATUS
    command: Sequence[str] = ()
    timeout_s: float = 30.0

    @property
    def what(self) -> str:
        """The call in words, without any value of a header."""
        return f"{self.method} {self.url}" if self.url else " ".join(self.command)


def parse_hook(value: object, name: str) -> Hook:
    """Read a hook of the inventory; RunbookError when it is neither a request nor a program."""
    fields = Fields(value, name, f"Correct {name} in the inventory.")
    fields.refuse_unknown(_KEYS)
    url, command = fields.optional_text("url") or "", fields.texts("command")
    if bool(url) == bool(command):
        raise RunbookError(
            where=name,
            observed="url and command" if url else "neither url nor command",
            expected="one of the two",
            next_step=f"Correct {name} in the inventory.",
        )
    return Hook(
        name=name,
        url=url,
        method=(fields.optional_text("method") or "POST").upper(),
        headers_env=fields.text_map("headers_env"),
        body=plain(fields.raw("body")),
        status=fields.integers("status") or _STATUS,
        command=command,
        timeout_s=fields.number("timeout_s") if fields.raw("timeout_s") is not None else 30.0,
    )


def call(hook: Hook, environment: Mapping[str, str]) -> str:
    """Make the call and return what came of it in a few words; RunbookError when it was not done."""
    return _send(hook, environment) if hook.url else _run(hook, environment)


def _send(hook: Hook, environment: Mapping[str, str]) -> str:
    unset = sorted(variable for variable in hook.headers_env.values() if not environment.get(variable))
    if unset:
        raise _failed(
            hook,
            f"{', '.join(unset)} is not set on the controller",
            "the header's value there",
            "Set it in the environment of ansible-playbook",
        )
    headers = {header: environment[variable] for header, variable in hook.headers_env.items()}
    data = None if hook.body is None else json.dumps(hook.body).encode()
    if data is not None:
        headers.setdefault("Content-Type", "application/json")
    request = urllib.request.Request(hook.url, data=data, headers=headers, method=hook.method)  # noqa: S310 - the inventory's
    try:
        with urllib.request.urlopen(request, timeout=hook.timeout_s) as answer:  # noqa: S310 - as above
            status = answer.status
    except urllib.error.HTTPError as error:
        with error:
            status = error.code
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise _failed(
            hook, str(reason), "an answer", "See whether the address is reached from the controller"
        ) from None
    if status not in hook.status:
        wanted = " or ".join(map(str, hook.status))
        raise _failed(hook, f"HTTP {status}", wanted, "Read the log of what was asked")
    return f"HTTP {status}"


def _run(hook: Hook, environment: Mapping[str, str]) -> str:
    next_step = "Run it by hand on the controller"
    try:
        done = subprocess.run(
            list(hook.command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # not shown: it may have been handed a secret
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=hook.timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise _failed(hook, f"no end after {hook.timeout_s:g} s", "one (timeout_s)", next_step) from None
    except OSError as error:
        raise _failed(hook, str(error.strerror), "a program", next_step) from None
    if done.returncode != 0:
        raise _failed(hook, f"exit {done.returncode}", "0", next_step)
    return "exit 0"


def _failed(hook: Hook, observed: str, expected: str, next_step: str) -> RunbookError:
    return RunbookError(
        where=f"{hook.name} ({hook.what})",
        observed=observed,
        expected=expected,
        next_step=f"{next_step}, then run again.",
    )
