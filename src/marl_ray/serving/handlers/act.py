"""Requests for actions, and for an arm without actions.

`/v1/act` asks for the actions of one session, and `/batch` holds many such requests; `/v1/assign` is for clients that
compute actions themselves.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping
from typing import Any, cast

import numpy as np
import orjson

from marl_ray.errors import FieldError
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.policies.bundles.actor_critic import Bundle
from marl_ray.serving.arms.errors import NotFiniteError, new_pass_number
from marl_ray.serving.arms.protocol import Arm
from marl_ray.serving.arms.response_cache import cache_key
from marl_ray.serving.handlers.text_response import (
    Exchanges,
    act_by_text,
    log_text,
    shadow_text,
    text_observations,
    total_cost,
)
from marl_ray.serving.http.fields import attributes_of, cluster_of, session_id
from marl_ray.serving.http.protocol import Request, RequestError, Response, known_fields, parse_object
from marl_ray.serving.logs.act_log import LoggedAct
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.routing.router import Router
from marl_ray.serving.service import Service

ACT_FIELDS = frozenset({"experiment", "session_id", "cluster_id", "attributes", "observations", "action_masks", "mode"})
ASSIGN_FIELDS = frozenset({"experiment", "session_id", "cluster_id", "attributes", "expose"})
_NONE: dict[str, Any] = {}

Arrays = dict[str, np.ndarray]


async def act(service: Service, request: Request) -> Response:
    """Answer `POST /v1/act`."""
    service.admission.admit(request, "inference")
    data = parse_object(await request.body(), ACT_FIELDS)
    return Response(orjson.dumps(await answer(service, request, data)))


async def batch(service: Service, request: Request) -> Response:
    """Answer `POST /batch`: each part is answered as by `/v1/act`, or with its own status and error."""
    key = service.admission.keys.check(request, "inference")
    data = await request.object(frozenset({"requests"}))
    parts, limit = data.get("requests"), service.config.max_batch_requests
    if not isinstance(parts, list) or not parts:
        raise RequestError(400, "requests", "expected a list with at least one request")
    if len(parts) > limit:
        raise RequestError(413, "requests", f"expected at most {limit} requests, got {len(parts)}")
    service.admission.limit(key, len(parts))

    async def answer_or_error(part: Any) -> dict[str, Any]:
        try:
            return await answer(service, request, known_fields(part, ACT_FIELDS))
        except RequestError as error:
            return {"status": error.status, **orjson.loads(error.body())}

    return Response(orjson.dumps({"answers": await asyncio.gather(*(answer_or_error(part) for part in parts))}))


async def answer(service: Service, request: Request, data: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request for actions; RequestError if it is refused."""
    start = time.perf_counter()
    routers = service.endpoints.acting_routers(data.get("experiment"))
    session, cluster_id = session_id(data.get("session_id"), request), cluster_of(data)
    attributes = attributes_of(data)
    mode = data.get("mode", "sample")
    if mode not in ("sample", "greedy"):
        raise RequestError(400, "mode", 'expected "sample" or "greedy"')
    raw_observations = data.get("observations")
    if not isinstance(raw_observations, dict) or not raw_observations:
        raise RequestError(400, "observations", "expected an object with at least one agent's observation")
    raw_masks = _masks(data, raw_observations)
    session_arm = await service.assigner.assign(
        routers, session, cluster_id, attributes, service.admission.forced_arm(request)
    )
    router, greedy = session_arm.router, mode == "greedy"
    exchanges: Exchanges = []
    if router.is_text:
        prompts = text_observations(router, raw_observations, raw_masks)
        assignment = service.assigner.expose(session_arm)
        parts, arm = await request.until_disconnect(
            _act_or_fall_back(service, session_arm, assignment.arm, prompts, greedy, {}, exchanges)
        )
    else:
        observations, masks = _check_observations(router, session_arm.assignment.arm, raw_observations, raw_masks)
        assignment = service.assigner.expose(session_arm)
        parts, arm = await _act_or_fall_back(
            service, session_arm, assignment.arm, observations, greedy, masks, exchanges
        )
    seconds = time.perf_counter() - start
    session_arm.count_answer(seconds)
    if router.is_text:
        session_arm.charge(total_cost(response.cost_usd for _, response in exchanges), service.unit_reports)
    if session_arm.takes_part and router.is_text and service.acts is not None:
        for text_request, response in exchanges:
            log_text(service, session_arm, assignment, arm, router.arms[arm].bundle.digest, text_request, response)
    elif session_arm.takes_part:
        _log_act(service, session_arm, assignment, arm, greedy, raw_observations, raw_masks, parts)
    service.metrics.counters_of(router.config)[arm].observe(seconds)
    return session_arm.head(assignment, arm) | parts


def _log_act(
    service: Service,
    session_arm: SessionArm,
    assignment: Assignment,
    arm: str,
    greedy: bool,
    observations: dict[str, Any],
    masks: dict[str, list[Any]],
    parts: Mapping[str, Any],
) -> None:
    """Put one answer of an actor-critic into the act log, if the gateway has one."""
    if service.acts is None:
        return
    router = session_arm.router
    service.acts.put(
        LoggedAct(
            experiment=router.config.name,
            unit=session_arm.session,
            arm=arm,
            digest=router.arms[arm].bundle.digest,
            epoch=assignment.epoch,
            propensity=assignment.propensity,
            at=time.time(),
            greedy=greedy,
            observations=observations,
            actions=parts["actions"],
            log_probs=parts["log_probs"],
            masks=masks,
        )
    )


async def _act_or_fall_back(
    service: Service,
    session_arm: SessionArm,
    arm: str,
    observations: Mapping[str, Any],
    greedy: bool,
    masks: Arrays,
    exchanges: Exchanges,
) -> tuple[dict[str, Any], str]:
    """Let the arm act, or the control if the arm's circuit is open or its pass fails.

    Returns actions and log-probabilities as JSON has them, and the arm that gave them. `exchanges` is filled with the
    requests to the arm and the texts that it wrote.
    """
    router = session_arm.router
    cache = service.cache if greedy and not router.is_text else None
    key: bytes | None = None
    cached: dict[str, Any] | None = None

    def compute(name: str) -> Awaitable[dict[str, Any]]:
        return _act_by_arm(service, router, name, observations, greedy, masks, exchanges)

    async def look_up_or_compute(name: str) -> dict[str, Any]:
        nonlocal key, cached
        assert cache is not None
        key = cache_key(router.arms[name].bundle.digest, observations, masks)
        cached = _parse_cached(await cache.get(key))
        return {} if cached else await compute(name)

    attempts = service.failures.attempts(router, session_arm.session, arm)
    answers, name, ticket = await attempts.first_answer(
        compute if cache is None else look_up_or_compute, compute, "observations"
    )
    if cached:
        router.circuits[name].forget(ticket)  # the arm was not asked
        if session_arm.takes_part and router.state.shadows:
            answers = {agent: (np.asarray(action), None) for agent, action in cached["actions"].items()}
            _send_to_shadows(router, observations, masks, answers)
        return cached, name
    router.circuits[name].success(ticket)
    for text_request, response in exchanges if session_arm.takes_part else ():
        shadow_text(router, text_request, response)
    if session_arm.takes_part and not router.is_text:
        _send_to_shadows(router, observations, masks, answers)
    parts = {
        "actions": {a: action if isinstance(action, str) else action.tolist() for a, (action, _) in answers.items()},
        "log_probs": {agent: log_prob for agent, (_, log_prob) in answers.items() if log_prob is not None},
    }
    if key is not None and cache is not None:
        await cache.put(key, orjson.dumps(parts))
    return parts, name


def _send_to_shadows(router: Router, observations: Mapping[str, Any], masks: Arrays, answers: dict[str, Any]) -> None:
    """Send copies of the request to the shadows, also if its answer was kept: their counts are of all traffic."""
    for shadow in router.state.shadows:
        if shadow in router.arms:
            router.shadows.send(shadow, cast(Arm, router.arms[shadow]).act, observations, masks, answers)


def _act_by_arm(
    service: Service,
    router: Router,
    arm: str,
    observations: Mapping[str, Any],
    greedy: bool,
    masks: Arrays,
    exchanges: Exchanges,
) -> Awaitable[dict[str, Any]]:
    """Let one arm act: agent -> (action, its log-probability).

    Raises ArmError if the arm fails, RequestError if it refuses.
    """
    if router.is_text:
        return _act_by_finite_text(service, router, arm, observations, greedy, exchanges)
    return cast(Arm, router.arms[arm]).act(observations, greedy, masks)


async def _act_by_finite_text(
    service: Service, router: Router, arm: str, prompts: Mapping[str, str], greedy: bool, exchanges: Exchanges
) -> dict[str, tuple[str, float | None]]:
    texts = await act_by_text(service, router, arm, prompts, greedy, exchanges)
    if not all(log_prob is None or math.isfinite(log_prob) for _, log_prob in texts.values()):
        raise NotFiniteError("log-probabilities are not finite", new_pass_number())
    return texts


def _parse_cached(value: bytes | None) -> dict[str, Any] | None:
    """Return an answer from the cache; None if the bytes are no answer, because others may write to a shared cache."""
    try:
        parts = orjson.loads(value) if value else None
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parts, dict) or parts.keys() != {"actions", "log_probs"}:
        return None
    return parts if isinstance(parts["actions"], dict) else None


def _check_observations(
    router: Router, arm: str, raw_observations: Mapping[str, Any], raw_masks: Mapping[str, Any]
) -> tuple[Arrays, Arrays]:
    bundle = cast(Bundle, router.bundle_of(arm))
    try:
        observations = {agent: bundle.check(agent, observation) for agent, observation in raw_observations.items()}
        return observations, {agent: bundle.check_mask(agent, mask) for agent, mask in raw_masks.items()}
    except FieldError as error:
        raise RequestError(400, error.field, error.message) from None


def _masks(data: Mapping[str, Any], observed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's action masks by agent; each must belong to an observation."""
    masks = data.get("action_masks", _NONE)
    if not isinstance(masks, dict) or not masks.keys() <= observed.keys():
        raise RequestError(400, "action_masks", "expected an object whose agents are among those of observations")
    return masks


async def assign(service: Service, request: Request) -> Response:
    """Answer `POST /v1/assign`: the session's arm and its bundle, without a pass.

    Unless `expose` is false, this exposes the session to the arm, so that its outcome counts.
    """
    service.admission.admit(request, "inference")
    data = await request.object(ASSIGN_FIELDS)
    routers = service.endpoints.acting_routers(data.get("experiment"))
    session, cluster_id = session_id(data.get("session_id"), request), cluster_of(data)
    attributes = attributes_of(data)
    exposes = data.get("expose", True)
    if not isinstance(exposes, bool):
        raise RequestError(400, "expose", "expected true or false")
    session_arm = await service.assigner.assign(
        routers, session, cluster_id, attributes, service.admission.forced_arm(request)
    )
    router = session_arm.router
    router.bundle_of(session_arm.assignment.arm)  # before the exposure, because it raises an error if no arm is loaded
    assignment = service.assigner.expose(session_arm) if exposes else session_arm.assignment
    arm = router.answering_arms(assignment.arm)[0]
    answer_fields = {
        "bundle": router.config.arms[arm].reference,
        "digest": router.arms[arm].bundle.digest,
        "exposed": exposes and session_arm.takes_part,
    }
    return Response(orjson.dumps(session_arm.head(assignment, arm) | answer_fields))
