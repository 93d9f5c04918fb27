"""Clients of `gateway.py`: wrk for rates, one connection for latencies, and a load that notes every answer's arm."""

import asyncio
import itertools
import json
import re
import secrets
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ACT_LUA = Path(__file__).parents[1] / "peers/act.lua"
ACTS = 20
"""Requests of one session."""
REQUEST_S = 10.0
"""Deadline of one request."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def wrk(url: str, seconds: int, connections: int, observations: Path, acts: int = ACTS) -> dict[str, Any]:
    """Return requests per second over `connections` kept alive, with wrk's own percentiles.

    Raises SystemExit if any request fails.
    """
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", f"--timeout={REQUEST_S:g}s", f"-s{ACT_LUA}", url]
    command += ["--", secrets.token_hex(4), str(connections), str(acts), str(observations)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 2 * REQUEST_S)
    if done.returncode:
        raise SystemExit(f"wrk failed: {done.stderr or done.stdout}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if result["errors"]:
        raise SystemExit(f"{url}: {result['errors']} of {result['requests']} requests failed")
    return result | {"rps": result["requests"] / result["seconds"]}


def request_bytes(url: str, body: bytes, headers: str = "") -> bytes:
    """Return a POST as it goes over the wire."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def acts(observations: Path) -> Iterator[tuple[str, bytes]]:
    """Yield sessions and bodies of acts without end, each session ACTS long."""
    lines = itertools.cycle(observations.read_text().splitlines())
    while True:
        session = secrets.token_hex(8)
        for _ in range(ACTS):
            yield session, b'{"session_id":"%b","observations":%b}' % (session.encode(), next(lines).encode())


def latencies(url: str, seconds: float, observations: Path) -> list[float]:
    """Return seconds from sending a request to its whole answer, one request at a time on one connection."""
    parts = urlsplit(url)
    times: list[float] = []
    # wrk corrects its histogram for coordinated omission, which moves the median of a single connection.
    with socket.create_connection((parts.hostname or "", parts.port or 80), REQUEST_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.perf_counter() + seconds
        for _, body in acts(observations):
            request = request_bytes(url, body)
            start = time.perf_counter()
            if start > end:
                return times
            connection.sendall(request)
            answer = connection.recv(1 << 16)
            while not _complete(answer):
                part = connection.recv(1 << 16)
                if not part:
                    raise SystemExit(f"{url}: the connection was closed in an answer")
                answer += part
            times.append(time.perf_counter() - start)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"{url}: {answer[:200]!r}")
    return times


def _complete(answer: bytes) -> bool:
    head, separator, body = answer.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return bool(separator) and length is not None and len(body) >= int(length[1])


@dataclass(frozen=True, slots=True)
class Acted:
    """One answered act; `sent` is of `time.perf_counter()`."""

    experiment: str
    sent: float
    arm: str


@dataclass
class ArmLoad:
    """Connections that act on `experiment`, which may be changed while they run, and note which arm answered."""

    url: str
    key: str
    observations: Path
    experiment: str
    answers: list[Acted] = field(default_factory=list)
    closed: int = 0
    """Connections that the server closed in place of an answer."""

    async def run(self, connections: int) -> None:
        """Act until cancelled, each session on its own connection; RuntimeError on any answer but 200."""
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(self._connection())

    async def _connection(self) -> None:
        parts = urlsplit(self.url)
        for session, bodies in itertools.groupby(acts(self.observations), key=lambda act: act[0]):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                for _, body in bodies:
                    await self._act(reader, writer, body)
            except asyncio.IncompleteReadError as error:
                # A server may close a connection that is kept alive; without a byte of an answer nothing was answered.
                if error.partial:
                    raise RuntimeError(f"{self.url}: session {session}: {error.partial!r}") from error
                self.closed += 1
            finally:
                writer.close()

    async def _act(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        experiment = self.experiment
        named = b'{"experiment":"%b",' % experiment.encode() + body[1:]
        sent = time.perf_counter()
        async with asyncio.timeout(REQUEST_S):
            writer.write(request_bytes(self.url, named, f"Authorization: Bearer {self.key}\r\n"))
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            answer = await reader.readexactly(int(length[1]) if length else 0)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{self.url}: {head!r} {answer!r}")
        self.answers.append(Acted(experiment, sent, json.loads(answer)["arm"]))


def milliseconds(times: list[float]) -> dict[str, float]:
    """Return count, median and 99th percentile of seconds."""
    percentiles = statistics.quantiles(times, n=100, method="inclusive")
    return {"requests": len(times), "p50_ms": 1e3 * statistics.median(times), "p99_ms": 1e3 * percentiles[98]}
