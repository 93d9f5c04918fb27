"""Requests for actions: `/v1/act`, and `/batch`, which is many of them."""

import asyncio
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import orjson

from marl_ray.errors import MarlRayError
from marl_ray.policies.bundle import Bundle
from marl_ray.serving.arms.errors import NotFiniteError, new_pass
from marl_ray.serving.arms.response_cache import cache_key
from marl_ray.serving.handlers.generate import spoken, texts
from marl_ray.serving.http.protocol import Request, RequestError, Response, known_fields
from marl_ray.serving.logs.act_log import Decision
from marl_ray.serving.routing.assignment import Met, answered, attributes_of, cluster_of, expose, meet, session_id
from marl_ray.serving.routing.failures import Attempts
from marl_ray.serving.routing.router import Arm, Router

if TYPE_CHECKING:
    from marl_ray.serving.asgi import Gateway

ACT_FIELDS = frozenset({"experiment", "session_id", "cluster_id", "attributes", "observations", "action_masks", "mode"})

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


async def answer(gateway: "Gateway", request: Request, data: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request for actions, or RequestError."""
    start = time.perf_counter()
    routers = gateway.endpoints.acting(data.get("experiment"))
    session, cluster_id = session_id(data.get("session_id"), request), cluster_of(data)
    attributes = attributes_of(data)
    mode = data.get("mode", "sample")
    if mode not in ("sample", "greedy"):
        raise RequestError(400, "mode", 'expected "sample" or "greedy"')
    given = data.get("observations")
    if not isinstance(given, dict) or not given:
        raise RequestError(400, "observations", "expected an object with at least one agent's observation")
    given_masks = _masks(data, given)
    met = await meet(gateway, request, routers, session, cluster_id, attributes)
    router, greedy = met.router, mode == "greedy"
    if router.is_text:
        said = texts(router, given, given_masks)
        assignment = expose(gateway, met)
        parts, arm = await request.while_there(_acted(gateway, met, assignment.arm, said, greedy, {}))
    else:
        observations, masks = _checked(router, met.assigned.assignment.arm, given, given_masks)
        assignment = expose(gateway, met)
        parts, arm = await _acted(gateway, met, assignment.arm, observations, greedy, masks)
    seconds = time.perf_counter() - start
    answered(met, seconds)
    if gateway.decisions is not None and met.takes_part:
        digest = router.arms[arm].bundle.digest
        gateway.decisions.put(
            Decision(
                router.config.name, session, arm, digest, assignment.epoch, assignment.propensity, time.time(), greedy,
                given, parts["actions"], parts["log_probs"], given_masks,
            )
        )  # fmt: skip
    gateway.meters(router)[arm].observe(seconds)
    return met.head(assignment, arm) | parts


async def _acted(
    gateway: "Gateway",
    met: Met,
    arm: str,
    observations: Mapping[str, Any],
    greedy: bool,
    masks: Arrays,
) -> tuple[dict[str, Any], str]:
    """Actions and log-probabilities as JSON has them, and the arm that gave them: the control if the arm's circuit is
    open or its pass fails."""
    router = met.router
    attempts = Attempts(gateway, router, met.session, arm)
    try:
        for name in router.answering(arm):
            circuit = router.circuits[name]
            ticket = circuit.allow()
            if not ticket:
                continue
            key = None
            try:
                if greedy and gateway.cache is not None and not router.is_text:
                    key = cache_key(router.arms[name].bundle.digest, observations, masks)
                    if kept := _kept(await gateway.cache.get(key)):
                        circuit.success(ticket)
                        attempts.answered_by = name
                        return kept, name
                given = await _asked(gateway, router, name, observations, greedy, masks)
            except (asyncio.CancelledError, RequestError):
                circuit.forget(ticket)  # the client went away, or asks for what cannot be done, or the arm is busy
                raise
            except Exception as error:
                attempts.failed(name, ticket, error)
                continue
            circuit.success(ticket)
            attempts.answered_by = name
            for shadow in router.state.shadows if met.takes_part else ():
                if shadow in router.arms:
                    router.shadows.send(shadow, cast(Arm, router.arms[shadow]).act, observations, masks, given)
            parts = {
                "actions": {a: act if isinstance(act, str) else act.tolist() for a, (act, _) in given.items()},
                "log_probs": {agent: log_prob for agent, (_, log_prob) in given.items()},
            }
            if key is not None and gateway.cache is not None:
                await gateway.cache.put(key, orjson.dumps(parts))
            return parts, name
        await attempts.compare(lambda other: _asked(gateway, router, other, observations, greedy, masks))
        raise attempts.refusal("observations")
    finally:
        attempts.judge()


async def _asked(
    gateway: "Gateway", router: Router, arm: str, observations: Mapping[str, Any], greedy: bool, masks: Arrays
) -> dict[str, tuple[Any, float]]:
    """Agent -> action and its log-probability. ArmError if the arm fails, RequestError if it refuses."""
    if router.is_text:
        said = await spoken(gateway, router, arm, observations, greedy)
        if not all(math.isfinite(log_prob) for _, log_prob in said.values()):
            raise NotFiniteError("log-probabilities are not finite", new_pass())
        return said
    return await cast(Arm, router.arms[arm]).act(observations, greedy, masks)


def _kept(value: bytes | None) -> dict[str, Any] | None:
    """An answer from the cache; what somebody else may have written there is none."""
    try:
        parts = orjson.loads(value) if value else None
    except orjson.JSONDecodeError:
        return None
    return parts if isinstance(parts, dict) and parts.keys() == {"actions", "log_probs"} else None


def _checked(
    router: Router, arm: str, given: Mapping[str, Any], given_masks: Mapping[str, Any]
) -> tuple[Arrays, Arrays]:
    bundle = cast(Bundle, router.bundle_of(arm))
    try:
        observations = {agent: bundle.check(agent, observation) for agent, observation in given.items()}
        return observations, {agent: bundle.check_mask(agent, mask) for agent, mask in given_masks.items()}
    except MarlRayError as error:
        field, _, message = str(error).partition(": ")
        raise RequestError(400, field, message) from None


def _masks(data: Mapping[str, Any], observed: Mapping[str, Any]) -> dict[str, Any]:
    """The request's action masks by agent; every one belongs to an observation."""
    masks = data.get("action_masks", {})
    if not isinstance(masks, dict) or not set(masks) <= set(observed):
        raise RequestError(400, "action_masks", "expected an object whose agents are among those of observations")
    return masks
