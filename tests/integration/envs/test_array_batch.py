"""Environments as functions on arrays: the particle worlds of mpe2 and CartPole against their packages, step for step."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from marl_ray.config.run.sections import EnvConfig
from marl_ray.conformance.extensions.environment import check
from marl_ray.envs.arrays import ArrayBatch
from marl_ray.envs.budget.dag import BudgetDag
from marl_ray.envs.copies import EnvLoop, make_batch, warm_up
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError

WORLDS: list[tuple[str, dict[str, Any]]] = [
    ("mpe2.simple_spread_v3", {}),
    ("mpe2.simple_spread_v3", {"N": 5, "local_ratio": 0.2, "max_cycles": 60, "terminate_on_success": True}),
    ("mpe2.simple_tag_v3", {}),
    ("mpe2.simple_tag_v3", {"num_good": 2, "num_adversaries": 4, "num_obstacles": 3, "terminate_on_success": True}),
    ("mpe2.simple_reference_v3", {"local_ratio": 0.3}),
    ("gymnasium.CartPole-v1", {}),
    ("gymnasium.CartPole-v1", {"sutton_barto_reward": True, "max_episode_steps": 9}),
    ("budget_dag", {}),
    ("budget_dag", {"workers": 3, "budget": 17.0, "observe_budget": False}),
]


def groups_of(env: Any) -> list[list[str]]:
    """Agents by their spaces, the last one first."""
    kinds: dict[str, list[str]] = {}
    for agent in reversed(env.possible_agents):
        kinds.setdefault(f"{env.observation_space(agent)}{env.action_space(agent)}", []).append(agent)
    return list(kinds.values())


@pytest.mark.parametrize(("env_id", "kwargs"), WORLDS)
def test_batches_equal_the_loop_step_for_step(env_id, kwargs):
    copies, config = 6, EnvConfig(id=env_id, kwargs=kwargs)
    env = make_env(config)
    groups = groups_of(env)
    fast, slow = make_batch(config, copies, groups), EnvLoop(config, copies, groups)
    assert isinstance(fast, ArrayBatch)
    sizes = [env.observation_space(group[0]).shape[0] for group in groups]
    rows, expected = (
        [np.zeros((copies, len(g), n), np.float32) for g, n in zip(groups, sizes, strict=True)] for _ in "ab"
    )
    rng = np.random.default_rng(0)
    for c in range(copies):
        fast.reset(c, 10 + c)
        slow.reset(c, 10 + c)
    for t in range(70):
        fast.observe(rows)
        slow.observe(expected)
        for array, reference in zip(rows, expected, strict=True):
            np.testing.assert_array_equal(array, reference)
        actions = [rng.integers(int(env.action_space(group[0]).n), size=(copies, len(group))) for group in groups]
        if t % 3 and "CartPole" not in env_id:  # towards a corner, so that agents touch and leave the screen
            actions = [np.where(a % 2, 2, 4 if env_id.startswith("mpe2") else 0) for a in actions]
        for array, reference in zip(fast.step(actions), slow.step(actions), strict=True):
            np.testing.assert_array_equal(array, reference)
        np.testing.assert_array_equal(fast.alive, slow.alive)
        for mask, reference_mask in zip(fast.action_masks, slow.action_masks, strict=True):
            np.testing.assert_array_equal(mask, reference_mask)
        for c in np.flatnonzero(~fast.alive.any(1)).tolist():
            fast.reset(c, 1000 * t + c)
            slow.reset(c, 1000 * t + c)
    slow.close()


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("mpe2.simple_spread_v3", {"continuous_actions": True}),
        ("mpe2.simple_spread_v3", {"num_agent_neighbors": 1}),
        ("mpe2.simple_spread_v3", {"curriculum": True}),
        ("gymnasium.CartPole-v1", {"max_episode_steps": -1}),
        ("gymnasium.CartPole-v1", {"render_mode": "rgb_array"}),
        ("gymnasium.CartPole-v0", {}),
    ],
)
def test_a_world_with_other_arguments_runs_in_the_loop(env_id, kwargs):
    config = EnvConfig(id=env_id, kwargs=kwargs)
    assert isinstance(make_batch(config, 1, [make_env(config).possible_agents]), EnvLoop)


def test_an_environment_whose_id_begins_with_that_of_a_compiled_one_is_not_replaced_by_it():
    """Gymnasium takes any number as a version, and a user's CartPole-v10 has rules of its own."""
    gymnasium.register("CartPole-v10", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=7)
    config = EnvConfig(id="gymnasium.CartPole-v10")
    assert isinstance(make_batch(config, 1, [make_env(config).possible_agents]), EnvLoop)


class Careless(BudgetDag):
    """A budget whose batch draws other luck than its `reset`."""

    def batch(self, copies: int, groups: Any, signals: int) -> Any:
        batch = super().batch(copies, groups, signals)
        assert batch is not None
        right = batch.begin
        batch.begin = lambda seed: right(seed + 1)
        return batch


class Narrow(BudgetDag):
    """A budget whose batch shows a policy its first agent alone."""

    def batch(self, copies: int, groups: Any, signals: int) -> Any:
        batch = super().batch(copies, groups, signals)
        assert batch is not None
        observe = batch.observe_rows

        def observe_one(states: Any, seen: Any, agents: Any, rows: Any, *parameters: Any) -> None:
            observe(states, seen, agents[:1], rows[:, :1], *parameters)

        batch.observe_rows = observe_one
        return batch


@pytest.mark.parametrize(
    ("env_id", "failed"),
    [("budget_dag", []), ("test_array_batch:Careless", ["batch"]), ("test_array_batch:Narrow", ["batch"])],
)
def test_the_check_compares_a_batch_with_the_environment(env_id, failed, monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    properties = list(check(env_id, {"workers": 2}))
    assert [each.name for each in properties if each.failure is not None] == failed
    assert [each.name for each in properties[-2:]] == ["batch", "close"]


def test_an_impossible_action_is_named():
    batch = make_batch(EnvConfig(id="budget_dag"), 1, [["worker_0"]])
    batch.reset(0, 0)
    with pytest.raises(ValueError, match="action 3 of worker_0 is not in 0 to 2"):
        batch.step([np.array([[3]])])


@pytest.mark.parametrize(("env_id", "kwargs"), [WORLDS[0], WORLDS[-1]])
def test_a_replayed_copy_goes_on_as_one_that_played(env_id, kwargs):
    config = EnvConfig(id=env_id, kwargs=kwargs)
    groups = [make_env(config).possible_agents]
    played, replayed = make_batch(config, 2, groups), make_batch(config, 2, groups)
    rng, history = np.random.default_rng(0), []
    for c in range(2):
        played.reset(c, c)
        replayed.reset(c, 9)
    for _ in range(5):
        history.append([rng.integers(3, size=(2, len(groups[0])))])
        played.step(history[-1])
    replayed.replay(1, 1, [[group[1] for group in actions] for actions in history])
    np.testing.assert_array_equal(replayed.alive[1], played.alive[1])
    actions = [rng.integers(3, size=(2, len(groups[0])))]
    for left, right in zip(replayed.step(actions), played.step(actions), strict=True):
        np.testing.assert_array_equal(left[1], right[1])


class Relay(ParallelEnv):
    """Two agents with different numbers of actions, of which the first leaves earlier.

    It leaves after two steps, the second one after four. The step's number is the reward and the cost, and no agent may
    repeat its last action.
    """

    metadata = {"name": "relay"}

    def __init__(self, fault: str = ""):
        self.fault, self.possible_agents = fault, ["first", "second"]
        self.agents: list[str] = []
        self.views = {agent: spaces.Box(0, 9, (1,), np.float32) for agent in self.possible_agents}
        self.choices = {"first": spaces.Discrete(2), "second": spaces.Discrete(4)}

    def observation_space(self, agent: str) -> Any:
        return self.views[agent]

    def action_space(self, agent: str) -> Any:
        return self.choices[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = list(self.possible_agents), 0
        return self._seen({agent: {} for agent in self.agents})

    def step(self, actions: dict[str, int]) -> Any:
        self.steps += 1
        ends = {agent: self.steps == 2 * self.possible_agents.index(agent) + 2 for agent in actions}
        self.agents = [agent for agent in actions if not ends[agent]]
        seen, infos = self._seen({agent: {"cost": float(self.steps)} for agent in actions}, actions)
        return seen, dict.fromkeys(actions, float(self.steps)), ends, dict.fromkeys(actions, False), infos

    def _seen(self, infos: Any, actions: Mapping[str, int] = {}) -> Any:
        for agent in self.agents:
            mask = [choice != actions.get(agent) for choice in range(int(self.choices[agent].n))]
            infos[agent]["action_mask"] = np.array(mask)
        return {agent: np.array([self.steps / 2], np.float32) for agent in infos}, infos

    def batch(self, copies: int, groups: Any, signals: int) -> Any:
        def begin(seed: int) -> np.ndarray:
            return np.array([0, -1, -1] + [0] * (seed > 99))  # integers, though `play` writes halves

        def play(
            states: Any, alive: Any, actions: Any, rewards: Any, costs: Any, terminated: Any, truncated: Any
        ) -> None:
            states[:, 0] += 0.5 * alive.any(1)
            states[:, 1:] = actions
            rewards[:], costs[:] = 2 * states[:, :1], 2 * states[:, :1, None]
            terminated[:] = states[:, :1] >= [1, 2]

        def observe(states: Any, copies: Any, agents: Any, rows: Any) -> None:
            rows[copies] = states[copies, :1, None]

        def allow(states: Any, masks: Any) -> None:
            for c, i in np.ndindex(masks.shape[:2]):
                if (last := int(states[c, 1 + i])) >= 0:
                    masks[c, i, last] = False
            if self.fault == "none":
                masks[:] = False

        return ArrayBatch(self, copies + (self.fault == "copies"), groups, signals, begin, play, observe, allow)


class Strict(Relay):
    """The second agent may begin with its last action alone; another one is an error."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        seen, infos = super().reset(seed, options)
        infos["second"]["action_mask"] = np.arange(4) == 3
        return seen, infos

    def step(self, actions: dict[str, int]) -> Any:
        if not self.steps and actions["second"] != 3:
            raise ValueError("the second agent's first action is not possible")
        return super().step(actions)

    def batch(self, copies: int, groups: Any, signals: int) -> Any:
        batch = super().batch(copies, groups, signals)
        play, allow = batch.step_copies, batch.allow

        def play_possible(states: Any, alive: Any, actions: Any, *results: Any) -> None:
            if ((states[:, 0] == 0) & (actions[:, 1] != 3)).any():
                raise ValueError("the second agent's first action is not possible")
            play(states, alive, actions, *results)

        def allow_last(states: Any, masks: Any) -> None:
            allow(states, masks)
            masks[states[:, 0] == 0, 1, :3] = False

        batch.step_copies, batch.allow = play_possible, allow_last
        return batch


def test_a_warm_up_takes_actions_that_are_possible(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    warm_up(EnvConfig(id="test_array_batch:Strict"))


def test_a_batch_of_agents_that_leave_and_have_other_actions_equals_the_loop(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    properties = list(check("test_array_batch:Relay", {}))
    assert [(each.name, each.failure) for each in properties if each.failure is not None] == []
    assert properties[-2].name == "batch"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("none", "action mask of first: expected at least one action that is possible"),
        ("copies", r"env\.id: the batch of .*Relay has 4 copies, expected 3"),
    ],
)
def test_a_faulty_batch_is_refused(fault, words, monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    with pytest.raises(MarlRayError, match=words):
        make_batch(EnvConfig(id="test_array_batch:Relay", kwargs={"fault": fault}), 3, [["first"], ["second"]]).reset(
            0, 0
        )


def test_wrong_shapes_are_named():
    relay = Relay()
    groups = [["first"], ["second"]]
    with pytest.raises(MarlRayError, match=r"the state of seed 100 has shape \(4,\), expected \(3,\)"):
        relay.batch(1, groups, 1).reset(0, 100)
    loop = EnvLoop(EnvConfig(id="test_array_batch:Relay"), 1, groups, first=relay)
    loop.observations = [{"first": np.zeros(1), "second": np.zeros(3)}]
    with pytest.raises(MarlRayError, match="the observation of second has 3 numbers, its space 1"):
        loop.observe([np.zeros((1, 1, 1), np.float32) for _ in groups])
