"""Episodes of language models that a client plays over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from gymnasium.spaces import Text
from servers.dripping_server import dripping
from toy_serving.gateways import serving
from toy_serving.text_gateways import make_text_bundle, text_config
from toys.texts import Echo

from marl_ray.config import GatewayConfig
from marl_ray.errors import MarlRayError
from marl_ray.serving.client import play as playing
from marl_ray.serving.client.play import PlayedEpisode, play_episode, play_episodes, post


class Narrow(Echo):
    """Echo whose agent `b` may write digits alone."""

    def action_space(self, agent: str) -> Any:
        return Text(99, charset="0123456789") if agent == "b" else super().action_space(agent)

    def act(self, agent: str, text: str) -> None:
        assert self.action_space(agent).contains(text)
        super().act(agent, text)


@pytest.fixture
def gateway(tmp_path: Path) -> GatewayConfig:
    return text_config({"one": make_text_bundle(tmp_path / "bundle", 1, {"a": "lm", "b": "lm"}, context=64)}, tmp_path)


def play(gateway: GatewayConfig, *envs: Echo) -> list[PlayedEpisode]:
    """Play one episode of each; the store has their returns as outcomes."""

    async def run() -> list[PlayedEpisode]:
        async with serving(gateway) as (client, app):
            played = [await play_episode(client, env, f"s{k}", 0, "exp") for k, env in enumerate(envs)]
            stored = {outcome.unit: outcome.value for outcome in app.service.stores.units.outcomes("exp")}
            assert stored == {episode.session_id: episode.episode_return for episode in played}
            return played

    return asyncio.run(run())


def test_agents_of_texts_take_turns_and_their_return_is_the_outcome(gateway):
    played = play(gateway, *(Echo(("a", "b")) for _ in range(3)))
    assert [(len(episode.latencies), episode.arm) for episode in played] == [(2, "one")] * 3
    assert all(episode.episode_return > 0 for episode in played)


def test_a_text_that_the_environment_refuses_ends_the_episode(gateway):
    (episode,) = play(gateway, Narrow(("a", "b")))
    assert len(episode.latencies) == 2 and episode.episode_return > 0  # what the agents had earned until then


async def test_a_gateway_whose_answer_comes_byte_by_byte_does_not_answer(monkeypatch):
    monkeypatch.setattr(playing, "REQUEST_S", 0.3)
    with dripping() as url:
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            with pytest.raises(MarlRayError, match=r"/headers does not answer: no whole answer within 0\.3 s$"):
                await post(client, "/headers", {})


async def test_a_body_that_json_cannot_hold_and_a_key_that_no_header_holds_are_refused():
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9", timeout=None) as client:
        with pytest.raises(
            MarlRayError, match=r"^/v1/outcomes: expected a body that JSON can hold: Out of range float"
        ):
            await post(client, "/v1/outcomes", {"value": float("nan")})
    with pytest.raises(MarlRayError, match=r"^key: expected "):
        await play_episodes("http://127.0.0.1:9", Counted, 1, key="clé")


class Counted(Echo):
    """Echo that counts the copies that are open; the second one cannot be reset."""

    opened: list["Counted"] = []

    def __init__(self) -> None:
        super().__init__(("a", "b"))
        self.opened.append(self)
        self.number = len(self.opened)
        self.is_open = True

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if self.number == 2:
            raise RuntimeError("no second copy")
        super().reset(seed, options)

    def close(self) -> None:
        self.is_open = False


async def test_where_one_episode_fails_the_others_end_and_close_their_environments(monkeypatch):
    monkeypatch.setattr(Counted, "opened", [])
    with dripping() as url, pytest.raises(RuntimeError, match="no second copy"):
        await play_episodes(url, Counted, 3, concurrency=3)
    assert [env.is_open for env in Counted.opened] == [False] * len(Counted.opened)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
