"""A kept connection: two requests over one, with a short pause between them.

HTTP/1.1 keeps a connection unless its end is announced. A server that closes it without a word cuts off whatever was
just sent over it, which looks like a failure of the engine: one Kimi K3 run died of that (InferenceX#2371). The client
of the other checks notices a close before it sends and takes a new connection, so it has to be looked for here.
"""

from __future__ import annotations

import selectors
import time

from kimi_runbook.acceptance.http import EngineError, job_for, longest_s, response
from kimi_runbook.acceptance.result import Check, verify
from kimi_runbook.acceptance.short_request.look import Look, settings
from kimi_runbook.acceptance.streaming.connection import Connection
from kimi_runbook.acceptance.streaming.driver import drive
from kimi_runbook.acceptance.streaming.exchange import Exchange
from kimi_runbook.acceptance.streaming.origin import Origin, split_url

_NAME = "keep-alive"
_PATH = "/version"
_EXPECTED = "the second answer over the first one's connection, or a connection whose end was announced"
_EVIDENCE = f"GET {_PATH} twice over one connection"
_NEXT = "Raise the keep-alive limit of the server or proxy that answers there (vLLM: VLLM_HTTP_TIMEOUT_KEEP_ALIVE)."


def check_keep_alive(look: Look) -> list[Check]:
    """Return whether the server keeps a connection it did not announce the end of."""
    plan = look.context.plan
    idle_s = settings().fields("keep_alive").number("idle_s")
    origin = Origin(plan.endpoint, plan.access)
    try:
        return [_twice(origin, split_url(plan.endpoint).path, idle_s)]
    except EngineError as error:
        return [look.failed(_NAME, error, expected=_EXPECTED, evidence=_EVIDENCE)]
    finally:
        origin.close()


def _twice(origin: Origin, prefix: str, idle_s: float) -> Check:
    first = _ask(origin, prefix)
    response(origin, first)
    if first.head is not None and not first.head.keep_alive:
        return _told(True, "the server announced that it closes the connection after each answer")
    connection = origin.take()
    closed_s = 0.0 if connection is None else closed_within(connection, idle_s)
    if connection is None or closed_s is not None:
        return _told(False, f"the connection was closed {closed_s or 0:.3f} s after an answer without announcing it")
    origin.give(connection)
    second = _ask(origin, prefix)
    response(origin, second)
    return _told(second.reused, f"{idle_s:g} s after its first answer the connection carried a second one")


def closed_within(connection: Connection, idle_s: float) -> float | None:
    """Return after how many seconds an idle connection was closed by the server, or None when it was not."""
    began_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while (left_s := began_s + idle_s - time.monotonic()) > 0:
            if selector.select(left_s) and not connection.alive():
                connection.close()
                return time.monotonic() - began_s
    return None


def _ask(origin: Origin, prefix: str) -> Exchange:
    """Send one request as it is: ``http.ask`` would try a GET again over a new connection."""
    job = job_for(origin, "GET", prefix + _PATH, None)
    return drive(origin, [job], concurrency=1, timeout_s=longest_s("without_model_s")).exchanges[0]


def _told(holds: bool, observed: str) -> Check:
    return verify(_NAME, holds, observed=observed, expected=_EXPECTED, evidence=_EVIDENCE, next_step=_NEXT)
