"""An HTTP server of some files that knows ranges, and can be told to cut, spoil, refuse or ignore ranges."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Files:
    """Content by path, and what to do wrong.

    Attributes:
        content: Path to bytes.
        cut_after: Bytes after which an answer's connection is closed, by path; each entry serves one answer.
        status: Status answered instead, by path; each entry serves one answer.
        ranges: Whether ranges are known.
        asked: Every request as ``METHOD path range``.
    """

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.cut_after: dict[str, list[int]] = {}
        self.status: dict[str, list[int]] = {}
        self.ranges = True
        self.asked: list[str] = []
        self.url = ""


def handler_of(files: Files) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            files.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".rstrip())
            content = files.content.get(self.path)
            if content is None or (body and files.status.get(self.path)):
                code = 404 if content is None else files.status[self.path].pop(0)
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            begins = int(asked[1]) if asked and files.ranges else 0
            self.send_response(206 if begins else 200)
            if begins:
                self.send_header("Content-Range", f"bytes {begins}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - begins))
            self.end_headers()
            if not body:
                return
            cuts = files.cut_after.get(self.path)
            self.wfile.write(content[begins : begins + cuts.pop(0)] if cuts else content[begins:])
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def serving() -> Iterator[Files]:
    """Serve files on a free port of this machine."""
    files = Files()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(files))
    files.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield files
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
