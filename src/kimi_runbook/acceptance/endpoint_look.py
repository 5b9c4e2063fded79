"""The first questions to an endpoint nobody vouched for: does it let us in, is it vLLM, what does it serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kimi_runbook.acceptance import metrics
from kimi_runbook.acceptance.client import EngineClient, longest_of
from kimi_runbook.acceptance.endpoint import Options, Seen
from kimi_runbook.acceptance.http import (
    BadAnswerError,
    BadStatusError,
    ConnectionDroppedError,
    EngineError,
    TimedOutError,
    TruncatedError,
    longest_s,
)
from kimi_runbook.acceptance.metrics import Reading
from kimi_runbook.errors import RunbookError

_BASE_URL = "Give the base URL of vLLM's own API server, e.g. http://host:8000; a router often passes /v1 only."
_METRICS_URL = "Name the metrics of every API server: --metrics URL, once for each; a router's are not the engine's."


def look(options: Options) -> Seen:
    """Return what the endpoint says of itself; three GET requests, none of which reaches the model.

    Args:
        options: As ``endpoint.checked`` returned them.

    Raises:
        RunbookError: When there is no answer, no leave to ask, or it is not vLLM.
    """
    client = EngineClient(options.endpoint, timeout_s=longest_s("look_s"), access=options.access)
    cards = _ask(client, "/v1/models", options).get("data")
    version = _ask(client, "/version", options).get("version")
    if not isinstance(cards, list):
        raise _not_vllm(f"GET {client.endpoint}/v1/models", "JSON without a list of models in data")
    if not isinstance(version, str):
        raise _not_vllm(f"GET {client.endpoint}/version", "JSON without a version")
    models = tuple(str(card["id"]) for card in cards if isinstance(card, dict) and card.get("id"))
    engines, problem = _engines(options)
    named = [card for card in cards if isinstance(card, dict) and card.get("id")]
    longest = {str(card["id"]): tokens for card in named if (tokens := longest_of(card)) is not None}
    return Seen(models=models, version=version, engines=engines, metrics_problem=problem, longest=longest)


def engines_reporting(reading: Reading) -> int:
    """Return how many engines show counters."""
    return reading.engine_count


def _ask(client: EngineClient, path: str, options: Options) -> Mapping[str, Any]:
    """Return the JSON object at a path; raises RunbookError."""
    where = f"GET {client.endpoint}{path}"
    try:
        response = client.raw("GET", path)
    except EngineError as error:
        raise _no_answer(error) from error
    if not 200 <= response.status < 300:
        raise _bad_status(where, response.status, options, location=response.headers.get("location", ""))
    try:
        value = json.loads(response.body)
    except ValueError:
        kind = response.headers.get("content-type", "").partition(";")[0] or "text without a content type"
        raise _not_vllm(where, f"{kind}, no JSON") from None
    if not isinstance(value, dict):
        raise _not_vllm(where, f"a JSON {type(value).__name__}")
    return value


def _engines(options: Options) -> tuple[int | None, str]:
    """Return the number of engines that report, or None and what their metrics answered.

    Metrics that answer 5xx are a fault of the engine (vllm#49983 is one cause), which the chain names and records; any
    other way not to have them means that the URL is not the right one.
    """
    try:
        reading = metrics.read(options.metrics, timeout_s=longest_s("look_s"), access=options.access)
    except BadStatusError as error:
        if error.status >= 500:
            return None, f"HTTP {error.status}"
        raise _bad_status(error.where, error.status, options, next_step=_METRICS_URL) from error
    except BadAnswerError as error:
        raise _no_metrics(error.where, error.detail) from error
    except EngineError as error:
        raise _no_answer(error) from error
    for exposition in reading.expositions:
        if not any(family.startswith("vllm:") for family in exposition.types):
            raise _no_metrics(f"GET {exposition.url}", f"{len(exposition.types)} metric families, none of them vLLM's")
    return engines_reporting(reading), ""


def _no_answer(error: EngineError) -> RunbookError:
    """Return what to do about a connection that did not come about; a certificate is told from a closed port."""
    expected, next_step = (
        "a connection",
        "Check host and port from this machine with curl; a proxy is named by --proxy.",
    )
    if isinstance(error, TimedOutError):
        expected = f"an answer within {longest_s('look_s'):g} s"
        next_step = "Ask from this machine: curl -sS --max-time 10 on that URL; a firewall drops silently."
    elif isinstance(error, ConnectionDroppedError):
        expected, next_step = "an answer", "Compare http:// with what the port speaks: a port with TLS hangs up."
    elif isinstance(error, BadAnswerError | TruncatedError):
        expected, next_step = "an answer as HTTP and vLLM write it", _BASE_URL
    elif "certificate" in error.detail or "TLS" in error.detail:
        expected = "TLS with a certificate this machine trusts"
        next_step = "Compare host name, --ca-file and https:// with what the server has."
    return RunbookError(where=error.where, observed=error.detail, expected=expected, next_step=next_step)


def _bad_status(
    where: str, status: int, options: Options, *, location: str = "", next_step: str = _BASE_URL
) -> RunbookError:
    """Return what to do about a status outside 2xx. The body is not shown: it may repeat the key."""
    observed = f"HTTP {status}"
    if status in (401, 403):
        name = options.access.api_key_env
        next_step = (
            f"The key in {name} is not taken: check its value."
            if name
            else "Put the key into an environment variable and name it: --api-key-env VARIABLE."
        )
    elif 300 <= status < 400:
        observed += f" to {location}" if location else ""
        next_step = "Give the URL it leads to; redirects are not followed."
    elif status >= 500:
        next_step = "Wait until the service answers here, or read its log."
    return RunbookError(where=where, observed=observed, expected="HTTP 200", next_step=next_step)


def _no_metrics(where: str, observed: str) -> RunbookError:
    return RunbookError(where=where, observed=observed, expected="vLLM's metrics", next_step=_METRICS_URL)


def _not_vllm(where: str, observed: str) -> RunbookError:
    return RunbookError(where=where, observed=observed, expected="a vLLM API server", next_step=_BASE_URL)
