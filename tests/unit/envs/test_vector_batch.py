"""Batches that a library steps: Gymnasium's vector environments, and EnvPool's pools where EnvPool is installed."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from marl_ray.config.run.sections import EnvConfig
from marl_ray.conformance.extensions.environment import check
from marl_ray.envs.batch import EnvBatch
from marl_ray.envs.copies import EnvLoop, make_batch
from marl_ray.envs.gymnasium_env import SingleAgentEnv
from marl_ray.envs.registry import make_env
from marl_ray.envs.vector import PoolBatch, VectorBatch
from marl_ray.errors import MarlRayError

AGENTS = [["agent"]]


def walk(batch: EnvBatch, copies: int, steps: int, reset: bool) -> list[np.ndarray]:
    """Observations, rewards and ends of some steps to the same side; with `reset` ended copies begin anew."""
    rows, seen = [np.zeros((copies, 1, 4), np.float32)], []
    for c in range(copies):
        batch.reset(c, 5 + c)
    rng = np.random.default_rng(0)
    for t in range(steps):
        batch.observe(rows)
        seen.append(rows[0].copy())
        playing = batch.alive.copy()
        if not playing.any():
            break
        step = batch.step([rng.integers(2, size=(copies, 1))])
        seen += [step.rewards * playing, step.terminated & playing, step.truncated & playing, batch.alive.copy()]
        for c in np.flatnonzero(~batch.alive[:, 0]) if reset else ():
            batch.reset(int(c), 100 * t + int(c))
    batch.close()
    return seen


@pytest.mark.parametrize("reset", [True, False])
def test_a_gymnasium_vector_equals_the_loop(reset):
    copies = 3
    makers = [lambda: gymnasium.make("CartPole-v1")] * copies
    vector = VectorBatch(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED), AGENTS, 1)
    loop = EnvLoop(EnvConfig(id="gymnasium.CartPole-v1"), copies, AGENTS)
    for array, reference in zip(walk(vector, copies, 60, reset), walk(loop, copies, 60, reset), strict=True):
        np.testing.assert_array_equal(array, reference)


class Forbidding(gymnasium.Wrapper):
    """CartPole whose infos forbid one action in each step, except in every fourth."""

    def reset(self, **kwargs: Any) -> Any:
        self.steps = 0
        observation, _ = self.env.reset(**kwargs)
        return observation, self.info(observation)

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated, truncated, self.info(observation)

    def info(self, observation: np.ndarray) -> dict[str, Any]:
        may_go_left = bool(observation[0] > 0)
        return {} if self.steps % 4 == 3 else {"action_mask": np.array([may_go_left, not may_go_left])}


def test_a_gymnasium_vector_gives_the_action_masks_of_its_infos():
    copies = 3
    makers = [lambda: Forbidding(gymnasium.make("CartPole-v1"))] * copies
    vector = VectorBatch(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED), AGENTS, 1)
    loop = EnvLoop(EnvConfig(id="gymnasium.CartPole-v1"), copies, AGENTS)
    loop.envs = [SingleAgentEnv(make(), "forbidding") for make in makers]
    rows, rng = [np.zeros((copies, 1, 4), np.float32)], np.random.default_rng(0)
    for batch in (vector, loop):
        for c in range(copies):
            batch.reset(c, c)
    ended = 0
    for t in range(60):
        for batch in (vector, loop):
            batch.observe(rows)
        np.testing.assert_array_equal(vector.action_masks[0], loop.action_masks[0])
        actions = [rng.integers(2, size=(copies, 1))]
        for batch in (vector, loop):
            batch.step(actions)
        over = np.flatnonzero(~loop.alive[:, 0]) if t % 5 == 0 else []
        for c in over:
            vector.reset(int(c), 100 * t)
            loop.reset(int(c), 100 * t)
            ended += 1
    assert ended
    vector.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_gymnasium_vector_that_resets_itself_is_refused(mode):
    with pytest.raises(MarlRayError, match=f"autoreset_mode of the VectorEnv is {mode}, expected .*DISABLED"):
        VectorBatch(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], autoreset_mode=mode), AGENTS, 1)


def test_an_envpool_id_without_envpool_says_what_to_install():
    try:
        import envpool  # noqa: F401
    except ImportError:
        with pytest.raises(MarlRayError, match=r"env\.id: 'envpool.CartPole-v1' needs EnvPool: pip install"):
            make_env(EnvConfig(id="envpool.CartPole-v1"))


def test_a_pool_plays_the_episodes_of_its_seeds():
    pytest.importorskip("envpool")
    config = EnvConfig(id="envpool.CartPole-v1")
    first, again = (make_batch(config, 4, AGENTS) for _ in range(2))
    assert isinstance(first, PoolBatch)
    for array, reference in zip(walk(first, 4, 80, True), walk(again, 4, 80, True), strict=True):
        np.testing.assert_array_equal(array, reference)
    # A copy's first episode is that of its seed, whatever copies are beside it.
    alone = walk(make_batch(config, 2, AGENTS), 2, 6, False)
    for array, reference in zip(walk(make_batch(config, 4, AGENTS), 4, 1, False)[:1], alone[:1], strict=True):
        np.testing.assert_array_equal(array[:2], reference)
    with pytest.raises(MarlRayError, match=r"env\.id: 'envpool.CartPole-v7' is unknown"):
        make_env(EnvConfig(id="envpool.CartPole-v7"))


def test_a_pool_gives_images_with_channels_last():
    pytest.importorskip("envpool")
    config = EnvConfig(id="envpool.Pong-v5")
    env = make_env(config)
    assert env.observation_space("agent").shape == (84, 84, 4)
    batch = make_batch(config, 2, AGENTS)
    batch.reset(0, 1)
    batch.reset(1, 1)
    rows = [np.zeros((2, 1, 84 * 84 * 4), np.uint8)]
    batch.step([np.zeros((2, 1), np.int64)])
    batch.observe(rows)
    np.testing.assert_array_equal(rows[0][0], rows[0][1])
    seen, _ = env.reset(seed=1)
    seen = env.step({"agent": 0})[0]["agent"]
    np.testing.assert_array_equal(rows[0][0, 0].reshape(84, 84, 4), seen)


@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5-v0", "CheetahRun-v1"])
def test_a_pool_gives_dicts_as_rows_and_its_batch_equals_its_single_copies(name):
    pytest.importorskip("envpool")
    properties = list(check(f"envpool.{name}", {"max_episode_steps": 20}))
    # EnvPool declares velocities of dm_control as positive, which they are not.
    assert {each.name for each in properties if each.failure is not None} <= {"observations"}
    assert "batch" in [each.name for each in properties]


def test_a_pool_of_several_players_is_refused():
    pytest.importorskip("envpool")
    with pytest.raises(MarlRayError, match=r"env\.id: 'envpool.IntersectionMultiAgent-v0' has 2 players, expected one"):
        make_env(EnvConfig(id="envpool.IntersectionMultiAgent-v0"))
