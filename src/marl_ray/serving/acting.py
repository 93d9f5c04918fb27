"""Requests for actions: `/v1/act`, and `/batch`, which is many of them."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment import Assignment
from marl_ray.experiments.store import StoreError
from marl_ray.serving.cache import cache_key
from marl_ray.serving.decision_log import Decision
from marl_ray.serving.endpoints import current, draining, remembering
from marl_ray.serving.http import Request, RequestError, Response, known_fields
from marl_ray.serving.router import Assigned, Router

if TYPE_CHECKING:
    from marl_ray.serving.gateway import Gateway

SESSION_LENGTH = 256
LOOK_UP_S = 2.0
"""How long an act waits for the database to tell a session's arm."""
ACT_FIELDS = frozenset({"experiment", "session_id", "cluster_id", "observations", "action_masks", "mode"})

GENERATE_FIELDS = frozenset({"experiment", "session_id", "prompt", "max_tokens", "temperature"})

_log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]


async def act(gateway: "Gateway", request: Request) -> Response:
    """`POST /v1/act`."""
    gateway.admit(request, "inference")
    data = await request.object(ACT_FIELDS)
    return Response(orjson.dumps(await answer(gateway, request, data)))


async def batch(gateway: "Gateway", request: Request) -> Response:
    """`POST /batch`: each part is answered as by `/v1/act`, or with its own status and error."""
    key = gateway.keys.check(request, "inference")
    data = await request.object(frozenset({"requests"}))
    parts, limit = data.get("requests"), gateway.config.max_batch_requests
    if not isinstance(parts, list) or not parts:
        raise RequestError(400, "requests", "expected a list with at least one request")
    if len(parts) > limit:
        raise RequestError(413, "requests", f"expected at most {limit} requests, got {len(parts)}")
    gateway.limit(key, len(parts))

    async def one(part: Any) -> dict[str, Any]:
        try:
            return await answer(gateway, request, known_fields(part, ACT_FIELDS))
        except RequestError as error:
            return {"status": error.status, **orjson.loads(error.body())}

    return Response(orjson.dumps({"answers": await asyncio.gather(*(one(part) for part in parts))}))


async def generate(gateway: "Gateway", request: Request) -> Response:
    """`POST /generate`: text of token policies."""
    gateway.admit(request, "inference")
    data = await request.object(GENERATE_FIELDS)
    router = gateway.endpoints.served(data.get("experiment"))[0]
    family = router.arms[router.control].bundle.manifest.family
    raise RequestError(422, "experiment", f"{router.config.name!r} serves {family} policies, expected token policies")


async def answer(gateway: "Gateway", request: Request, data: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request for actions, or RequestError."""
    start = time.perf_counter()
    routers = gateway.endpoints.served(data.get("experiment"))
    session = session_id(data.get("session_id"), request)
    cluster_id = data.get("cluster_id")
    if cluster_id is not None and not is_identifier(cluster_id):
        raise RequestError(400, "cluster_id", f"expected 1 to {SESSION_LENGTH} printable characters")
    mode = data.get("mode", "sample")
    if mode not in ("sample", "greedy"):
        raise RequestError(400, "mode", 'expected "sample" or "greedy"')
    given = data.get("observations")
    if not isinstance(given, dict) or not given:
        raise RequestError(400, "observations", "expected an object with at least one agent's observation")
    given_masks = _masks(data, given)
    router = remembering(routers, session) if len(routers) > 1 else routers[0]
    if router is None:
        router = current(routers, session, cluster_id)
        for older in draining(routers, router):
            if (await _asked(gateway, older, session))[1] is not None:
                router = older
                break
    forced = _override(gateway, request, router)
    takes_part = forced is None and router.takes_part(session, cluster_id)
    if takes_part:
        assigned = router.recall(session, cluster_id) or await _assigned(gateway, router, session, cluster_id)
    else:
        assigned = Assigned(forced or router.with_control())
    observations, masks = _checked(router, assigned.assignment.arm, given, given_masks)
    # Exposed before the pass: a session whose arm then fails has met that arm all the same.
    first, assignment = router.expose(session, assigned) if takes_part else (False, assigned.assignment)
    meters = gateway.meters(router)
    if first:
        meters[assignment.arm].exposures += 1
    parts, arm = await _acted(gateway, router, session, assignment.arm, observations, mode == "greedy", masks)
    seconds = time.perf_counter() - start
    noted = router.session(session) if takes_part else None
    if noted is not None:
        noted.acts += 1
        noted.seconds += seconds
    if gateway.decisions is not None and takes_part:
        digest, greedy = router.arms[arm].bundle.digest, mode == "greedy"
        gateway.decisions.put(
            Decision(
                router.config.name, session, arm, digest, assignment.epoch, assignment.propensity, time.time(), greedy,
                given, parts["actions"], parts["log_probs"], given_masks,
            )
        )  # fmt: skip
    meters[arm].observe(seconds)
    head = {
        "experiment": router.config.name,
        "arm": arm,
        "epoch": assignment.epoch,
        "propensity": assignment.propensity,
    }
    # An answer of the control in its stead does not change whose session it is.
    return head | parts | ({"fallback_for": assignment.arm} if arm != assignment.arm else {})


async def _assigned(gateway: "Gateway", router: Router, session: str, cluster_id: str | None) -> Assigned:
    """The arm of a session that this replica does not remember for sure."""
    answered, stored = await _asked(gateway, router, session)
    return router.settle(session, cluster_id, stored) if answered else router.guess(session, cluster_id)


async def _asked(gateway: "Gateway", router: Router, session: str) -> tuple[bool, Assignment | None]:
    """Whether the database told, and the arm of the session's exposure there. One that is away or hangs is left alone for a
    while, because acting goes on without it."""
    ticket = gateway.look_ups.allow()
    if not ticket:
        return False, None
    try:
        async with asyncio.timeout(LOOK_UP_S):
            stored = await gateway.in_thread(router.look_up, session, threads=gateway.look_up_threads)
    except (StoreError, TimeoutError) as error:
        gateway.look_ups.failure(ticket)
        _log.error("%s: assigning without the store: %s", router.config.name, str(error) or "it does not answer")
        return False, None
    except BaseException:
        gateway.look_ups.forget(ticket)
        raise
    gateway.look_ups.success(ticket)
    return True, stored


async def _acted(
    gateway: "Gateway",
    router: Router,
    session: str,
    arm: str,
    observations: Arrays,
    greedy: bool,
    masks: Arrays,
) -> tuple[dict[str, Any], str]:
    """Actions and log-probabilities as JSON has them, and the arm that gave them: the control if the arm's circuit is
    open or its pass fails."""
    for name in dict.fromkeys((arm, router.control)):
        circuit = router.circuits[name]
        ticket = circuit.allow()
        if not ticket:
            continue
        key = None
        try:
            if greedy and gateway.cache is not None:
                key = cache_key(router.arms[name].bundle.digest, observations, masks)
                if kept := _kept(await gateway.cache.get(key)):
                    circuit.success(ticket)
                    return kept, name
            given = await router.arms[name].act(observations, greedy, masks)
            if not all(map(math.isfinite, (log_prob for _, log_prob in given.values()))):
                raise FloatingPointError("log-probabilities are not finite")
        except asyncio.CancelledError:
            circuit.forget(ticket)  # the client went away
            raise
        except Exception as error:
            _failed(gateway, router, session, name, ticket, error)
            continue
        circuit.success(ticket)
        for shadow in router.state.shadows:
            router.shadows.send(shadow, router.arms[shadow].act, observations, masks, given)
        parts = {
            "actions": {agent: action.tolist() for agent, (action, _) in given.items()},
            "log_probs": {agent: log_prob for agent, (_, log_prob) in given.items()},
        }
        if key is not None and gateway.cache is not None:
            await gateway.cache.put(key, orjson.dumps(parts))
        return parts, name
    wait = router.circuits[router.control].retry_after_s
    raise RequestError(503, None, f"no arm of experiment {router.config.name!r} answers", retry_after_s=wait)


def _kept(value: bytes | None) -> dict[str, Any] | None:
    """An answer from the cache; what somebody else may have written there is none."""
    try:
        parts = orjson.loads(value) if value else None
    except orjson.JSONDecodeError:
        return None
    return parts if isinstance(parts, dict) and parts.keys() == {"actions", "log_probs"} else None


def _failed(gateway: "Gateway", router: Router, session: str, arm: str, ticket: int, error: Exception) -> None:
    circuit = router.circuits[arm]
    opened = circuit.opened
    circuit.failure(ticket)
    gateway.metrics.failures.labels(router.config.name, arm).inc()
    known = router.session(session)
    if known is not None and known.assignment.arm == arm:
        known.failed = True
        gateway.note_error(router, session)
    if circuit.opened > opened:
        gateway.log_line("circuit_open", experiment=router.config.name, arm=arm, error=repr(error))
        if arm != router.control and router.config.breaker.on_open == "rollback":
            gateway.roll_back(router, arm, f"circuit open after {router.config.breaker.failures} failures: {error!r}")


def _checked(
    router: Router, arm: str, given: Mapping[str, Any], given_masks: Mapping[str, Any]
) -> tuple[Arrays, Arrays]:
    bundle = router.arms[arm].bundle
    try:
        observations = {agent: bundle.check(agent, observation) for agent, observation in given.items()}
        return observations, {agent: bundle.check_mask(agent, mask) for agent, mask in given_masks.items()}
    except MarlRayError as error:
        field, _, message = str(error).partition(": ")
        raise RequestError(400, field, message) from None


def _override(gateway: "Gateway", request: Request, router: Router) -> Assignment | None:
    """The arm that a tester asks for by the header `x-arm`; such a session is in no experiment."""
    arm = request.header(b"x-arm")
    if arm is None:
        return None
    gateway.keys.check(request, "admin")
    if arm not in router.arms:
        raise RequestError(400, "x-arm", f"expected one of {', '.join(router.arms)}")
    return Assignment(arm, router.state.epoch, 1.0)


def _masks(data: Mapping[str, Any], observed: Mapping[str, Any]) -> dict[str, Any]:
    """The request's action masks by agent; every one belongs to an observation."""
    masks = data.get("action_masks", {})
    if not isinstance(masks, dict) or not set(masks) <= set(observed):
        raise RequestError(400, "action_masks", "expected an object whose agents are among those of observations")
    return masks


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


def is_identifier(value: Any, length: int = SESSION_LENGTH) -> bool:
    """Whether the value is 1 to `length` printable characters, which NUL and lone surrogates are not."""
    return isinstance(value, str) and 0 < len(value) <= length and value.isprintable()
