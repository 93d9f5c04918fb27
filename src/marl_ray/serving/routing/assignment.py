"""Which experiment and which arm a request meets."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from marl_ray.config.experiment import ATTRIBUTE_LENGTH, ATTRIBUTE_NAME, ATTRIBUTES
from marl_ray.experiments.assignment import Assignment, held_out
from marl_ray.experiments.population import Attributes
from marl_ray.experiments.store import StoreError
from marl_ray.serving.http.protocol import Request, RequestError
from marl_ray.serving.routing.endpoints import current, draining, remembering
from marl_ray.serving.routing.router import Assigned, Router

if TYPE_CHECKING:
    from marl_ray.serving.asgi import Gateway

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
    holdout: bool = False
    """Whether it is in no experiment of the endpoint."""

    def head(self, assignment: Assignment, arm: str) -> dict[str, Any]:
        """What every answer says of its arm. The control may answer in the arm's stead, which does not change whose
        session it is."""
        told = {
            "experiment": self.router.config.name,
            "arm": arm,
            "epoch": assignment.epoch,
            "propensity": assignment.propensity,
        }
        if self.holdout:
            told["holdout"] = True
        return told | ({"fallback_for": assignment.arm} if arm != assignment.arm else {})


async def meet(
    gateway: "Gateway",
    request: Request,
    routers: Sequence[Router],
    session: str,
    cluster_id: str | None,
    attributes: Attributes,
) -> Met:
    """The arm of a session, of the experiments behind one name; RequestError if the request asks for one in vain."""
    router = remembering(routers, session) if len(routers) > 1 else routers[0]
    if router is None:
        router = current(routers, session, cluster_id)
        if older := draining(routers, router):
            has_met = await _have_met(gateway, older, session)
            router = next((one for one, has in zip(older, has_met, strict=True) if has), router)
    forced = _override(gateway, request, router)
    if forced is not None:
        return Met(router, session, Assigned(forced), takes_part=False)
    holdout = _is_held_out(gateway, router, session, cluster_id)
    takes_part = router.takes_part(session, cluster_id)
    if takes_part and (holdout or not router.includes(session, cluster_id, attributes)):
        # A unit keeps the arm that it met when its attributes, the population or the hold-out were others.
        takes_part = router.may_have_included(session, cluster_id)
        takes_part = takes_part and (await _have_met(gateway, [router], session))[0]
    if takes_part:
        assigned = router.recall(session, cluster_id) or await _assigned(gateway, router, session, cluster_id)
        return Met(router, session, assigned, takes_part=True)
    outside = router.with_control() if holdout else router.with_production()
    return Met(router, session, Assigned(outside), takes_part=False, holdout=holdout)


def expose(gateway: "Gateway", met: Met) -> Assignment:
    """The session meets its arm now. Before the pass: a session whose arm then fails has met that arm all the same."""
    if met.holdout:
        gateway.metrics.count_holdout(met.router.config.served_as)
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


async def _have_met(gateway: "Gateway", routers: Sequence[Router], session: str) -> list[bool]:
    """Whether the session has met an arm of each of these experiments, as far as this replica and the database know. That it
    has not is believed for as long as replicas may differ anyway."""
    unknown = [router for router in routers if router.session(session) is None and not router.is_absent(session)]
    found = await _asked(gateway, unknown, session) if unknown else None
    stored = set[str]()
    for router, assignment in zip(unknown, found or (), strict=False):
        if assignment is None:
            router.note_absent(session)
        else:
            stored.add(router.config.name)
    return [router.session(session) is not None or router.config.name in stored for router in routers]


def _is_held_out(gateway: "Gateway", router: Router, session: str, cluster_id: str | None) -> bool:
    endpoint = router.config.served_as
    share = gateway.config.holdouts.get(endpoint, 0.0)
    return share > 0 and held_out(endpoint, share, router.drawn_by(session, cluster_id))


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


def attributes_of(data: Mapping[str, Any]) -> Attributes:
    """What the request tells of its unit, by name; nothing if it tells nothing."""
    given = data.get("attributes")
    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > ATTRIBUTES:
        raise RequestError(400, "attributes", f"expected an object of {ATTRIBUTES} names at most")
    for name, value in given.items():
        if not is_identifier(name, ATTRIBUTE_NAME):
            raise RequestError(
                400, "attributes", f"expected names of 1 to {ATTRIBUTE_NAME} printable characters, got {name[:50]!r}"
            )
        if not (isinstance(value, int | float) and math.isfinite(value)) and not is_identifier(value, ATTRIBUTE_LENGTH):
            raise RequestError(
                400,
                f"attributes.{name}",
                f"expected a boolean, a number, or a text of 1 to {ATTRIBUTE_LENGTH} printable characters",
            )
    return given


def is_identifier(value: Any, length: int = SESSION_LENGTH) -> bool:
    """Whether the value is 1 to `length` printable characters, which NUL and lone surrogates are not."""
    return isinstance(value, str) and 0 < len(value) <= length and value.isprintable()
