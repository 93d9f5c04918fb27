"""Batches that a library steps: Gymnasium's vector environments, and EnvPool's pools where EnvPool is installed."""

import sys
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config import NetworkConfig
from marl_ray.config.run.sections import EnvConfig
from marl_ray.conformance.extensions.environment import check
from marl_ray.envs.batch import EnvBatch
from marl_ray.envs.copies import EnvLoop, make_batch, warm_up
from marl_ray.envs.gymnasium_env import SingleAgentEnv
from marl_ray.envs.registry import make_env
from marl_ray.envs.vector import PoolBatch, VectorBatch
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.rollout.actor_critic.collector import ActorCriticCollector
from marl_ray.rollout.protocol import CollectPlan

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
        for c in np.flatnonzero(~loop.alive[:, 0]).tolist() if t % 5 == 0 else ():
            vector.reset(c, 100 * t)
            loop.reset(c, 100 * t)
            ended += 1
    assert ended
    vector.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_gymnasium_vector_that_resets_itself_is_refused(mode):
    with pytest.raises(MarlRayError, match=f"autoreset_mode of the VectorEnv is {mode}, expected .*DISABLED"):
        VectorBatch(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], autoreset_mode=mode), AGENTS, 1)


class Counting(gymnasium.Env):
    """Pays 1 for each of the 20 steps of an episode."""

    observation_space = gymnasium.spaces.Box(0, 20, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    render_mode = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 20, False, {"cost": 2.0}


class CountingBatches(SingleAgentEnv):
    """Offers a batch of `mismatch` more copies than it is asked for, and counts what is open."""

    open: ClassVar[list[str]] = []

    def __init__(self, mismatch: int = 0, step_fails: bool = False):
        super().__init__(Counting(), "counting")
        self.mismatch, self.step_fails = mismatch, step_fails
        self.open.append("env")

    def close(self) -> None:
        self.open.remove("env")

    def batch(self, copies: int, groups: Any, signals: int) -> "CountedBatch":
        vector = SyncVectorEnv([Counting] * (copies + self.mismatch), autoreset_mode=AutoresetMode.DISABLED)
        self.open.append("batch")
        return CountedBatch(vector, groups, signals, self.step_fails)


class CountedBatch(VectorBatch):
    def __init__(self, vector: Any, groups: Any, signals: int, step_fails: bool):
        super().__init__(vector, groups, signals)
        self.step_fails = step_fails

    def step(self, actions: Any) -> Any:
        if self.step_fails:
            raise MarlRayError("no step is possible")
        return super().step(actions)

    def close(self) -> None:
        super().close()
        CountingBatches.open.remove("batch")


@pytest.fixture
def open_parts(monkeypatch, request):
    """The environments and batches that CountingBatches has open, which ids of this file name."""
    monkeypatch.setitem(sys.modules, "test_vector_batch", request.module)
    monkeypatch.setattr(CountingBatches, "open", [])
    return CountingBatches.open


def test_the_environment_that_offers_a_batch_is_closed_when_its_batch_is_taken(open_parts):
    batch = make_batch(EnvConfig(id="test_vector_batch:CountingBatches"), 3, AGENTS)
    assert open_parts == ["batch"]
    batch.close()
    assert not open_parts


def test_a_batch_of_too_many_copies_is_refused_and_closed(open_parts):
    config = EnvConfig(id="test_vector_batch:CountingBatches", kwargs={"mismatch": 1})
    with pytest.raises(MarlRayError, match=r"^env\.id: the batch of \S+ has 4 copies, expected 3$"):
        make_batch(config, 3, AGENTS)
    assert not open_parts


def test_a_check_of_an_environment_closes_a_batch_whose_step_fails(open_parts):
    config = EnvConfig(id="test_vector_batch:CountingBatches", kwargs={"step_fails": True})
    with pytest.raises(MarlRayError, match=r"^no step is possible$"):
        warm_up(config)
    assert not open_parts


def test_a_resumed_collector_counts_the_episodes_that_begin_anew_from_zero():
    env, players = CountingBatches(), {"all": Player(counting_policy(), ["agent"], ValueNorm())}

    def collector(state: Any = None) -> ActorCriticCollector:
        return ActorCriticCollector(
            env, env.batch(2, AGENTS, 1), {"all": ["agent"]}, range(2), CollectPlan(15), 0, state=state
        )

    first = collector()
    first.collect(players, 0)
    resumed = collector(first.state())
    assert resumed.lengths.tolist() == resumed.returns.tolist() == [0, 0]
    state = resumed.state()
    episodes = [*resumed.collect(players, 1).episodes, *resumed.collect(players, 2).episodes]
    # The first run's step 15 is where they begin, and their 20th step is the fifth of the second batch.
    assert [(e.copy, e.start, e.step, e.length, e.episode_return, e.costs) for e in episodes] == [
        (copy, 15, 4, 20, 20.0, (40.0,)) for copy in range(2)
    ]
    assert [e.decisions for e in episodes] == [{"all": 20}] * 2
    # A checkpoint before the next step has the episodes without a step of the old ones.
    again = collector(state)
    assert again.episode.tolist() == [0, 0] and again.history.steps == []


def counting_policy() -> ActorCritic:
    torch.manual_seed(0)
    network = NetworkConfig(hidden=(8,))
    return ActorCritic(Counting.observation_space, Counting.action_space, network, "local", None, 1)


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


@pytest.fixture
def open_pools(monkeypatch):
    """The pools that are open now."""
    envpool = pytest.importorskip("envpool")
    pools, make = [], envpool.make

    def make_counted(*args: Any, **kwargs: Any) -> Any:
        pool = make(*args, **kwargs)
        pools.append(pool)
        close = pool.close

        def close_counted() -> None:
            close()
            pools[:] = [other for other in pools if other is not pool]

        pool.close = close_counted
        return pool

    monkeypatch.setattr(envpool, "make", make_counted)
    return pools


def test_a_pool_of_several_players_is_refused_and_closed(open_pools):
    with pytest.raises(MarlRayError, match=r"env\.id: 'envpool.IntersectionMultiAgent-v0' has 2 players, expected one"):
        make_env(EnvConfig(id="envpool.IntersectionMultiAgent-v0"))
    assert not open_pools


def test_a_batch_of_a_pool_leaves_no_other_pool_open(open_pools):
    batch = make_batch(EnvConfig(id="envpool.CartPole-v1"), 3, AGENTS)
    assert isinstance(batch, PoolBatch) and open_pools == [batch.vector]
    batch.close()
    assert not open_pools


def test_a_pool_whose_batch_is_refused_is_closed(open_pools):
    with pytest.raises(MarlRayError, match=r"^groups: \[\['agent'\], \['other'\]\] expected to hold each of"):
        make_batch(EnvConfig(id="envpool.CartPole-v1"), 3, [["agent"], ["other"]])
    assert not open_pools


def test_a_copy_that_cannot_be_closed_leaves_no_other_open(monkeypatch):
    loop, closed = EnvLoop(EnvConfig(id="gymnasium.CartPole-v1"), 3, AGENTS), []

    def close(number, close_env):
        closed.append(number)
        close_env()
        if number == 1:
            raise OSError("still busy")

    for number, env in enumerate(loop.envs):
        monkeypatch.setattr(env, "close", partial(close, number, env.close))
    with pytest.raises(OSError, match="still busy"):
        loop.close()
    assert sorted(closed) == [0, 1, 2]
