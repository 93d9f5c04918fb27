"""An HTTP server that sends its answers slowly, byte by byte."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from servers.http_server import serving_http

ANSWER_S = 2.0
"""Seconds after which the headers, or the body, of a slow answer are complete."""
PAUSE_S = 0.02
"""Seconds between two bytes: less than any timeout of a test."""


class DrippingHandler(BaseHTTPRequestHandler):
    """Answers `/headers` and `/body` slowly in that part, and other paths at once, each with the JSON `{}`."""

    protocol_version = "HTTP/1.1"
    answer_s = ANSWER_S
    """Seconds that the slow part of an answer takes."""

    def do_GET(self) -> None:
        """Answer one request."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        try:
            if self.path.endswith("/headers"):
                self._drip(b"x-slow: ")
                self.wfile.write(b"\r\n")
            spaces = int(self.answer_s / PAUSE_S) if self.path.endswith("/body") else 0
            self.wfile.write(b"content-length: %d\r\n\r\n" % (spaces + 2))
            if spaces:
                self._drip(b"")
            self.wfile.write(b"{}")
        except OSError:  # the client has left
            self.close_connection = True

    do_POST = do_GET

    def _drip(self, beginning: bytes) -> None:
        self.wfile.write(beginning)
        for _ in range(int(self.answer_s / PAUSE_S)):
            self.wfile.write(b" ")
            time.sleep(PAUSE_S)

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


class SlowHeadersHandler(DrippingHandler):
    """Answers every POST with headers that take a minute, far longer than any deadline of a test."""

    answer_s = 60.0

    def do_POST(self) -> None:
        """Answer one request."""
        self.path = "/headers"
        self.do_GET()


@contextmanager
def dripping(handler: type[BaseHTTPRequestHandler] = DrippingHandler) -> Iterator[str]:
    """Run the server; yields its URL, without a slash at its end."""
    with serving_http(handler) as url:
        yield url
