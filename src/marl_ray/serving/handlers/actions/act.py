"""Requests for the actions of sessions: `/v1/act` asks for one session, and `/batch` for many."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from marl_ray.errors import FieldError
from marl_ray.experiments.assignment.population import Attributes
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.serving.errors import ServingError
from marl_ray.serving.handlers.actions.arm_answers import ActInputs, ArmActions, answer_by_actor_critic, answer_by_text
from marl_ray.serving.handlers.actions.text_acts import check_texts
from marl_ray.serving.handlers.texts.records import log_text
from marl_ray.serving.handlers.texts.written_response import total_cost
from marl_ray.serving.http.fields import attributes_of, cluster_of, session_id
from marl_ray.serving.http.messages import Request, RequestError, Response, known_fields, parse_object
from marl_ray.serving.http.statuses import as_request_error
from marl_ray.serving.logs.acts import ActLog, LoggedAct
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.service import Service

ACT_FIELDS = frozenset({"experiment", "session_id", "cluster_id", "attributes", "observations", "action_masks", "mode"})


async def act(service: Service, request: Request) -> Response:
    """Answer `POST /v1/act`."""
    service.admission.admit(request, "inference")
    data = parse_object(await request.body(), ACT_FIELDS)
    return Response(orjson.dumps((await answer_act(service, request, data)).body))


async def batch(service: Service, request: Request) -> Response:
    """Answer `POST /batch`: each part is answered as by `/v1/act`, or with its own status and error.

    Raises RequestError if the parts are no list, or too many.
    """
    key = service.admission.keys.check(request, "inference")
    data = await request.read_object(frozenset({"requests"}))
    parts = data.get("requests")
    limit = service.config.max_batch_requests
    if not isinstance(parts, list) or not parts:
        raise RequestError(400, "requests", "expected a list with at least one request")
    if len(parts) > limit:
        raise RequestError(413, "requests", f"expected at most {limit} requests, got {len(parts)}")
    service.admission.limit(key, len(parts))

    async def answer_or_error(part: Any) -> dict[str, Any]:
        try:
            return (await answer_act(service, request, known_fields(part, ACT_FIELDS))).body
        except ServingError as error:
            refusal = as_request_error(error)
            return {"status": refusal.status, **orjson.loads(refusal.body())}

    return Response(orjson.dumps({"answers": await asyncio.gather(*(answer_or_error(part) for part in parts))}))


class AnsweredAct(NamedTuple):
    """The answer to a request for actions, and the bundle that has acted."""

    body: dict[str, Any]
    """The fields of the answer, as JSON has them."""
    digest: str
    """Digest of that bundle."""


async def answer_act(service: Service, request: Request, data: Mapping[str, Any]) -> AnsweredAct:
    """Answer one request for actions. Raises ServingError if it is refused or no arm answers."""
    start = time.perf_counter()
    routers = service.endpoints.acting_routers(data.get("experiment"))
    act_request = _parse(request, data)
    session_arm = await service.assigner.assign(
        routers,
        act_request.session,
        act_request.cluster_id,
        act_request.attributes,
        service.admission.forced_arm(request),
    )
    inputs = _check_inputs(session_arm, act_request)
    assignment = service.assigner.expose(session_arm)
    if session_arm.arms.is_text:
        arm_actions = await request.until_disconnect(answer_by_text(service, session_arm, assignment.arm, inputs))
    else:
        arm_actions = await answer_by_actor_critic(service, session_arm, assignment.arm, inputs)
    _count_answer(service, session_arm, arm_actions, time.perf_counter() - start)
    if session_arm.is_unit and service.acts is not None:
        _log_answer(service, service.acts, session_arm, assignment, act_request, arm_actions)
    body = session_arm.head(assignment, arm_actions.arm) | arm_actions.parts
    return AnsweredAct(body, session_arm.arms[arm_actions.arm].bundle.digest)


class _ActRequest(NamedTuple):
    """A request for actions whose form is right.

    Whether the observations fit is not known before its arm is.
    """

    session: str
    cluster_id: str | None
    attributes: Attributes
    greedy: bool
    observations: dict[str, Any]
    """Agent -> its observation, as the request has it."""
    masks: dict[str, Any]
    """Agent -> its action mask, as the request has it."""


def _parse(request: Request, data: Mapping[str, Any]) -> _ActRequest:
    session = session_id(data.get("session_id"), request)
    cluster_id = cluster_of(data)
    attributes = attributes_of(data)
    mode = data.get("mode", "sample")
    if mode not in ("sample", "greedy"):
        raise RequestError(400, "mode", 'expected "sample" or "greedy"')
    observations = data.get("observations")
    if not isinstance(observations, dict) or not observations:
        raise RequestError(400, "observations", "expected an object with at least one agent's observation")
    masks = data.get("action_masks", {})
    if not isinstance(masks, dict) or not masks.keys() <= observations.keys():
        raise RequestError(400, "action_masks", "expected an object whose agents are among those of observations")
    return _ActRequest(session, cluster_id, attributes, mode == "greedy", observations, masks)


def _check_inputs(session_arm: SessionArm, act_request: _ActRequest) -> ActInputs:
    """Return what the session's arm is given. Raises RequestError if it does not fit the arm's bundle."""
    arms = session_arm.arms
    if arms.is_text:
        return ActInputs(check_texts(arms, act_request.observations, act_request.masks), {}, act_request.greedy)
    bundle = arms.actor_bundle_of(session_arm.assignment.arm)
    try:
        observations = {
            agent: bundle.parse_observation(agent, value) for agent, value in act_request.observations.items()
        }
        masks = {agent: bundle.parse_mask(agent, mask) for agent, mask in act_request.masks.items()}
    except FieldError as error:
        raise RequestError(400, error.field, error.message) from None
    return ActInputs(observations, masks, act_request.greedy)


def _count_answer(service: Service, session_arm: SessionArm, arm_actions: ArmActions, seconds: float) -> None:
    """Count the answer, its seconds and its cost, for the session and in the metrics."""
    session_arm.count_answer(seconds)
    if session_arm.arms.is_text:
        cost = total_cost(response.cost_usd for _, response in arm_actions.exchanges)
        session_arm.charge(cost, service.unit_reports)
    service.metrics.counters_of(session_arm.router.config)[arm_actions.arm].observe(seconds)


def _log_answer(
    service: Service,
    acts: ActLog,
    session_arm: SessionArm,
    assignment: Assignment,
    act_request: _ActRequest,
    arm_actions: ArmActions,
) -> None:
    """Put the answer into the act log.

    The log gets one entry per text of language models, and one for all agents of an actor-critic.
    """
    digest = session_arm.arms[arm_actions.arm].bundle.digest
    if session_arm.arms.is_text:
        for text_request, response in arm_actions.exchanges:
            log_text(service, session_arm, assignment, arm_actions.arm, digest, text_request, response)
        return
    acts.put(
        LoggedAct(
            experiment=session_arm.router.config.name,
            unit=session_arm.session,
            arm=arm_actions.arm,
            digest=digest,
            epoch=assignment.epoch,
            propensity=assignment.propensity,
            at=time.time(),
            greedy=act_request.greedy,
            observations=act_request.observations,
            actions=arm_actions.parts["actions"],
            log_probs=arm_actions.parts["log_probs"],
            masks=act_request.masks,
        )
    )
