"""Acts of language models: one arm writes the texts of all agents."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from marl_ray.errors import did_you_mean
from marl_ray.serving.arms.protocol import Reply, ResponseChunk, TextRequest
from marl_ray.serving.handlers.texts.arm_request import make_text_request
from marl_ray.serving.handlers.texts.written_response import WrittenResponse, collect_response
from marl_ray.serving.http.messages import RequestError
from marl_ray.serving.http.text_settings import Settings
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.routing.experiment.loaded_arms import LoadedArms
from marl_ray.serving.service import Service

Exchanges = list[tuple[TextRequest, WrittenResponse]]
"""Requests to an arm and the texts that it wrote."""


async def act_by_text(
    service: Service, session_arm: SessionArm, arm: str, prompts: Mapping[str, str], greedy: bool
) -> Exchanges:
    """Let one arm write every agent's text, and return the requests with their responses.

    Raises ServingError if the arm refuses one, and the arm's error if it fails.
    """
    start = time.perf_counter()
    settings = Settings(None, greedy, {})
    text_arm = session_arm.arms.writer(arm)
    requests = {agent: make_text_request(service, agent, prompt, settings) for agent, prompt in prompts.items()}
    replies = {agent: text_arm.write(request) for agent, request in requests.items()}
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {agent: group.create_task(_await_response(reply)) for agent, reply in replies.items()}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for reply in replies.values():
            reply.leave()
    counters = service.metrics.counters_of(session_arm.router.config)[arm]
    responses = {agent: task.result() for agent, task in tasks.items()}
    for response, first_at in responses.values():
        counters.tokens += response.tokens
        counters.count_text(response.prompt_tokens, first_at - start, response.cost_usd)
    return [(requests[agent], response) for agent, (response, _) in responses.items()]


async def _await_response(reply: Reply) -> tuple[WrittenResponse, float]:
    """Wait for a complete response, and return it and the moment of its first token by `time.perf_counter`."""
    first_chunk: ResponseChunk | None = await reply.next()
    first_at = time.perf_counter()

    async def first_or_next_chunk() -> ResponseChunk:
        nonlocal first_chunk
        chunk = first_chunk
        first_chunk = None
        return await reply.next() if chunk is None else chunk

    return await collect_response(first_or_next_chunk), first_at


def check_texts(arms: LoadedArms, observations: Mapping[str, Any], masks: Mapping[str, object]) -> dict[str, str]:
    """Return the observations of `/v1/act`, which must be texts.

    Raises RequestError 400 naming the agent whose observation is none, or `action_masks` if there are any.
    """
    agents = arms.bundle_of(arms.state.control).agents
    if masks:
        raise RequestError(400, "action_masks", "expected none: texts have no masks")
    for agent, text in observations.items():
        if agent not in agents:
            raise RequestError(400, f"observations.{agent}", f"unknown agent{did_you_mean(agent, agents)}")
        if not isinstance(text, str):
            raise RequestError(400, f"observations.{agent}", "expected a text")
    return dict(observations)
