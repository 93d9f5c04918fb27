"""The requests and responses of HTTP as the gateway needs them, on raw ASGI."""

import asyncio
import contextlib
import itertools
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

import orjson

from marl_ray.errors import did_you_mean, type_name
from marl_ray.json_types import JsonObject
from marl_ray.serving.errors import ServingError

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
HTML = b"text/html; charset=utf-8"
EVENTS = b"text/event-stream; charset=utf-8"
Headers = tuple[tuple[bytes, bytes], ...]
"""Names in lower case, and values."""

T = TypeVar("T")
_REQUEST_IDS = (secrets.token_hex(6), itertools.count(1))


class RequestError(ServingError):
    """A refusal with its HTTP status, as a handler answers it."""

    def __init__(
        self,
        status: int,
        field: str | None,
        message: str,
        retry_after_s: float | None = None,
        code: str | None = None,
    ):
        super().__init__(message, field, retry_after_s, code)
        self.status = status
        self.headers: Headers = ()
        if retry_after_s is not None and math.isfinite(retry_after_s):
            self.headers = ((b"retry-after", str(math.ceil(retry_after_s)).encode()),)

    def body(self) -> bytes:
        """Return the JSON of the refusal, in bytes."""
        return orjson.dumps({"error": {"field": self.field, "message": str(self)}})


class ClientDisconnectedError(Exception):
    """The client closed the connection before it got its answer."""


def route_path(scope: Scope) -> str:
    """Return the path below the prefix that the application is mounted at."""
    path = str(scope["path"])
    root = str(scope.get("root_path") or "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


class Request:
    """One HTTP request, whose body is read when asked for."""

    __slots__ = ("_hang_up_watcher", "_limit", "_receive", "headers", "id", "path", "path_params", "root_path")

    def __init__(self, scope: Scope, receive: Receive, max_body_bytes: int):
        self._receive = receive
        self._limit = max_body_bytes
        self._hang_up_watcher: asyncio.Task[None] | None = None
        self.path = route_path(scope)
        self.path_params: Mapping[str, str] = {}
        """Name in the route's template -> the part of the path that stands there."""
        self.root_path = str(scope.get("root_path") or "").rstrip("/")
        """The prefix that the application is mounted at."""
        # Read several times per request; of a repeated header the first one counts.
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.id = self._caller_id() or f"{_REQUEST_IDS[0]}-{next(_REQUEST_IDS[1])}"
        """The caller's `x-request-id` if it is valid, else a new one."""

    def _caller_id(self) -> str | None:
        request_id = self.header(b"x-request-id")
        is_valid = (
            request_id is not None and 0 < len(request_id) <= 100 and request_id.isascii() and request_id.isprintable()
        )
        return request_id if is_valid else None

    def header(self, name: bytes) -> str | None:
        """Return a header's value by its lower-case name; None without such a header."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def body(self) -> bytes:
        """Return the whole body.

        Raises RequestError 413 as soon as it exceeds the limit, and ClientDisconnectedError if the client has hung up.
        """
        declared = self.headers.get(b"content-length")
        # The length is checked first, because int() refuses thousands of digits.
        if declared is not None and declared.isdigit() and (len(declared) > 18 or int(declared) > self._limit):
            raise self._too_large()
        message = await self._receive()
        body: bytes = message.get("body", b"")
        if message.get("more_body", False):
            parts = bytearray(body)
            while message.get("more_body", False) and len(parts) <= self._limit:
                message = await self._receive()
                parts += message.get("body", b"")
            body = bytes(parts)
        if len(body) > self._limit:
            raise self._too_large()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        return body

    async def until_disconnect(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` while the client is there, and return its result.

        If the client hangs up, cancels `work` and raises ClientDisconnectedError. Call it only after reading the body.
        The check costs two tasks, so it is for long work.
        """
        task = asyncio.create_task(work)
        if self._hang_up_watcher is None:  # all work of this request shares one watcher
            self._hang_up_watcher = asyncio.create_task(self._until_hang_up())
        try:
            await asyncio.wait((task, self._hang_up_watcher), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnectedError
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _until_hang_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Stop watching for the client to hang up."""
        if self._hang_up_watcher is not None:
            self._hang_up_watcher.cancel()

    def _too_large(self) -> RequestError:
        return RequestError(413, "body", f"expected at most {self._limit} bytes")

    async def read_object(self, fields: frozenset[str]) -> JsonObject:
        """Return the body as a JSON object with known keys only. Raises RequestError 400 or 413."""
        return parse_object(await self.body(), fields)


class Response(NamedTuple):
    """A handler's answer."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = ()


class Stream(NamedTuple):
    """An answer in parts that are sent as soon as they are ready: server-sent events."""

    parts: AsyncIterator[bytes]
    close: Callable[[], None]
    """The sender calls this at the end in any case."""
    headers: Headers = ()
    status: int = 200
    content_type: bytes = EVENTS


def parse_object(body: bytes, fields: frozenset[str]) -> dict[str, object]:
    """Return a JSON object with known keys only. Raises RequestError 400."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "body", f"expected a JSON object, got malformed JSON: {error}") from None
    return known_fields(data, fields)


def known_fields(data: object, fields: frozenset[str]) -> dict[str, object]:
    """Return the data if it is an object with known keys only. Raises RequestError 400 otherwise."""
    if not isinstance(data, dict):
        raise RequestError(400, "body", f"expected a JSON object, got {type_name(data)}")
    if not data.keys() <= fields:
        key = next(key for key in data if key not in fields)
        raise RequestError(400, key, f"unknown field{did_you_mean(key, sorted(fields))}")
    return data


async def send_response(send: Send, response: Response, headers: Headers = ()) -> None:
    """Send a complete response."""
    length = (b"content-length", str(len(response.body)).encode())
    await send(_start_message(response, (length, *response.headers, *headers)))
    await send({"type": "http.response.body", "body": response.body})


async def send_stream(send: Send, response: Stream, headers: Headers = ()) -> None:
    """Send a response part by part. `x-accel-buffering` tells proxies not to buffer it."""
    stream_headers = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
    await send(_start_message(response, (*stream_headers, *response.headers, *headers)))
    async for part in response.parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _start_message(response: Response | Stream, headers: Headers) -> dict[str, object]:
    kind = (b"content-type", response.content_type)
    return {"type": "http.response.start", "status": response.status, "headers": [kind, *headers]}


def server_sent_event(data: object) -> bytes:
    """Return a server-sent event of JSON."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def header_text(value: str) -> bytes:
    """Return the value of a header for any printable text; characters outside of ASCII become escapes."""
    return value.encode("ascii", "backslashreplace")
