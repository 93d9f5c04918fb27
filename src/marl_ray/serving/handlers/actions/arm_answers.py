"""The answer to a request for actions, by the cache, the session's arm, or the control in its place."""

import math
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from marl_ray.serving.arms.errors import NotFiniteError, new_pass_number
from marl_ray.serving.arms.protocol import Answer, is_text
from marl_ray.serving.arms.response_cache import ResponseCache, cache_key
from marl_ray.serving.handlers.actions.text_acts import Exchanges, act_by_text
from marl_ray.serving.handlers.texts.records import shadow_text
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.service import Service


class ActInputs(NamedTuple):
    """The input of an arm: texts for language models, else arrays."""

    observations: Mapping[str, Any]
    """Agent -> what it observes."""
    masks: dict[str, np.ndarray]
    """Agent -> the actions that it may take; agents without a mask may take all."""
    greedy: bool


class ArmActions(NamedTuple):
    """The answer to a request for actions, and the arm that gave it."""

    parts: dict[str, Any]
    """`actions` and `log_probs` by agent, as JSON has them."""
    arm: str
    """The arm that gave it: the session's own, or one in its place."""
    exchanges: Exchanges
    """Requests to language models and the texts that they wrote; empty for actor-critics."""


class _ActorResult(NamedTuple):
    """The actions of an arm, or an answer of it that the cache has kept."""

    actions: Answer
    """Empty if the cache has answered."""
    key: bytes | None = None
    """The answer's key in the cache; None if the cache has no part in the request."""
    cached_parts: dict[str, Any] | None = None
    """The parts of an answer from the cache; None if the arm was asked."""


async def answer_by_text(service: Service, session_arm: SessionArm, arm: str, inputs: ActInputs) -> ArmActions:
    """Let the session's arm write every agent's text, or the control if the arm's circuit is open or it fails.

    Raises ServingError if no arm answers or one refuses.
    """
    router = session_arm.router

    def ask(name: str) -> Awaitable[Exchanges]:
        return _write_finite_text(service, session_arm, name, inputs)

    attempts = service.failures.attempts(session_arm, arm)
    exchanges, name, ticket = await attempts.first_answer(ask, ask, "observations")
    router.circuits[name].success(ticket)
    if session_arm.is_unit:
        for text_request, response in exchanges:
            shadow_text(router, text_request, response)
    return ArmActions(_text_parts(exchanges), name, exchanges)


async def _write_finite_text(service: Service, session_arm: SessionArm, arm: str, inputs: ActInputs) -> Exchanges:
    exchanges = await act_by_text(service, session_arm, arm, inputs.observations, inputs.greedy)
    if not all(math.isfinite(response.log_prob or 0.0) for _, response in exchanges):
        raise NotFiniteError("log-probabilities are not finite", new_pass_number())
    return exchanges


def _text_parts(exchanges: Exchanges) -> dict[str, Any]:
    texts = {text_request.agent: response for text_request, response in exchanges}
    log_probs = {agent: response.log_prob for agent, response in texts.items()}
    return {
        "actions": {agent: response.text for agent, response in texts.items()},
        "log_probs": {agent: log_prob for agent, log_prob in log_probs.items() if log_prob is not None},
    }


async def answer_by_actor_critic(service: Service, session_arm: SessionArm, arm: str, inputs: ActInputs) -> ArmActions:
    """Let the session's arm act, or the control if the arm's circuit is open or its pass fails.

    A greedy act is looked up in the cache before an arm is asked. Raises ServingError if no arm answers or one refuses.
    """
    router = session_arm.router
    arms = session_arm.arms
    cache = service.cache if inputs.greedy else None

    def ask_arm(name: str) -> Awaitable[Answer]:
        return arms.actor(name).act(inputs.observations, inputs.greedy, inputs.masks)

    async def ask_cache_and_arm(name: str) -> _ActorResult:
        if cache is None:
            return _ActorResult(await ask_arm(name))
        key, cached_parts = await _look_up(cache, arms[name].bundle.digest, inputs)
        return _ActorResult({} if cached_parts else await ask_arm(name), key, cached_parts)

    attempts = service.failures.attempts(session_arm, arm)
    result, name, ticket = await attempts.first_answer(ask_cache_and_arm, ask_arm, "observations")
    if result.cached_parts is None:
        router.circuits[name].success(ticket)
    else:
        router.circuits[name].forget(ticket)  # the arm was not asked
    if session_arm.is_unit:
        _send_to_shadows(router, inputs, result)
    if result.cached_parts is not None:
        return ArmActions(result.cached_parts, name, [])
    parts = _action_parts(result.actions)
    if cache is not None and result.key is not None:
        await cache.put(result.key, orjson.dumps(parts))
    return ArmActions(parts, name, [])


async def _look_up(cache: ResponseCache, digest: str, inputs: ActInputs) -> tuple[bytes, dict[str, Any] | None]:
    """Return the key of the bundle's answer in the cache, and the parts of that answer, None if it is not there."""
    key = cache_key(digest, inputs.observations, inputs.masks)
    return key, _parse_cached(await cache.get(key))


def _parse_cached(value: bytes | None) -> dict[str, Any] | None:
    """Return the parts of an answer from the cache.

    Returns None if the bytes are no answer, because others may write to a shared cache.
    """
    try:
        parts = orjson.loads(value) if value else None
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parts, dict) or parts.keys() != {"actions", "log_probs"}:
        return None
    return parts if isinstance(parts["actions"], dict) else None


def _send_to_shadows(router: Router, inputs: ActInputs, result: _ActorResult) -> None:
    """Send copies of the request to the shadows that are loaded now, after the answer.

    They are also sent if the cache has answered, because the shadows' counts are of all traffic.
    """
    arms = router.arms  # read once: a thread may drop a shadow, which must not fail the client's request
    if not arms.state.shadows:
        return
    actions: dict[str, Any] = result.actions
    if result.cached_parts is not None:
        actions = {agent: (np.asarray(action), None) for agent, action in result.cached_parts["actions"].items()}
    for shadow in arms.state.shadows:
        shadow_arm = arms.get(shadow)
        if shadow_arm is not None and not is_text(shadow_arm.bundle):
            router.shadows.send(shadow, shadow_arm.act, inputs.observations, inputs.masks, actions)


def _action_parts(actions: Answer) -> dict[str, Any]:
    return {
        "actions": {agent: action.tolist() for agent, (action, _) in actions.items()},
        "log_probs": {agent: log_prob for agent, (_, log_prob) in actions.items() if log_prob is not None},
    }
