"""An HTTP client whose timeouts limit whole requests.

A timeout of httpx limits each read and each write alone, so a server that sends a byte now and then, of its headers or of
its body, holds a request for as long as it likes.
"""

import math
import ssl
import time
from collections.abc import Iterable
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import httpcore
import httpx
from typing_extensions import override

from marl_ray.errors import MarlRayError

WRITE_BYTES = 1 << 14
"""Bytes that are written with one timeout: a record of TLS, so that a server that reads slowly is noticed too."""


class _Deadline(NamedTuple):
    seconds: float
    """Seconds that the request may take; infinite without a limit."""
    at: float
    """End of the request, by `time.monotonic`."""

    def time_left(self) -> float | None:
        """Return the seconds until the deadline, None without one. Raises httpcore.ReadTimeout if it has passed."""
        seconds = self.at - time.monotonic()
        if seconds <= 0:
            raise self.error()
        return None if math.isinf(seconds) else seconds

    def error(self) -> httpcore.ReadTimeout:
        """Return the error of a request that is not answered in time."""
        return httpcore.ReadTimeout(f"no whole answer within {self.seconds:g} s")


_UNLIMITED = _Deadline(math.inf, math.inf)
_deadline: ContextVar[_Deadline] = ContextVar("request_deadline", default=_UNLIMITED)
"""The deadline of the request that this thread sends."""


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the settings of TLS, made once in a process: reading the trusted certificates takes 20 ms."""
    return httpx.create_ssl_context()


def check_header_secret(secret: str, source: str) -> str:
    """Return a secret that a header can hold, as it is.

    Raises MarlRayError for another one, which HTTP libraries would show in their errors. The error names the `source` and
    shows nothing of the secret.
    """
    if not (secret.isascii() and secret.isprintable() and secret == secret.strip()):
        raise MarlRayError(f"{source}: expected printable ASCII without blanks around it")
    return secret


class DeadlineClient(httpx.Client):
    """A client of httpx in which the timeout of a request, or else that of the client, limits the whole request.

    It limits connecting, sending, and reading headers and body, also of a response that is streamed; only the look-up of
    the host's name has limits of its own, those of the resolver. Late answers raise httpx.ReadTimeout.
    """

    def __init__(self, **options: Any):
        """Take the options of `httpx.Client`."""
        super().__init__(**{"verify": _tls_context()} | options)
        for transport in (self._transport, *self._mounts.values()):
            if isinstance(transport, httpx.HTTPTransport):
                pool = transport._pool
                pool._network_backend = _DeadlineBackend(pool._network_backend)

    @override
    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        timeout = request.extensions.get("timeout", {}).get("read")
        seconds = math.inf if timeout is None else timeout
        token = _deadline.set(_Deadline(seconds, time.monotonic() + seconds))
        try:
            return super().send(request, **options)
        finally:
            _deadline.reset(token)


class _DeadlineBackend(httpcore.NetworkBackend):
    """Connects as another backend does, within the deadline of the request that needs the connection."""

    def __init__(self, backend: httpcore.NetworkBackend):
        self._backend = backend

    @override
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        time_left = _deadline.get().time_left()
        return _DeadlineStream(self._backend.connect_tcp(host, port, time_left, local_address, socket_options))

    @override
    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class _DeadlineStream(httpcore.NetworkStream):
    """A connection, which has the deadline of one request after another."""

    def __init__(self, stream: httpcore.NetworkStream):
        self._stream = stream
        self._deadline = _deadline.get()
        """The deadline of the present request; a body that is streamed is read after the request was sent."""

    @override
    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return self._stream.read(max_bytes, self._deadline.time_left())
        except httpcore.ReadTimeout:
            raise self._deadline.error() from None

    @override
    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._deadline = _deadline.get()
        try:
            for start in range(0, len(buffer), WRITE_BYTES):
                self._stream.write(buffer[start : start + WRITE_BYTES], self._deadline.time_left())
        except httpcore.WriteTimeout:
            raise self._deadline.error() from None

    @override
    def close(self) -> None:
        self._stream.close()

    @override
    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, _deadline.get().time_left()))

    @override
    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)
