"""A client that plays episodes against a gateway.

Each episode is a session, and its return is the session's outcome.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from pettingzoo import AECEnv, ParallelEnv

from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonObject
from marl_ray.serving.client.requests import REQUEST_S, gateway_url, key_headers, read_answer

Act = Callable[[Mapping[str, Any], Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Observations and action masks by agent -> actions by agent."""


@dataclass(frozen=True)
class PlayedEpisode:
    """The result of one episode that was played over HTTP."""

    session_id: str
    arm: str
    """The arm that acted last."""
    episode_return: float
    """Sum of rewards, averaged over the agents."""
    latencies: list[float]
    """Duration of each `/v1/act` request, in seconds."""


async def play_episodes(
    url: str,
    make_env: Callable[[], ParallelEnv | AECEnv],
    episodes: int,
    *,
    experiment: str | None = None,
    concurrency: int = 4,
    seed: int = 0,
    key: str | None = None,
    on_episode: Callable[[PlayedEpisode], None] = lambda episode: None,
) -> list[PlayedEpisode]:
    """Play whole episodes, `concurrency` at a time, and post each return as its session's outcome.

    `key` is an API key, by default that of MARL_RAY_API_KEY. Raises MarlRayError for a URL that is none or a key that no
    header holds, with the gateway's words if it refuses a request, if it does not answer, and for an observation or a
    return that is not finite.
    """
    results: list[PlayedEpisode] = []
    numbers = iter(range(episodes))
    run = secrets.token_hex(4)  # makes every call's sessions new units

    async def player(client: httpx.AsyncClient) -> None:
        env = make_env()
        try:
            for number in numbers:
                episode = await play_episode(client, env, f"{run}-{number}", seed + number, experiment)
                results.append(episode)
                on_episode(episode)
        finally:
            env.close()

    # The timeout is that of `post`.
    async with httpx.AsyncClient(base_url=gateway_url(url), timeout=None, headers=key_headers(key)) as client:  # noqa: S113
        players = [asyncio.create_task(player(client)) for _ in range(min(concurrency, episodes))]
        try:
            await asyncio.gather(*players)
        finally:
            # Where one fails, the others end before the client is closed, and close their environments.
            for each in players:
                each.cancel()
            await asyncio.gather(*players, return_exceptions=True)
    return results


async def play_episode(
    client: httpx.AsyncClient, env: ParallelEnv | AECEnv, session: str, seed: int, experiment: str | None
) -> PlayedEpisode:
    """Play one episode as a session, and post its return as the outcome.

    All agents of a `ParallelEnv` act in one request; those of an `AECEnv` of texts take turns, each in a request of its
    own. Raises MarlRayError as `play_episodes` does.
    """
    session_fields = {"session_id": session} | ({"experiment": experiment} if experiment else {})
    latencies = list[float]()
    arm = ""

    async def act(observations: Mapping[str, Any], masks: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal arm
        before = time.perf_counter()
        body = session_fields | {"observations": observations} | ({"action_masks": masks} if masks else {})
        answer = await post(client, "/v1/act", body)
        latencies.append(time.perf_counter() - before)
        arm = answer["arm"]
        actions: Mapping[str, Any] = answer["actions"]
        return actions

    play = _play_turns if isinstance(env, AECEnv) else _play_steps
    total = await play(env, seed, act)
    await post(client, "/v1/outcomes", session_fields | {"value": total})
    return PlayedEpisode(session, arm, total, latencies)


async def _play_steps(env: ParallelEnv, seed: int, act: Act) -> float:
    """Play an episode in which all agents act at once, and return its return."""
    observations, infos = env.reset(seed=seed)
    total = 0.0
    while env.agents:
        rows = {agent: np.asarray(observations[agent]).tolist() for agent in env.agents}
        masks = {
            a: np.asarray(infos[a]["action_mask"]).tolist() for a in env.agents if "action_mask" in infos.get(a, {})
        }
        observations, rewards, _, _, infos = env.step(dict(await act(rows, masks)))
        total += sum(rewards.values()) / len(env.possible_agents)
    return total


async def _play_turns(env: AECEnv, seed: int, act: Act) -> float:
    """Play an episode in which agents take turns with texts, and return its return.

    As in training, a text that the environment refuses, because it is not in the agent's action space, ends the episode.
    """
    env.reset(seed=seed)
    total = 0.0
    while env.agents:
        agent = env.agent_selection
        if env.terminations[agent] or env.truncations[agent]:
            env.step(None)
            continue
        text = (await act({agent: env.observe(agent)}, {}))[agent]
        try:
            env.step(text)
        except (AssertionError, ValueError):
            if env.action_space(agent).contains(text):
                raise
            break
        total += sum(env.rewards.values()) / len(env.possible_agents)
    return total


async def post(client: httpx.AsyncClient, path: str, body: JsonObject) -> JsonObject:
    """Return the JSON answer to a POST, whole within REQUEST_S. Raises MarlRayError as `play_episodes` does."""
    where = f"gateway {str(client.base_url).rstrip('/')}{path} does not answer"
    try:
        async with asyncio.timeout(REQUEST_S):
            return read_answer(await client.post(path, json=body))
    except TimeoutError:
        raise MarlRayError(f"{where}: no whole answer within {REQUEST_S:g} s") from None
    except httpx.HTTPError as error:
        raise MarlRayError(f"{where}: {one_line(error)}") from error
    except (TypeError, ValueError) as error:
        raise MarlRayError(f"{path}: expected a body that JSON can hold: {one_line(error)}") from error
