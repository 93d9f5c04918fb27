"""The little of HTTP that the gateway needs, on raw ASGI."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from marl_ray.errors import MarlRayError

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

JSON = b"application/json"


class RequestError(MarlRayError):
    """A mistake in a request: the HTTP status, the field at fault (None for the request as a whole) and one line."""

    def __init__(self, status: int, field: str | None, message: str):
        super().__init__(message)
        self.status = status
        self.field = field

    def body(self) -> bytes:
        return orjson.dumps({"error": {"field": self.field, "message": str(self)}})


class ClientGoneError(Exception):
    """The client hung up before its request was complete; there is nobody to answer."""


def route_path(scope: Scope) -> str:
    """The path below the prefix that the application is mounted at."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


def header(scope: Scope, name: bytes) -> str | None:
    """A request header's value by its lower-case name."""
    for key, value in scope["headers"]:
        if key.lower() == name:
            return bytes(value).decode("latin-1")
    return None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises RequestError 413 as soon as it is known to be longer than `limit` bytes."""
    too_large = RequestError(413, "body", f"expected at most {limit} bytes")
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def parse_object(body: bytes, known: frozenset[str]) -> dict[str, Any]:
    """A JSON object with known keys only, or RequestError 400."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "body", f"expected a JSON object, got malformed JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError(400, "body", f"expected a JSON object, got {type(data).__name__}")
    for key in data:
        if key not in known:
            raise RequestError(400, key, f"unknown field, expected {', '.join(sorted(known))}")
    return data


async def respond(
    send: Send, status: int, body: bytes, content_type: bytes = JSON, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Send a complete response."""
    all_headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
