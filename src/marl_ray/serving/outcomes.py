"""Requests that tell how a session went: `/v1/outcomes`."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from marl_ray.experiments.store import OutcomeConflictError, UnknownUnitError
from marl_ray.experiments.units import METRIC_LENGTH
from marl_ray.serving.assigning import is_identifier, session_id
from marl_ray.serving.http import Request, RequestError, Response
from marl_ray.serving.router import Router

if TYPE_CHECKING:
    from marl_ray.serving.gateway import Gateway

LARGEST_OUTCOME = 1e100
"""Larger numbers would overflow the database's sums of squares."""
OTHER_REPLICAS_S = (0.1, 0.2, 0.4)
"""Pauses in which another replica's queued exposure has reached the store, before an outcome is refused."""
OUTCOME_FIELDS = frozenset({"experiment", "session_id", "value", "metrics"})


async def outcome(gateway: "Gateway", request: Request) -> Response:
    """`POST /v1/outcomes`."""
    gateway.admit(request, "outcomes")
    data = await request.object(OUTCOME_FIELDS)
    routers = gateway.endpoints.served(data.get("experiment"))
    session = session_id(data.get("session_id"), request)
    value: Any = data.get("value")
    if not _is_number(value):
        raise RequestError(400, "value", f"expected a number of size {LARGEST_OUTCOME:g} at most")
    metrics = data.get("metrics", {})
    if not isinstance(metrics, dict) or not all(_is_number(number) for number in metrics.values()):
        raise RequestError(400, "metrics", "expected an object of numbers by name")
    if not all(is_identifier(name, METRIC_LENGTH) and name != "outcome" for name in metrics):
        names = f"names of 1 to {METRIC_LENGTH} printable characters other than 'outcome'"
        raise RequestError(400, "metrics", f"expected {names}")
    numbers = {name: float(number) for name, number in metrics.items()}
    try:
        name, arm = await _record(gateway, routers, session, float(value), numbers)
    except UnknownUnitError:
        asked = data.get("experiment") or routers[0].config.served_as
        raise RequestError(404, "session_id", f"no session {session!r} has acted in experiment {asked!r}") from None
    except OutcomeConflictError as error:
        field, _, message = str(error).partition(": session ")
        raise RequestError(409, field, f"session {message}") from None
    return Response(orjson.dumps({"experiment": name, "arm": arm, "value": float(value)}))


async def _record(
    gateway: "Gateway", routers: Sequence[Router], session: str, value: float, metrics: dict[str, float]
) -> tuple[str, str]:
    """Write the outcome to the newest of the experiments that knows the session; its name and the session's arm."""
    # ... which another replica's queue may still hold, for moments.
    for pause in OTHER_REPLICAS_S if gateway.config.replicas > 1 else ():
        try:
            return await gateway.in_thread(_write, gateway, routers, session, value, metrics)
        except UnknownUnitError:
            await asyncio.sleep(pause)
    return await gateway.in_thread(_write, gateway, routers, session, value, metrics)


def _write(
    gateway: "Gateway", routers: Sequence[Router], session: str, value: float, metrics: dict[str, float]
) -> tuple[str, str]:
    gateway.exposures.flush()  # the session's exposure may be waiting here
    for router in routers:
        try:
            arm = gateway.store.record_outcome(router.config.name, session, value).arm
        except UnknownUnitError:
            if router is routers[-1]:
                raise
            continue
        if router.is_over:
            gateway.follower.note_late(router.config.name)
        if metrics:
            gateway.store.record_metrics(router.config.name, session, metrics)
        _write_measured(gateway, router, session, metrics)
        return router.config.name, arm
    raise AssertionError("no experiment was asked")


def _write_measured(gateway: "Gateway", router: Router, session: str, told: dict[str, float]) -> None:
    """What this replica has measured of the session itself, where a guardrail asks for it and the client did not tell."""
    known = router.session(session)
    if known is None:
        return
    measured = {"error": float(known.failed)} | ({"latency_s": known.seconds / known.acts} if known.acts else {})
    asked = {rail.name for rail in router.config.guardrails} - told.keys()
    for name, number in measured.items():
        if name in asked:
            with contextlib.suppress(OutcomeConflictError):  # a repeated outcome: the first measurement stands
                gateway.store.record_metrics(router.config.name, session, {name: number})


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= LARGEST_OUTCOME
