"""Environment copies as arrays: the compiled gridworlds against the loop over single ones, and the loop itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import ParallelEnv

from marl_ray.config.run.sections import EnvConfig
from marl_ray.envs.batch import BatchStep, EnvBatch
from marl_ray.envs.copies import EnvLoop, make_batch
from marl_ray.envs.gridworld.batch import GridworldBatch
from marl_ray.envs.gridworld.environment import DONE, FORWARD, IDS, PICKUP, TOGGLE
from marl_ray.errors import MarlRayError

EMPTY = "MultiGrid-Empty-5x5-v0"
DOORS = "MultiGrid-RedBlueDoors-6x6-v0"
CHANCE = np.array([2, 2, 6, 2, 1, 3, 1]) / 17
"""Forward, pick up and toggle often, so that objects are carried, doors opened and goals reached."""


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """This file is importable as `test_batch`, as a user's own module would be."""
    monkeypatch.syspath_prepend(str(request.path.parent))


def names(agents: int) -> list[str]:
    return [f"agent_{i}" for i in range(agents)]


def rows_of(batch: EnvBatch, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Step the batch into rows full of nonsense, over which it must write."""
    rows = [np.full_like(group, 77) for group in like]
    batch.observe(rows)
    return rows


def assert_equal(actual: Any, expected: Any) -> None:
    for array, reference in zip(actual, expected, strict=True):
        if not np.array_equal(array, reference):  # the message costs more than the steps
            np.testing.assert_array_equal(array, reference)
        assert array.dtype == reference.dtype


VARIANTS: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({"agents": 1}, {}),
    ({"agents": 2}, {"collision": 1.0, "action": 0.1}),
    ({"agents": 2, "allow_agent_overlap": False}, {"collision": 0.3}),
    ({"agents": 3, "joint_reward": True, "agent_view_size": 5}, {"action": 0.7}),
    ({"agents": 2, "joint_reward": False, "failure_termination_mode": "any"}, {}),
    ({"agents": 3, "success_termination_mode": "all", "failure_termination_mode": "all"}, {"collision": 2.0}),
]


@pytest.mark.parametrize("env_id", IDS)
def test_gridworlds_equal_the_loop_over_them(env_id):
    copies = 3
    for kwargs, cost in VARIANTS:
        if "Blocked" in env_id and "success_termination_mode" in kwargs:
            continue  # the package fixes it
        rng, agents = np.random.default_rng(0), names(kwargs["agents"])
        groups = [agents[1:], agents[:1]] if len(agents) > 1 else [agents]
        config = EnvConfig(id=env_id, kwargs=kwargs | {"max_steps": 70}, cost=cost)
        fast, slow = make_batch(config, copies, groups), EnvLoop(config, copies, groups)
        assert isinstance(fast, GridworldBatch)
        for c in range(copies):
            fast.reset(c, c)
            slow.reset(c, c)
        like = [np.zeros((copies, len(g), len(fast.envs[0].world.nvec)), np.int8) for g in groups]
        episodes = 0
        for t in range(160):
            actions = [rng.choice(7, (copies, len(group)), p=CHANCE) for group in groups]
            assert_equal(fast.step(actions), slow.step(actions))
            assert_equal([fast.alive], [slow.alive])
            assert_equal(rows_of(fast, like), rows_of(slow, like))
            # One copy waits with nobody alive before it continues.
            for c in np.flatnonzero(~fast.alive.any(1)):
                if c > 0 or t % 5 == 0:
                    episodes += 1
                    fast.reset(int(c), 1000 * t + int(c))
                    slow.reset(int(c), 1000 * t + int(c))
            assert_equal(rows_of(fast, like), rows_of(slow, like))
        assert episodes >= 2 * copies and fast.action_masks == [None] * len(groups)
        for c in range(copies):
            np.testing.assert_array_equal(fast.grids[c], slow.envs[c].world.cells)
            np.testing.assert_array_equal(fast.states[c], slow.envs[c].world.rows)
            assert fast.envs[c].world.agent_states.terminated.tolist() == fast.states[c, :, 5].tolist()
        fast.close()
        slow.close()


def test_open_doors_and_carried_objects_survive_compiled_steps():
    """Objects are used in Python and the steps between are compiled: both must see one state."""
    config = EnvConfig(id="MultiGrid-Playground-v0", kwargs={"agents": 2, "max_steps": 600})
    fast, slow = GridworldBatch(config, 3, [names(2)]), EnvLoop(config, 3, [names(2)])
    rng, used = np.random.default_rng(1), 0
    for c in range(3):
        fast.reset(c, c)
        slow.reset(c, c)
    like = [np.zeros((3, 2, 148), np.int8)]
    for _ in range(599):
        actions = [rng.choice(7, (3, 2), p=CHANCE)]
        before = fast.grids.copy()
        assert_equal(fast.step(actions), slow.step(actions))
        assert_equal(rows_of(fast, like), rows_of(slow, like))
        used += (before != fast.grids).any()
    assert used > 20


@settings(max_examples=20)
@given(
    env_id=st.sampled_from([EMPTY, DOORS, "MultiGrid-BlockedUnlockPickup-v0", "toys.envs:countdown"]),
    seed=st.integers(0, 2**31),
    length=st.integers(0, 70),
)
def test_replay_equals_having_played(env_id, seed, length):
    toy = env_id.startswith("toy")
    agents, n = (["a", "b"], 2) if toy else (names(2), 7)
    config = EnvConfig(id=env_id, kwargs={"length": 80} if toy else {"agents": 2})
    groups = [[agents[1]], [agents[0]]]
    played, replayed = make_batch(config, 2, groups), make_batch(config, 2, groups)
    rng = np.random.default_rng(seed)
    like = [np.zeros((2, 1, 2 if toy else len(played.envs[0].world.nvec)), np.int8) for _ in groups]  # type: ignore[attr-defined]
    for batch in (played, replayed):
        batch.reset(0, 5)
        batch.reset(1, 6)
    history = []
    for _ in range(length):
        history.append([rng.integers(n, size=(2, 1)) for _ in groups])
        played.step(history[-1])
    for c in range(2):
        replayed.replay(c, 5 + c, [[group[c] for group in actions] for actions in history])
    for _ in range(15):
        assert_equal([replayed.alive], [played.alive])
        assert_equal(rows_of(replayed, like), rows_of(played, like))
        actions = [rng.integers(n, size=(2, 1)) for _ in groups]
        assert_equal(replayed.step(actions), played.step(actions))


def test_observe_only_some_copies():
    batch = make_batch(EnvConfig(id=EMPTY, kwargs={"agents": 2}), 3, [names(2)])
    for c in range(3):
        batch.reset(c, c)
    rows = [np.full((3, 2, 148), 77, np.int8)]
    batch.observe(rows, [1])
    assert (rows[0][[0, 2]] == 77).all() and rows[0][1].max() < 12
    batch.observe(rows, [])
    assert (rows[0][[0, 2]] == 77).all()


@pytest.mark.parametrize("actions", [[7, DONE], [-1, DONE], [DONE, 9]])
def test_an_impossible_action_is_an_error(actions):
    batch = make_batch(EnvConfig(id=EMPTY, kwargs={"agents": 2}), 1, [names(2)])
    batch.reset(0, 0)
    with pytest.raises(ValueError, match=r"action -?\d of agent_\d is not in Discrete\(7\)"):
        batch.step([np.array([actions])])


def test_layouts_that_never_vary_are_kept_and_others_drawn():
    fixed, drawn = (
        make_batch(EnvConfig(id=env_id, kwargs={"agents": 2}), 1, [names(2)])
        for env_id in (EMPTY, "MultiGrid-Empty-Random-5x5-v0")
    )
    for batch in (fixed, drawn):
        batch.reset(0, 0)
    assert isinstance(fixed, GridworldBatch) and fixed.envs[0].world.start is not None
    assert isinstance(drawn, GridworldBatch) and drawn.envs[0].world.start is None
    fixed.step([np.full((1, 2), FORWARD)])
    fixed.reset(0, 1)
    assert fixed.states[0, :, 3:5].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("start", "where"),
    [((0, 0), r"\(0, 0\), on a wall"), ((9, 9), r"\(9, 9\) in direction \d, outside"), ((-1, 2), r"\(-1, 2\) in")],
)
def test_an_impossible_start_is_named(start, where):
    batch = make_batch(EnvConfig(id=EMPTY, kwargs={"agent_start_pos": start}), 1, [names(1)])
    with pytest.raises(
        MarlRayError, match=r"env\.kwargs: MultiGrid-Empty-5x5-v0 cannot start \(agent_0 starts at " + where
    ):
        batch.reset(0, 0)


def test_no_room_and_wrong_groups_are_named():
    batch = make_batch(EnvConfig(id="MultiGrid-Empty-Random-5x5-v0", kwargs={"agents": 10}), 1, [names(10)])
    with pytest.raises(MarlRayError, match=r"env\.kwargs: MultiGrid-Empty-Random-5x5-v0 has no room"):
        batch.reset(0, 0)
    for env_id in (EMPTY, "toys.envs:countdown"):
        with pytest.raises(MarlRayError, match="groups: "):
            make_batch(EnvConfig(id=env_id), 1, [["agent_0", "a"]])
    with pytest.raises(MarlRayError, match=r"env\.cost: a MultiGrid environment has one cost signal, expected 2"):
        make_batch(EnvConfig(id=EMPTY, cost={"action": 1}), 1, [names(1)], signals=2)
    unpriced = make_batch(EnvConfig(id=EMPTY), 1, [names(1)], signals=2)
    unpriced.reset(0, 0)
    assert unpriced.step([np.array([[TOGGLE]])]).costs.shape == (1, 1, 2)


class Scripted(ParallelEnv):
    """Two agents with one observation each, from 3 on; infos are given, and every action must be a Python integer."""

    metadata = {"name": "scripted", "render_modes": []}

    def __init__(self, infos: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]] | None = None):
        self.infos, self.after = infos, after or {}
        self.possible_agents = ["a", "b"]
        self.agents: list[str] = []
        self.spaces: tuple[spaces.Space, spaces.Space] = spaces.Discrete(5, start=3), spaces.Discrete(3)

    def observation_space(self, agent: str) -> spaces.Space:
        return self.spaces[0]

    def action_space(self, agent: str) -> spaces.Space:
        return self.spaces[1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.time, self.agents = 0, ["a", "b"]
        return {"a": 3, "b": 4}, {agent: self.infos.get(agent, {}) for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert list(actions) == self.agents and all(type(action) is int for action in actions.values())
        self.time += 1
        alive, self.agents = self.agents, ["b"] if self.time < 3 else []
        observations = dict.fromkeys(alive, 5)
        ended = {agent: agent == "a" or self.time == 3 for agent in alive}
        rewards = {agent: float(actions[agent]) for agent in alive}
        return observations, rewards, ended, ended, {agent: self.after.get(agent, {}) for agent in alive}


class Pointing(Scripted):
    """The same with two-dimensional observations and continuous actions, the rewards."""

    def __init__(self) -> None:
        super().__init__({"b": {"action_mask": [1]}})
        self.spaces = spaces.Box(-1, 1, (2, 2)), spaces.Box(-1, 1, (2,))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.time, self.agents = 0, ["a"]
        return {"a": np.arange(4.0).reshape(2, 2)}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.agents = []
        return {"a": np.ones((2, 2))}, {"a": actions["a"].sum()}, {"a": False}, {"a": True}, {}


def make_scripted(infos: dict[str, Any] | None = None, after: dict[str, Any] | None = None, **options: Any) -> EnvBatch:
    kwargs = {"infos": infos or {}, "after": after or {}}
    return make_batch(EnvConfig(id="test_batch:Scripted", kwargs=kwargs), 2, [["b"], ["a"]], **options)


def play(batch: EnvBatch, b: int = 1, a: int = 2) -> BatchStep:
    return batch.step([np.array([[b], [b]]), np.array([[a], [a]])])


def test_agents_that_leave_early_are_not_alive_and_earn_nothing():
    batch = make_scripted()
    rows = [np.full((2, 1, 1), 9, np.int8) for _ in range(2)]
    assert not batch.alive.any() and not play(batch).rewards.any()
    batch.reset(1, 0)
    batch.observe(rows)
    assert batch.alive.tolist() == [[False, False], [True, True]]
    assert [row.ravel().tolist() for row in rows] == [[0, 1], [0, 0]]  # groups are [b], [a]; categories from zero
    step = play(batch)
    assert step.rewards.tolist() == [[0, 0], [2, 1]]
    assert step.terminated.tolist() == [[False, False], [True, False]] and not step.truncated.any()
    batch.observe(rows)
    assert [row.ravel().tolist() for row in rows] == [[0, 2], [0, 2]]  # the last observation of a
    assert batch.alive.tolist() == [[False, False], [False, True]]
    step = play(batch)
    batch.observe(rows)
    assert step.rewards.tolist() == [[0, 0], [0, 1]] and not step.terminated.any()
    assert [row.ravel().tolist() for row in rows] == [[0, 2], [0, 0]]
    assert play(batch).terminated.tolist() == [[False, False], [False, True]] and not batch.alive.any()
    batch.close()


def test_action_masks_are_arrays_of_the_agents_that_send_some():
    assert make_scripted().action_masks == [None, None]
    batch = make_scripted(
        {"b": {"action_mask": np.array([1, 0, 1], np.int8)}}, {"a": {"action_mask": [True, False, False]}}
    )
    batch.reset(0, 0)
    (of_b, of_a) = batch.action_masks
    assert of_a is None and of_b is not None and of_b.dtype == bool
    assert of_b.tolist() == [[[True, False, True]], [[True, True, True]]]
    batch.reset(1, 0)
    assert of_b[1].tolist() == [[True, False, True]]
    play(batch)  # b's info has no mask now; a has one but is gone
    assert of_b.all() and batch.action_masks[1] is None


@pytest.mark.parametrize("mask", [[1, 0], [0, 0, 0], "all", [0.5, 0.5, 0.0]])
def test_wrong_masks_are_named(mask):
    with pytest.raises(MarlRayError, match=r'infos\["action_mask"\] of b .*expected 3 flags'):
        make_scripted({"b": {"action_mask": mask}}).reset(0, 0)


def test_a_cost_is_a_number_or_one_for_each_signal():
    for signals, cost, expected in [
        (1, 0.5, [0.5]),
        (1, 2, [2]),
        (1, np.float32(0.25), [0.25]),
        (1, [3], [3]),
        (2, (1, 0.5), [1, 0.5]),
        (2, np.array([0, 4]), [0, 4]),
    ]:
        batch = make_scripted(after={"b": {"cost": cost}}, signals=signals)
        batch.reset(0, 0)
        costs = play(batch).costs
        assert costs.shape == (2, 2, signals) and costs.dtype == np.float32
        assert costs[0].tolist() == [[0] * signals, expected] and not costs[1].any()


@pytest.mark.parametrize(
    ("signals", "cost", "expected"),
    [
        (1, "high", "'high': expected a number"),
        (1, None, "None: expected a number"),
        (1, [1, 2], r"\[1, 2\]: expected a number"),
        (2, 0.5, "0.5: expected a sequence of 2 numbers"),
        (2, [1, 2, 3], r"\[1, 2, 3\]: expected a sequence of 2 numbers"),
        (2, [[1], [2, 3]], r"\[\[1\], \[2, 3\]\]: expected a sequence of 2 numbers"),
    ],
)
def test_wrong_costs_are_named(signals, cost, expected):
    batch = make_scripted(after={"b": {"cost": cost}}, signals=signals)
    batch.reset(0, 0)
    with pytest.raises(MarlRayError, match=rf'infos\["cost"\] of b is {expected}') as caught:
        play(batch)
    assert "\n" not in str(caught.value)


def test_continuous_actions_and_flattened_observations():
    batch = make_batch(EnvConfig(id="test_batch:Pointing"), 1, [["a", "b"]])
    batch.reset(0, 0)
    rows = [np.full((1, 2, 4), 9, np.float32)]
    batch.observe(rows)
    assert rows[0][0].tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    step = batch.step([np.array([[[0.5, 0.25], [7, 7]]], np.float32)])
    assert step.rewards.tolist() == [[0.75, 0]] and step.truncated.tolist() == [[True, False]]


class Masked(Pointing):
    """The same with a mask of actions that have none."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed, options)[0], {"a": {"action_mask": [1]}}


def test_masks_need_a_discrete_space():
    batch = make_batch(EnvConfig(id="test_batch:Masked"), 1, [["a", "b"]])
    with pytest.raises(MarlRayError, match=r'infos\["action_mask"\] of a: expected none, its action space is Box'):
        batch.reset(0, 0)


def test_objects_are_used_from_arrays():
    """A key taken through the batch is in the arrays and in the package's object alike."""
    batch = make_batch(EnvConfig(id="MultiGrid-LockedHallway-2Rooms-v0"), 1, [names(1)])
    assert isinstance(batch, GridworldBatch)
    rng, carried = np.random.default_rng(0), 0
    batch.reset(0, 0)
    for _ in range(300):
        batch.step([rng.choice([0, 1, FORWARD, PICKUP], (1, 1), p=[0.2, 0.2, 0.4, 0.2])])
        agent = batch.envs[0].world.agents[0]
        carried += agent.state.carrying is not None
        assert (agent.state.carrying is not None) == (batch.states[0, 0, 6] != 1)
    assert carried > 0
