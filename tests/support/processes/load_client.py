"""A load of sessions on a gateway, for tests of faults.

Each request is written down, and repeated until it succeeds.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

ACT, OUTCOME = "/v1/act", "/v1/outcomes"
REQUEST_S = 10.0
"""A request without an answer within this has failed."""
RETRY_S = 0.05
"""Seconds before a request is repeated."""
GIVE_UP_S = 90.0
"""A request that has not succeeded after this, with all its repetitions, fails the load."""
LATENESS_S = 30.0
"""Seconds that the load's thread may take to end beyond `GIVE_UP_S`, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One HTTP request of a session. Times are seconds of `time.monotonic()`."""

    experiment: str
    session: str
    path: str
    sent: float
    answered: float
    status: int
    """0 when there was no HTTP answer."""
    arm: str | None = None
    """The arm of an answer with 200."""
    value: float | None = None
    """The value of an outcome."""
    error: str = ""
    """The error that a failed request got."""


@dataclass(frozen=True, slots=True)
class Load:
    """The players: each plays one session after another, `acts` acts each and then its outcome."""

    url: str
    secret: str
    experiments: Sequence[str]
    observations: dict[str, list[int]]
    players: int = 6
    acts: int = 5
    pause_s: float = 0.05
    """Between two requests of a session."""


@contextmanager
def running(load: Load) -> Iterator[list[Sent]]:
    """Play in a thread while the body runs, then let every session come to its end.

    The list grows meanwhile. Raises AssertionError if a request never succeeded.
    """
    requests: list[Sent] = []
    stop = threading.Event()
    failures: list[BaseException] = []

    def play() -> None:
        try:
            asyncio.run(_play(load, requests, stop))
        except BaseException as error:  # the body's thread raises it
            failures.append(error)

    thread = threading.Thread(target=play, name="load", daemon=True)
    thread.start()
    try:
        yield requests
    finally:
        stop.set()
        thread.join(GIVE_UP_S + LATENESS_S)
    assert not thread.is_alive(), "the load does not end"
    for failure in failures:
        raise failure


async def _play(load: Load, requests: list[Sent], stop: threading.Event) -> None:
    headers = {"authorization": f"Bearer {load.secret}"}
    async with (
        httpx.AsyncClient(base_url=load.url, timeout=REQUEST_S, headers=headers) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for player in range(load.players):
            outcomes: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
            tasks.create_task(_act(client, load, player, requests, outcomes, stop))
            tasks.create_task(_report(client, requests, outcomes))


async def _act(
    client: httpx.AsyncClient,
    load: Load,
    player: int,
    requests: list[Sent],
    outcomes: "asyncio.Queue[dict[str, Any] | None]",
    stop: threading.Event,
) -> None:
    for k in itertools.count():
        if stop.is_set():
            break
        player_fields = {"experiment": load.experiments[k % len(load.experiments)], "session_id": f"player{player}-{k}"}
        for _ in range(load.acts):
            await _until_accepted(client, ACT, player_fields | {"observations": load.observations}, requests)
            await asyncio.sleep(load.pause_s)
        outcomes.put_nowait(player_fields | {"value": float((k * 7 + player) % 11)})
    outcomes.put_nowait(None)


async def _report(
    client: httpx.AsyncClient, requests: list[Sent], outcomes: "asyncio.Queue[dict[str, Any] | None]"
) -> None:
    """Post a player's outcomes one by one. On its own, so that the player continues while outcomes are refused."""
    while (outcome := await outcomes.get()) is not None:
        await _until_accepted(client, OUTCOME, outcome, requests)


async def _until_accepted(client: httpx.AsyncClient, path: str, body: dict[str, Any], requests: list[Sent]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        request = await send(client, path, body)
        requests.append(request)
        if request.status == 200:
            return
        assert time.monotonic() < deadline, f"not accepted within {GIVE_UP_S:g} s: {request}"
        await asyncio.sleep(RETRY_S)


async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Sent:
    """One request, and what came of it."""
    start, status, arm, error = time.monotonic(), 0, None, ""
    try:
        answer = await client.post(path, json=body)
        status = answer.status_code
        if status == 200:
            arm = answer.json()["arm"]
        else:
            error = answer.text
    except httpx.HTTPError as failure:
        error = repr(failure)
    end = time.monotonic()
    return Sent(body["experiment"], body["session_id"], path, start, end, status, arm, body.get("value"), error)
