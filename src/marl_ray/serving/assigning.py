"""Which experiment and which arm a request meets."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from marl_ray.experiments.assignment import Assignment
from marl_ray.experiments.store import StoreError
from marl_ray.serving.endpoints import current, draining, remembering
from marl_ray.serving.http import Request, RequestError
from marl_ray.serving.router import Assigned, Router

if TYPE_CHECKING:
    from marl_ray.serving.gateway import Gateway

SESSION_LENGTH = 256
LOOK_UP_S = 2.0
"""How long a request waits for the database to tell a session's arm."""

_log = logging.getLogger(__name__)


class Met(NamedTuple):
    """A session and what it is to meet; it has met it once `expose` is called."""

    router: Router
    session: str
    assigned: Assigned
    takes_part: bool
    """Whether it is a unit of the experiment; others are with an arm and are not counted."""

    def head(self, assignment: Assignment, arm: str) -> dict[str, Any]:
        """What every answer says of its arm. The control may answer in the arm's stead, which does not change whose
        session it is."""
        told = {
            "experiment": self.router.config.name,
            "arm": arm,
            "epoch": assignment.epoch,
            "propensity": assignment.propensity,
        }
        return told | ({"fallback_for": assignment.arm} if arm != assignment.arm else {})


async def meet(
    gateway: "Gateway", request: Request, routers: Sequence[Router], session: str, cluster_id: str | None
) -> Met:
    """The arm of a session, of the experiments behind one name; RequestError if the request asks for one in vain."""
    router = remembering(routers, session) if len(routers) > 1 else routers[0]
    if router is None:
        router = current(routers, session, cluster_id)
        if older := draining(routers, router):
            found = await _asked(gateway, older, session) or []
            router = next((one for one, stored in zip(older, found, strict=False) if stored is not None), router)
    forced = _override(gateway, request, router)
    takes_part = forced is None and router.takes_part(session, cluster_id)
    if takes_part:
        assigned = router.recall(session, cluster_id) or await _assigned(gateway, router, session, cluster_id)
    else:
        assigned = Assigned(forced or router.with_control())
    return Met(router, session, assigned, takes_part)


def expose(gateway: "Gateway", met: Met) -> Assignment:
    """The session meets its arm now. Before the pass: a session whose arm then fails has met that arm all the same."""
    if not met.takes_part:
        return met.assigned.assignment
    first, assignment = met.router.expose(met.session, met.assigned)
    if first:
        gateway.meters(met.router)[assignment.arm].exposures += 1
    return assignment


def answered(met: Met, seconds: float) -> None:
    """The session got an answer, which took this long."""
    noted = met.router.session(met.session) if met.takes_part else None
    if noted is not None:
        noted.acts += 1
        noted.seconds += seconds


async def _assigned(gateway: "Gateway", router: Router, session: str, cluster_id: str | None) -> Assigned:
    """The arm of a session that this replica does not remember for sure."""
    found = await _asked(gateway, [router], session)
    return router.guess(session, cluster_id) if found is None else router.settle(session, cluster_id, found[0])


async def _asked(gateway: "Gateway", routers: Sequence[Router], session: str) -> list[Assignment | None] | None:
    """The arm of the session's exposure in each of these experiments, or None if the database does not tell. One that is
    away or hangs is left alone for a while, because acting goes on without it."""
    ticket = gateway.look_up_circuit.allow()
    if not ticket:
        return None
    try:
        async with asyncio.timeout(LOOK_UP_S):
            # At the same moment, so that they share a statement.
            asked = [gateway.look_ups.ask(router.config.name, session) for router in routers]
            found = [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)
    except (StoreError, TimeoutError) as error:
        gateway.look_up_circuit.failure(ticket)
        names = ", ".join(router.config.name for router in routers)
        _log.error("%s: assigning without the store: %s", names, str(error) or "it does not answer")
        return None
    except BaseException:
        gateway.look_up_circuit.forget(ticket)
        raise
    gateway.look_up_circuit.success(ticket)
    return found


def _override(gateway: "Gateway", request: Request, router: Router) -> Assignment | None:
    """The arm that a tester asks for by the header `x-arm`; such a session is in no experiment."""
    arm = request.header(b"x-arm")
    if arm is None:
        return None
    gateway.keys.check(request, "admin")
    if arm not in router.arms:
        raise RequestError(400, "x-arm", f"expected one of {', '.join(router.arms)}")
    return Assignment(arm, router.state.epoch, 1.0)


def session_id(given: Any, request: Request) -> str:
    """The session id, from the body or else from the header `x-session-id`."""
    session = request.header(b"x-session-id") if given is None else given
    if not is_identifier(session):
        raise RequestError(
            400,
            "session_id",
            f"expected 1 to {SESSION_LENGTH} printable characters, here or in the header x-session-id",
        )
    return str(session)


def cluster_of(data: Mapping[str, Any]) -> str | None:
    """The request's `cluster_id`, if it names one."""
    cluster_id = data.get("cluster_id")
    if cluster_id is not None and not is_identifier(cluster_id):
        raise RequestError(400, "cluster_id", f"expected 1 to {SESSION_LENGTH} printable characters")
    return cluster_id


def is_identifier(value: Any, length: int = SESSION_LENGTH) -> bool:
    """Whether the value is 1 to `length` printable characters, which NUL and lone surrogates are not."""
    return isinstance(value, str) and 0 < len(value) <= length and value.isprintable()
