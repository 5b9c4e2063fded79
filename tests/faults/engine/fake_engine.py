"""An HTTP server that speaks as much of vLLM's API and metrics as the chain asks for, and can be told to fail.

The prefix cache is a real block model of an attention-only engine: a block is known by the tokens up to its end, a hit
is whole blocks from the start and never the last token. One byte of text is one token, as with the lab's model.
"""

from __future__ import annotations

import json
import threading
import time
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

MODEL = "moonshotai/Kimi-K3"
VERSION = "0.32.0"


class Fault(StrEnum):
    """One way to misbehave."""

    HITS_ZERO = "the cache never hits"
    COUNTERS_FROZEN = "answers carry hits, counters stand still"
    CACHED_TOKENS_MISSING = "answers do not carry cached_tokens"
    CACHED_TOKENS_WRONG = "answers carry one block too few"
    CACHING_OFF = "prefix caching is off"
    RECURRENT = "recurrent state is cached too"
    GEOMETRY_ABSENT = "no cache_config_info, as with the Rust front end"
    BLOCK_TOO_LARGE = "a block is longer than the context"
    SECOND_ENGINE = "a second engine reports"
    RESTART_IN_WINDOW = "counters and start time begin anew after a request"
    OTHER_TRAFFIC = "someone else's request runs beside each of ours"
    METRICS_500 = "/metrics answers 500"
    METRICS_TEXT = "/metrics answers a page"
    STREAM_CUT = "a stream ends without [DONE]"
    ERROR_IN_200 = "an error inside a 200"
    NO_STREAM_USAGE = "a stream without usage"
    USAGE_WRONG = "usage does not add up"
    EMPTY_ANSWER = "an answer without text"
    FINISH_ERROR = "finish_reason error"
    BAD_REQUEST_ACCEPTED = "any model name and max_tokens are accepted"
    REFUSAL_WITHOUT_BODY = "bad requests are refused without an OpenAI error body"
    UNHEALTHY = "/health answers 503"
    PREEMPTS = "requests are preempted"
    CACHE_FULL = "the KV cache is nearly full"
    TEMPLATE_DIFFERS = "/tokenize renders a chat differently from the chat route"


class FakeEngine:
    """The server; use it as a context manager, ``url`` is its base URL."""

    def __init__(self, *faults: Fault, block_size: int = 64, version: str = VERSION, openmetrics: bool = False) -> None:
        self.faults = set(faults)
        self.block_size = 100_000 if Fault.BLOCK_TOO_LARGE in self.faults else block_size
        self.version = version
        self.openmetrics = openmetrics
        self.max_model_len = 4096
        self.token_delay_s = 0.01
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.start_engine()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"engine": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def start_engine(self) -> None:
        """Begin with an empty cache and counters at zero, as a new process does."""
        self.started = time.time()
        self.blocks: set[tuple[int, ...]] = set()
        self.counters = {"queries": 0, "hits": 0, "preemptions": 0, "length": 0, "error": 0}
        self.running = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def render(self, messages: list[dict[str, Any]], *, for_tokenize: bool = False) -> list[int]:
        """Return a chat's tokens: ids above 255 begin and end a message."""
        tokens: list[int] = [300] if for_tokenize and Fault.TEMPLATE_DIFFERS in self.faults else []
        for message in messages:
            tokens += [256, *message["role"].encode(), 10, *str(message["content"]).encode(), 257]
        return [*tokens, 256, *b"assistant", 10]

    def look_up(self, tokens: list[int]) -> int:
        """Return the tokens the cache supplies for a prompt, count them, and keep the prompt's blocks."""
        size, cached = self.block_size, 0
        ends = range(size, len(tokens) + 1, size)
        with self.lock:
            for end in ends:
                if end > len(tokens) - 1 or tuple(tokens[:end]) not in self.blocks:
                    break
                cached = end
            if {Fault.HITS_ZERO, Fault.CACHING_OFF} & self.faults:
                cached = 0
            self.blocks |= {tuple(tokens[:end]) for end in ends}
            if Fault.COUNTERS_FROZEN not in self.faults:
                self.counters["hits"] += cached
            self.counters["queries"] += len(tokens)
            if Fault.OTHER_TRAFFIC in self.faults:
                self.counters["queries"] += 50
            self.counters["preemptions"] += Fault.PREEMPTS in self.faults
        return cached

    def metrics(self) -> str:
        """Return the exposition; OpenMetrics when asked for."""
        labels = f'engine="0",model_name="{MODEL}"'
        suffix = "" if self.openmetrics else "_total"
        c = self.counters
        lines = [
            *("# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {self.started}"),
            f"# TYPE vllm:prefix_cache_queries{suffix} counter",
            f"vllm:prefix_cache_queries_total{{{labels}}} {c['queries']}",
            f"# TYPE vllm:prefix_cache_hits{suffix} counter",
            *([f"vllm:prefix_cache_hits_total{{{labels}}} {c['hits']}"] if c["hits"] or not self.openmetrics else []),
            f"# TYPE vllm:num_preemptions{suffix} counter",
            f"vllm:num_preemptions_total{{{labels}}} {c['preemptions']}",
            f"# TYPE vllm:request_success{suffix} counter",
            *(f'vllm:request_success_total{{{labels},finished_reason="{r}"}} {c[r]}' for r in ("length", "error")),
            *("# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running{{{labels}}} {self.running}"),
            "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc{{{labels}}} {0.97 if Fault.CACHE_FULL in self.faults else 0.02}",
        ]
        if Fault.SECOND_ENGINE in self.faults:
            second = labels.replace('engine="0"', 'engine="1"')
            lines.insert(4, f"vllm:prefix_cache_queries_total{{{second}}} 0")
        if Fault.GEOMETRY_ABSENT not in self.faults:
            caching = Fault.CACHING_OFF not in self.faults
            mode = "align" if Fault.RECURRENT in self.faults else "none"
            told = f'block_size="{self.block_size}",enable_prefix_caching="{caching}",mamba_cache_mode="{mode}"'
            more = 'num_gpu_blocks="4096",prefix_cache_retention_interval="0"'
            lines += ["# TYPE vllm:cache_config_info gauge", f'vllm:cache_config_info{{engine="0",{told},{more}}} 1.0']
        return "\n".join([*lines, *(["# EOF"] if self.openmetrics else [])]) + "\n"


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the tests read answers, not this server's log."""

    def do_GET(self) -> None:
        engine = self.engine
        card = {"id": MODEL, "object": "model", "max_model_len": engine.max_model_len}
        if self.path == "/health":
            self._send(503 if Fault.UNHEALTHY in engine.faults else 200, b"")
        elif self.path == "/version":
            self._json(200, {"version": engine.version})
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [card]})
        elif self.path == "/metrics" and Fault.METRICS_500 in engine.faults:
            self._send(500, b"Internal Server Error")
        elif self.path == "/metrics" and Fault.METRICS_TEXT in engine.faults:
            self._send(200, b"<html>a router's page</html>\n", "text/html")
        elif self.path == "/metrics":
            kind = "application/openmetrics-text; version=1.0.0" if engine.openmetrics else "text/plain; version=1.0.0"
            self._send(200, engine.metrics().encode(), kind)
        else:
            self._error(404, f"no route {self.path}")

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            tokens = engine.render(body["messages"], for_tokenize=True)
            self._json(200, {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens})
            return
        engine.requests.append(body)
        lenient = Fault.BAD_REQUEST_ACCEPTED in engine.faults
        if body["model"] != MODEL and not lenient:
            self._error(404, f"The model `{body['model']}` does not exist.")
        elif body.get("max_tokens", 1) < 1 and not lenient:
            self._error(400, "max_tokens must be at least 1.")
        elif Fault.ERROR_IN_200 in engine.faults:
            self._json(200, {"error": {"message": "the engine is dead", "code": 500}})
        else:
            self._answer(body, chat=self.path.endswith("/chat/completions"))

    def _answer(self, body: dict[str, Any], *, chat: bool) -> None:
        engine = self.engine
        tokens = engine.render(body["messages"]) if chat else list(str(body["prompt"]).encode())
        with engine.lock:
            engine.running += 1
        cached = engine.look_up(tokens)
        count = max(1, body.get("max_tokens", 16))
        usage = self._usage(len(tokens), count, cached)
        piece = "" if Fault.EMPTY_ANSWER in engine.faults else "x"
        reason = "error" if Fault.FINISH_ERROR in engine.faults else "length"
        try:
            if body.get("stream"):
                self._stream(piece, count, reason, usage)
            else:
                time.sleep(engine.token_delay_s * count)
                text = piece * count
                choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
                self._json(200, {"choices": [{"index": 0, **choice, "finish_reason": reason}], "usage": usage})
        finally:
            with engine.lock:
                engine.running -= 1
                engine.counters["length"] += 1
                if Fault.RESTART_IN_WINDOW in engine.faults:
                    engine.start_engine()
                    engine.started += 1

    def _usage(self, prompt: int, completion: int, cached: int) -> dict[str, Any]:
        faults = self.engine.faults
        total = prompt + completion + (Fault.USAGE_WRONG in faults)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
        if Fault.CACHED_TOKENS_MISSING not in faults:
            short = self.engine.block_size if Fault.CACHED_TOKENS_WRONG in faults and cached else 0
            usage["prompt_tokens_details"] = {"cached_tokens": cached - short}
        return usage

    def _stream(self, piece: str, count: int, reason: str, usage: dict[str, Any]) -> None:
        faults = self.engine.faults
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number in range(count):
            time.sleep(self.engine.token_delay_s)
            if Fault.STREAM_CUT in faults and number == count // 2:
                self.close_connection = True
                return
            last = reason if number == count - 1 else None
            self._event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": last}]})
        if Fault.NO_STREAM_USAGE not in faults:
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _error(self, status: int, message: str) -> None:
        if Fault.REFUSAL_WITHOUT_BODY in self.engine.faults:
            self._send(status, b"<html>Bad Request</html>", "text/html")
        else:
            self._json(status, {"error": {"message": message, "type": "BadRequestError", "code": status}})

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
