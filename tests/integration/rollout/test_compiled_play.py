"""The compiled loop of a batch gives what single steps give, to the last bit."""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import numba
import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config import EnvConfig, NetworkConfig
from marl_ray.envs.arrays import ArrayBatch
from marl_ray.envs.copies import make_batch
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.compiled.network import CompiledNetwork
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.rollout.actor_critic.collector import ActorCriticBatch, ActorCriticCollector
from marl_ray.rollout.actor_critic.compiled_play import has_compiled_loop
from marl_ray.rollout.protocol import CollectPlan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@numba.njit
def play(
    states: Any, alive: Any, actions: Any, rewards: Any, costs: Any, terminated: Any, truncated: Any, fault: int
) -> None:
    for c in range(len(states)):
        states[c, 0] += alive[c].any()
        for i in range(alive.shape[1]):
            states[c, 1 + i] = actions[c, i]
            rewards[c, i], costs[c, i, 0], costs[c, i, 1] = states[c, 0] / 3 + actions[c, i], 0.7, i / 3
            terminated[c, i] = states[c, 0] == (2, 9, 5)[i]
            truncated[c, i] = states[c, 0] == (3, 4, 5)[i]
        if fault == 2 and states[c, 0] == 3:
            raise ValueError("a state that the environment does not know")


@numba.njit
def observe(states: Any, copies: Any, agents: Any, rows: Any, fault: int) -> None:
    for c in copies:
        for k in range(len(agents)):
            rows[c, k, 0], rows[c, k, 1] = states[c, 0] / 3, states[c, 4] + agents[k]


@numba.njit
def allow(states: Any, masks: Any, fault: int) -> None:
    for c in range(len(states)):
        for i in range(masks.shape[1]):
            masks[c, i, int(states[c, 0]) % 2] = False
            if i < 2 and fault == 1 and states[c, 0] == 3:
                masks[c, i, :2] = False


class Relay:
    """Three agents that leave after different steps, one of them truncated before the others end.

    They have masks, two costs, and actions that begin at other numbers.
    """

    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(self, fault: int = 0):
        self.fault, self.possible_agents = fault, ["a", "b", "c"]
        actions = [spaces.Discrete(2, start=3), spaces.Discrete(2, start=3), spaces.Discrete(3)]
        self.choices = dict(zip(self.possible_agents, actions, strict=True))

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-9, 9, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return self.choices[agent]

    def batch(self, copies: int, groups: Any, signals: int) -> ArrayBatch:
        def begin(seed: int) -> np.ndarray:
            return np.array([-(seed % 3), 0, 0, 0, seed % 7], float)

        return ArrayBatch(self, copies, groups, signals, begin, play, observe, allow, (self.fault,))


TEAMS = {
    "simple_spread": (EnvConfig(id="mpe2.simple_spread_v3"), {"all": ["agent_0", "agent_1", "agent_2"]}),
    "budget_dag": (EnvConfig(id="budget_dag", kwargs={"workers": 3}), {"all": ["worker_0", "worker_1", "worker_2"]}),
    "many agents": (EnvConfig(id="mpe2.simple_spread_v3", kwargs={"N": 9}), {"all": [f"agent_{i}" for i in range(9)]}),
    "relay": (None, {"pair": ["b", "a"], "one": ["c"]}),
}


def collector(team: str, plan: CollectPlan, compiled: bool, fault: int = 0, state: Any = None) -> ActorCriticCollector:
    config, agents = TEAMS[team]
    env, groups = (Relay(fault) if config is None else make_env(config)), list(agents.values())
    envs = env.batch(4, groups, 2) if config is None else make_batch(config, 4, groups)
    assert isinstance(envs, ArrayBatch)
    if not compiled:  # numba does not know this function, so the collector takes single steps
        envs.observe_rows = partial(envs.observe_rows)
    return ActorCriticCollector(env, envs, agents, range(4), plan, 3, 2 if config is None else 1, state)


def players(team: str) -> dict[str, Player]:
    config, agents = TEAMS[team]
    env = Relay() if config is None else make_env(config)
    torch.manual_seed(0)
    made = {}
    for name, members in agents.items():
        spaces_of = env.observation_space(members[0]), env.action_space(members[0])
        model = ActorCritic(*spaces_of, NetworkConfig(hidden=(8,)), "local", None, len(members), 0)
        made[name] = Player(model, members, ValueNorm(), actor=CompiledNetwork(model.actor))
    return made


def assert_equal(batch: ActorCriticBatch, reference: ActorCriticBatch) -> None:
    assert (batch.episodes, batch.steps) == (reference.episodes, reference.steps)
    for name, expected in reference.trajectories.items():
        for field, value in vars(expected).items():
            array = getattr(batch.trajectories[name], field)
            assert array is None if value is None else torch.equal(array, value), (name, field)


SHORT = ("relay",)
"""Teams whose loop is compiled in `make test`; that of each takes seconds."""
PLANS = {
    "running": CollectPlan(11),
    "whole": CollectPlan(9, has_whole_episodes=True, group_size=2, has_greedy_copies=True),
    "truncated": CollectPlan(4, has_whole_episodes=True, group_size=2),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("team", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in TEAMS])
def test_the_compiled_loop_equals_single_steps(team, plan):
    fast, slow = (collector(team, PLANS[plan], compiled) for compiled in (True, False))
    team_players = players(team)
    assert has_compiled_loop(fast.envs, team_players, {}) and not has_compiled_loop(slow.envs, team_players, {})
    for iteration in range(3):
        assert_equal(slow.collect(team_players, iteration), fast.collect(team_players, iteration))
    assert fast.state() == slow.state()
    resumed = collector(team, PLANS[plan], True, state=fast.state())
    assert_equal(slow.collect(team_players, 3), resumed.collect(team_players, 3))


def test_groups_that_are_played_again_equal_single_steps():
    plan = CollectPlan(6, has_whole_episodes=True, group_size=2, refills=2, refill_policies=("one",))
    fast, slow = (collector("relay", plan, compiled) for compiled in (True, False))
    team_players = players("relay")
    for iteration in range(2):
        assert_equal(slow.collect(team_players, iteration), fast.collect(team_players, iteration))
    assert fast.group_sums == slow.group_sums


@pytest.mark.parametrize("compiled", [True, False])
def test_faults_of_an_environment_are_named_by_both(compiled):
    with pytest.raises(MarlRayError, match="action mask of b: expected at least one action that is possible"):
        collector("relay", CollectPlan(9), compiled, fault=1).collect(players("relay"), 0)
    with pytest.raises(ValueError, match="a state that the environment does not know"):
        collector("relay", CollectPlan(9), compiled, fault=2).collect(players("relay"), 0)


class Rules(NamedTuple):
    """A class that another process may lack."""

    length: int


@numba.njit
def stand(
    states: Any, alive: Any, actions: Any, rewards: Any, costs: Any, terminated: Any, truncated: Any, rules: Any = 1
) -> None:
    pass


@numba.njit
def number(
    states: Any, alive: Any, actions: Any, rewards: Any, costs: Any, terminated: Any, truncated: Any, rules: Any
) -> int:
    return 1


@numba.njit
def blind(states: Any, copies: Any, agents: Any, rows: Any, rules: Any = 1) -> None:
    pass


STRIDED = "void(f8[:, :], b1[:, :], i8[:, :], f4[:, :], f4[:, :, :], b1[:, :], b1[:, :], i8)"


class OwnSteps(ArrayBatch):
    """A batch that may step in a way of its own."""


@pytest.mark.parametrize(
    ("kind", "function", "parameters", "has"),
    [
        (ArrayBatch, stand, ((2, 0.5, np.arange(3)[::2]),), True),
        (OwnSteps, stand, (1,), False),
        (ArrayBatch, number, (1,), False),
        (ArrayBatch, numba.njit(STRIDED)(stand.py_func), (1,), False),
        (ArrayBatch, stand, (), False),
        (ArrayBatch, stand, (Rules(1),), False),
        (ArrayBatch, stand, (np.zeros,), False),
        (ArrayBatch, stand, ({},), False),
    ],
)
def test_the_loop_takes_functions_that_it_can_call_and_plain_parameters(kind, function, parameters, has):
    envs = kind(Relay(), 2, [["b", "a"], ["c"]], 2, lambda seed: np.zeros(1), function, blind, None, parameters)
    assert has_compiled_loop(envs, players("relay"), {}) is has
