"""What the engine of this node answers now, and when that is by the clock on the wall.

Python's standard library alone: this runs on the node. No proxy of the environment is used, because the engine is
asked under its own address.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

# One sample of a gauge: name, labels and value, as the text exposition format writes them.
_SAMPLE = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (?P<value>\S+)", re.MULTILINE)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url, timeout_s):
    """Return status and body of a GET; raises OSError when there is no answer."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def refused(error):
    """Return whether an OSError says that nobody listens, which is another thing than no answer in time."""
    return isinstance(getattr(error, "reason", error), ConnectionRefusedError)


def requests_in_flight(exposition):
    """Return how many requests run or wait, over all engines of a metrics page; None where the page does not say."""
    values = [float(match["value"]) for match in _SAMPLE.finditer(exposition)]
    return int(sum(values)) if values else None


def why_no_good_answer(url, model, timeout_s):
    """Return an empty string when the engine is healthy and lists the model, else what it answered instead.

    No tokens are asked for: the acceptance looks at a service that has served nothing yet.
    """
    try:
        status, _ = get(f"{url}/health", timeout_s)
        if status != 200:
            return f"GET /health: HTTP {status}"
        status, body = get(f"{url}/v1/models", timeout_s)
        if status != 200:
            return f"GET /v1/models: HTTP {status}"
        served = [card["id"] for card in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return "GET /v1/models: no list of models"
    except OSError as error:
        return str(getattr(error, "reason", error))
    return "" if model in served else f"GET /v1/models: {', '.join(map(str, served)) or 'no model'}, not {model}"


def boot_of(proc="/proc"):
    """Return what differs from boot to boot: the kernel's id, and for containers the start of process 1."""
    try:
        kernel = Path(proc, "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(proc, "1/stat").read_text(encoding="utf-8", errors="replace")
        started = stat.rpartition(")")[2].split()[19]  # field 22; the name before may hold anything
    except (OSError, IndexError):
        return ""
    return f"{kernel} {started}"


def wall_time_of(monotonic_us):
    """Return the wall time of a moment that systemd tells as microseconds of this boot's monotonic clock."""
    return time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - monotonic_us / 1e6)
