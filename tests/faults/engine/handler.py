"""The fake engine's HTTP side: routes, refusals, whole answers and streams, and the faults that show in them."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from tests.faults.engine import answers
from tests.faults.engine.faults import Fault

if TYPE_CHECKING:
    from tests.faults.engine.fake_engine import FakeEngine

# as PyTorch writes it
_OOM = "CUDA out of memory. Tried to allocate 1.60 GiB. GPU 0 has a total capacity of 139.80 GiB"
_REFUSES_TOOLS = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
_REFUSES_IMAGES = "At most 0 image(s) may be provided in one prompt."


class RefusalError(Exception):
    """A request that gets an error status and an error body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """One connection, kept alive as HTTP/1.1 promises."""

    engine: FakeEngine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.engine.opened(self.connection)

    def finish(self) -> None:
        self.engine.closed(self.connection)
        super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the tests read answers, not this server's log."""

    def do_GET(self) -> None:
        engine = self.engine
        if self.path == "/health" and Fault.HEALTH_KEPT in engine.faults:
            self._send(403, b"Forbidden")
        elif self.path == "/health":
            self._send(200 if engine.healthy else 503, b"")
        elif self.path == "/version":
            told = self.headers.get("Authorization", "") if Fault.KEY_REPEATED in engine.faults else ""
            self._json(200, {"version": engine.version + told})
        elif self.path == "/v1/models":
            card = {"id": engine.model, "object": "model", "max_model_len": engine.max_model_len}
            self._json(200, {"object": "list", "data": [card]})
        elif self.path == "/metrics":
            self._metrics()
        else:
            self._error(404, f"no route {self.path}")

    def _metrics(self) -> None:
        engine = self.engine
        if Fault.METRICS_500 in engine.faults:
            self._send(500, b"Internal Server Error")
        elif Fault.METRICS_TEXT in engine.faults:
            self._send(200, b"<html>a router's page</html>\n", "text/html")
        else:
            kind = "application/openmetrics-text; version=1.0.0" if engine.openmetrics else "text/plain; version=1.0.0"
            self._send(200, engine.metrics().encode(), kind)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            body = json.loads(raw)
        except ValueError as error:
            self._error(400, f"Invalid JSON: {error}")
            return
        try:
            if self.path == "/tokenize":
                self._tokenize(body)
            else:
                self._complete(body, chat=self.path.endswith("/chat/completions"))
        except RefusalError as refusal:
            self._error(refusal.status, str(refusal))

    def _tokenize(self, body: dict[str, Any]) -> None:
        if Fault.TOKENIZE_KEPT in self.engine.faults:
            raise RefusalError(404, "Not Found")
        tokens = answers.render(body, extra=Fault.TEMPLATE_DIFFERS in self.engine.faults)
        self._json(200, {"count": len(tokens), "max_model_len": self.engine.max_model_len, "tokens": tokens})

    def _complete(self, body: dict[str, Any], *, chat: bool) -> None:
        engine = self.engine
        with engine.lock:
            engine.requests.append(body)
            first = len(engine.requests) == 1
        if Fault.PEER_KILLED in engine.faults:
            if first:
                engine.stopping.wait(engine.hang_s)
            raise RefusalError(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        self._refuse_bad(body, chat)
        tokens = self._tokens(body, chat)
        if Fault.ERROR_IN_200 in engine.faults:
            self._json(200, {"error": {"message": "the engine is dead", "code": 500}})
            return
        if Fault.COMPLETIONS_BROKEN in engine.faults and not chat:
            raise RefusalError(500, "Internal server error")
        with engine.seat():
            self._run(body, tokens, chat=chat)

    def _tokens(self, body: dict[str, Any], chat: bool) -> list[int]:
        if not chat:
            return answers.prompt_tokens(body["prompt"])
        return answers.render(body, drop_images=Fault.IMAGE_DROPPED in self.engine.faults)

    def _refuse_bad(self, body: dict[str, Any], chat: bool) -> None:
        engine = self.engine
        if Fault.BAD_REQUEST_ACCEPTED not in engine.faults:
            if body["model"] != engine.model:
                raise RefusalError(404, f"The model `{body['model']}` does not exist.")
            if body.get("max_tokens", 1) < 1:
                raise RefusalError(400, f"max_tokens must be at least 1, got {body['max_tokens']}.")
            asked = len(self._tokens(body, chat)) + body.get("max_tokens", 16)
            if engine.max_model_len is not None and asked > engine.max_model_len:
                told = f"This model's maximum context length is {engine.max_model_len} tokens, you requested {asked}."
                raise RefusalError(400, told)
        if body.get("tools") and Fault.TOOLS_LIMITED in engine.faults:
            raise RefusalError(429, "rate limit exceeded")
        if body.get("tools") and Fault.REFUSAL_UNPRINTABLE in engine.faults:
            raise RefusalError(400, "no \x1b[2Jtools \ud800")
        if body.get("tools") and Fault.TOOLS_REFUSED in engine.faults:
            raise RefusalError(400, _REFUSES_TOOLS)
        pictures = answers.images(body)
        if pictures and Fault.IMAGE_REFUSED in engine.faults:
            raise RefusalError(400, _REFUSES_IMAGES)
        if not all(map(answers.is_png, pictures)):
            raise RefusalError(400, "cannot identify image file")

    def _run(self, body: dict[str, Any], tokens: list[int], *, chat: bool) -> None:
        engine = self.engine
        late_s = engine.first_token_s()
        if engine.out_of_memory:
            engine.finished("error", 0)
            raise RefusalError(500, _OOM)
        cached = engine.look_up(tokens)
        count = max(1, body.get("max_tokens", 16))
        reason, deltas = self._answer(body, count)
        count = min(count, len(deltas))
        usage = self._usage(len(tokens), count, cached)
        ended = "abort"
        try:
            time.sleep(late_s)
            if body.get("stream"):
                self._stream(deltas, reason, usage, chat=chat)
            else:
                time.sleep(engine.token_delay_s * count)
                self._whole(deltas, reason, usage, chat=chat)
            ended = reason if reason in engine.counters else "stop"
        finally:
            engine.finished(ended, count)

    def _answer(self, body: dict[str, Any], count: int) -> tuple[str, list[dict[str, Any]]]:
        """Return the finish reason and the answer in pieces, as a chat's deltas."""
        faults = self.engine.faults
        if body.get("tools") and body.get("tool_choice") != "none":
            return "tool_calls", self._tool_call(body["tools"][0])
        piece = "" if Fault.EMPTY_ANSWER in faults else "x"
        asked = answers.thinks(body) and Fault.REASONING_ABSENT not in faults
        reason = "error" if Fault.FINISH_ERROR in faults else "length"
        if asked or (Fault.REASONING_ALWAYS in faults and "messages" in body):
            key = "content" if Fault.REASONING_LEAKS in faults else "reasoning"
            half = count // 2
            closing = [{"content": answers.THINK_CLOSE}] if Fault.REASONING_LEAKS in faults else []
            return reason, [{key: "hm"}] * half + closing + [{"content": piece}] * (count - half)
        return reason, [{"content": piece}] * count

    def _tool_call(self, tool: dict[str, Any]) -> list[dict[str, Any]]:
        faults = self.engine.faults
        if Fault.TOOL_CALL_EMPTY in faults:
            return [{"content": "I would call it"}]
        told = answers.tool_arguments(tool, wrong_type=Fault.TOOL_CALL_WRONG_TYPE in faults)
        if Fault.TOOL_CALL_MALFORMED in faults:
            told = told[:-1]
        call = {"index": 0, "id": "call-1", "type": "function"}
        head = {"tool_calls": [call | {"function": {"name": tool["function"]["name"], "arguments": ""}}]}
        middle = len(told) // 2
        return [
            head,
            *(
                {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
                for part in (told[:middle], told[middle:])
            ),
        ]

    def _usage(self, prompt: int, completion: int, cached: int) -> dict[str, Any]:
        faults = self.engine.faults
        total = prompt + completion + (Fault.USAGE_WRONG in faults)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
        if Fault.CACHED_TOKENS_NULL in faults:
            usage["prompt_tokens_details"] = {"cached_tokens": None}
        elif Fault.CACHED_TOKENS_MISSING not in faults:
            short = self.engine.block_size if Fault.CACHED_TOKENS_WRONG in faults and cached else 0
            usage["prompt_tokens_details"] = {"cached_tokens": cached - short}
        return usage

    def _whole(self, deltas: list[dict[str, Any]], reason: str, usage: dict[str, Any], *, chat: bool) -> None:
        text = "".join(delta.get("content", "") for delta in deltas)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": _joined_calls(deltas)}
            if Fault.TOOL_CALL_OBJECT in self.engine.faults:
                for call in choice["message"]["tool_calls"]:
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            choice["message"]["reasoning"] = "".join(delta.get("reasoning", "") for delta in deltas) or None
        else:
            choice["text"] = text
        self._json(200, {"choices": [choice], "usage": usage})

    def _stream(self, deltas: list[dict[str, Any]], reason: str, usage: dict[str, Any], *, chat: bool) -> None:
        faults = self.engine.faults
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if Fault.TOOL_STREAM_BROKEN in faults and "tool_calls" in deltas[-1]:
            deltas = deltas[:-1]
        held: list[dict[str, Any]] = []
        for number, delta in enumerate(deltas):
            time.sleep(self.engine.token_delay_s)
            if number == len(deltas) // 2 and Fault.STREAM_CUT in faults:
                self.close_connection = True
                return
            if number == len(deltas) // 2 and Fault.STALL in faults:
                self.engine.stopping.wait(self.engine.hang_s)
                self.close_connection = True
                return
            last = reason if number == len(deltas) - 1 else None
            piece = {"delta": delta} if chat else {"text": delta.get("content", "")}
            held.append({"choices": [{"index": 0, **piece, "finish_reason": last}]})
            if Fault.STREAM_BUFFERED not in faults:
                self._event(held.pop())
        tail = [] if Fault.NO_STREAM_USAGE in faults else [{"choices": [], "usage": usage}]
        self._raw(b"".join(map(_sse, [*held, *tail])) + b"data: [DONE]\n\n")
        self._raw(b"")
        self._close_without_a_word()

    def _event(self, value: dict[str, Any]) -> None:
        self._raw(_sse(value))

    def _raw(self, data: bytes) -> None:
        if self.engine.dead:
            raise ConnectionAbortedError
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _error(self, status: int, message: str) -> None:
        if Fault.REFUSAL_WITHOUT_BODY in self.engine.faults:
            self._send(status, b"<html>Bad Request</html>", "text/html")
        else:
            kind = "BadRequestError" if status < 500 else "InternalServerError"
            self._json(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        if self.engine.dead:
            raise ConnectionAbortedError
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if Fault.GZIP_ANYWAY in self.engine.faults:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self._close_without_a_word()

    def _close_without_a_word(self) -> None:
        if Fault.KEEP_ALIVE_CLOSE in self.engine.faults:
            self.close_connection = True


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _joined_calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the one call that a stream's pieces make, as a whole answer carries it."""
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    if not pieces:
        return []
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    head = pieces[0]
    return [
        {"id": head["id"], "type": "function", "function": {"name": head["function"]["name"], "arguments": arguments}}
    ]
