"""A client that plays episodes against a gateway: each episode is a session, its return is the outcome."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from pettingzoo import ParallelEnv

from marl_ray.errors import MarlRayError, one_line

REQUEST_S = 30.0
"""Deadline of one request."""


@dataclass(frozen=True)
class PlayedEpisode:
    """The result of one episode that was played over HTTP."""

    session_id: str
    arm: str
    ret: float
    """Sum of rewards, averaged over the agents."""
    latencies: list[float]
    """Duration of each `/v1/act` request, in seconds."""


async def play_episodes(
    url: str,
    make_env: Callable[[], ParallelEnv],
    episodes: int,
    *,
    experiment: str | None = None,
    concurrency: int = 4,
    seed: int = 0,
    key: str | None = None,
    on_episode: Callable[[PlayedEpisode], None] = lambda episode: None,
) -> list[PlayedEpisode]:
    """Play whole episodes, `concurrency` at a time, and post each return as its session's outcome. `key` is an API key.

    Raises MarlRayError with the gateway's words if it refuses a request, or if it does not answer.
    """
    played: list[PlayedEpisode] = []
    numbers = iter(range(episodes))
    run = secrets.token_hex(4)  # makes every call's sessions new units

    async def player(client: httpx.AsyncClient) -> None:
        env = make_env()
        try:
            for number in numbers:
                episode = await play_episode(client, env, f"{run}-{number}", seed + number, experiment)
                played.append(episode)
                on_episode(episode)
        finally:
            env.close()

    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, headers=headers) as client:
        await asyncio.gather(*(player(client) for _ in range(min(concurrency, episodes))))
    return played


async def play_episode(
    client: httpx.AsyncClient, env: ParallelEnv, session: str, seed: int, experiment: str | None
) -> PlayedEpisode:
    """Play one episode as a session, and post its return as the outcome. Raises MarlRayError as `play_episodes` does."""
    named = {"session_id": session} | ({"experiment": experiment} if experiment else {})
    observations, infos = env.reset(seed=seed)
    total, latencies, answer = 0.0, [], {"arm": ""}
    while env.agents:
        rows = {agent: np.asarray(observations[agent]).tolist() for agent in env.agents}
        before = time.perf_counter()
        masks = {
            a: np.asarray(infos[a]["action_mask"]).tolist() for a in env.agents if "action_mask" in infos.get(a, {})
        }
        answer = await post(
            client, "/v1/act", named | {"observations": rows} | ({"action_masks": masks} if masks else {})
        )
        latencies.append(time.perf_counter() - before)
        observations, rewards, _, _, infos = env.step(answer["actions"])
        total += sum(rewards.values()) / len(env.possible_agents)
    await post(client, "/v1/outcomes", named | {"value": total})
    return PlayedEpisode(session, answer["arm"], total, latencies)


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer's JSON; raises MarlRayError on any other status than 200."""
    try:
        response = await client.post(path, json=body)
    except httpx.HTTPError as error:
        raise MarlRayError(f"gateway {client.base_url}{path.lstrip('/')} does not answer: {one_line(error)}") from error
    if response.status_code != 200:
        raise MarlRayError(f"gateway refused {path} with {response.status_code}: {response.text}")
    data: dict[str, Any] = response.json()
    return data
