"""One POST of JSON: its answer whatever the status, its deadline, and the limit of its size."""

import json
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest
from servers.dripping_server import dripping
from servers.http_server import serving_http

from marl_ray.deadlines.http_client import DeadlineClient
from marl_ray.deadlines.json_posts import post_json

LIMIT = 1000


class EchoHandler(BaseHTTPRequestHandler):
    """Answers 429 with the body of the request, and the header `retry-after` that it names."""

    def do_POST(self) -> None:
        """Answer one request."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(429)
        if wait := json.loads(body).get("wait"):
            self.send_header("retry-after", wait)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def url():
    with serving_http(EchoHandler) as url:
        yield url


@pytest.mark.parametrize(
    ("wait", "seconds"), [("7", 7.0), ("9999", 9999.0), ("12345", 0.0), ("-1", 0.0), ("soon", 0.0), (None, 0.0)]
)
def test_an_answer_of_any_status_is_returned_with_the_wait_that_it_asks_for(url, wait, seconds):
    content = {"wait": wait}
    with DeadlineClient() as client:
        answer = post_json(client, url, content, time.monotonic() + 60, LIMIT)
    assert (answer.status, json.loads(answer.body), answer.retry_after_s) == (429, content, seconds)


def test_of_a_large_answer_only_a_beginning_above_the_limit_is_read(url):
    with DeadlineClient() as client:
        answer = post_json(client, url, {"text": "x" * 10_000_000}, time.monotonic() + 60, LIMIT)
    assert LIMIT < len(answer.body) < 10_000_000


@pytest.mark.parametrize("part", ["headers", "body"])
def test_an_answer_that_is_not_whole_by_the_deadline_is_late(part):
    with dripping() as url, DeadlineClient() as client, pytest.raises(httpx.ReadTimeout, match=r"^no whole answer"):
        post_json(client, f"{url}/{part}", {}, time.monotonic() + 0.3, LIMIT)


def test_after_the_deadline_nothing_is_asked():
    with DeadlineClient() as client, pytest.raises(httpx.ReadTimeout, match=r"^no time is left for a request$"):
        post_json(client, "http://127.0.0.1:9", {}, time.monotonic(), LIMIT)


def test_a_service_that_is_not_there_is_an_error_of_the_connection():
    with DeadlineClient() as client, pytest.raises(httpx.ConnectError):
        post_json(client, "http://127.0.0.1:9", {}, time.monotonic() + 60, LIMIT)
