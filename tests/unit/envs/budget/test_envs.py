"""The sub-task chain against its exact optima, and hard limits under any play."""

import itertools
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test, parallel_seed_test

from marl_ray.envs.budget.dag import (
    EFFORTS,
    TASK_COUNT,
    BudgetDag,
    best_capped_reward,
    best_constant_reward,
    best_expected_reward,
)
from marl_ray.envs.budget.wrapper import REMAINING_LEVELS, HardBudget, affordable
from marl_ray.envs.gymnasium_env import single_agent
from marl_ray.errors import MarlRayError

CHEAPEST = TASK_COUNT * EFFORTS[0].cost
PLANS = np.array(list(itertools.product(range(3), repeat=TASK_COUNT)))
PLAN_COSTS = np.array([effort.cost for effort in EFFORTS])[PLANS].sum(1)
PLAN_REWARDS = np.array([effort.success for effort in EFFORTS])[PLANS].sum(1)


class Market(ParallelEnv):
    """Buyers `b0`, `b1`, ... choose among offers at once; buyer i leaves after i + 2 steps.

    `prices` is (T, n, A, S), and `least_cost_to_go` is that of the plan `cheap` (T, n), which takes the offers cheapest
    in the first signal.
    """

    metadata = {"name": "market"}

    def __init__(self, prices: np.ndarray, space: spaces.Space[Any] | None = None, to_go: bool = True):
        self.prices, self.to_go = prices, to_go
        self.cheap = prices[..., 0].argmin(-1)
        self.possible_agents = [f"b{i}" for i in range(prices.shape[1])]
        self.agents: list[str] = []
        self.space, self.offers = space or spaces.Discrete(9, start=1), spaces.Discrete(prices.shape[2], start=1)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.space

    def action_space(self, agent: str) -> spaces.Discrete[Any]:
        return self.offers

    def life(self, i: int) -> int:
        return min(i + 2, len(self.prices))

    def cheapest(self, i: int, start: int = 0) -> np.ndarray:
        """(S,) cost of the plan `cheap` for buyer i from a step on."""
        return np.array([self.prices[t, i, self.cheap[t, i]] for t in range(start, self.life(i))]).sum(0)

    def plan_cost(self) -> np.ndarray:
        return np.sum([self.cheapest(i) for i in range(len(self.possible_agents))], 0)

    def _infos(self, costs: dict[str, Any]) -> dict[str, Any]:
        infos: dict[str, Any] = {a: {"cost": cost} for a, cost in costs.items()}
        for agent in self.agents:
            prices = self.prices[self.time, int(agent[1:])]
            to_go = (
                {"least_cost_to_go": 0 * prices + self.cheapest(int(agent[1:]), self.time + 1)} if self.to_go else {}
            )
            infos[agent] |= {"next_costs": prices} | to_go
        return infos

    def _observe(self, agents: list[str]) -> dict[str, Any]:
        value = np.full(self.space.shape, self.time + 1, self.space.dtype) if self.space.shape else self.time + 1
        return dict.fromkeys(agents, value)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.time, self.agents, self.total = 0, list(self.possible_agents), np.zeros(self.prices.shape[-1])
        return self._observe(self.agents), self._infos(dict.fromkeys(self.agents, np.zeros_like(self.total)))

    def step(self, actions: dict[str, int]) -> Any:
        alive = self.agents
        costs = {a: self.prices[self.time, int(a[1:]), int(actions[a]) - 1] for a in alive}
        self.total = self.total + np.sum(list(costs.values()), 0)
        self.time += 1
        over = {a: self.time >= self.life(int(a[1:])) for a in alive}
        self.agents = [a for a in alive if not over[a]]
        result = self._observe(alive), dict.fromkeys(alive, 0.0), over, dict.fromkeys(alive, False)
        return *result, self._infos(costs)


class Unpriced(Market):
    """Announces costs of every signal, then reports a single one."""

    def step(self, actions: dict[str, int]) -> Any:
        *result, infos = super().step(actions)
        return *result, {agent: info | {"cost": 1.0} for agent, info in infos.items()}


def play(env: Any, choose: Any, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[np.ndarray]]:
    """Observations, infos and team costs of an episode; `choose(mask)` picks an index of the mask."""
    observations, infos = env.reset(seed=seed)
    seen, info_rows, costs = [observations], [infos], []
    while env.agents:
        actions = {a: env.action_space(a).start + choose(infos[a]["action_mask"]) for a in env.agents}
        observations, _, _, _, infos = env.step(actions)
        seen.append(observations)
        info_rows.append(infos)
        costs.append(np.sum([np.atleast_1d(info["cost"]) for info in infos.values()], 0))
    return seen, info_rows, costs


def dearest(mask: np.ndarray) -> int:
    return int(np.flatnonzero(mask)[-1])


BUILDERS: dict[str, Any] = {f"{n} workers": partial(BudgetDag, n) for n in (1, 2, 8)}
BUILDERS |= {f"{name}, limited": lambda build=build: HardBudget(build(), [30]) for name, build in BUILDERS.items()}
BUILDERS["CartPole"] = partial(single_agent, "CartPole-v1")


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_budget_environments_keep_pettingzoos_contract(build):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # style advice of the tests; failures are assertions
        parallel_api_test(build(), num_cycles=600)
        parallel_seed_test(build, num_cycles=40)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("observe_budget", [True, False])
def test_an_episode_of_the_chain_gives_the_turn_to_one_worker_after_the_other(workers, observe_budget):
    env = BudgetDag(workers, 40.0, observe_budget)
    observations, infos = env.reset(seed=5)
    spent = 0
    for task in range(TASK_COUNT):
        assert env.agents == [f"worker_{i}" for i in range(workers)]
        for i, agent in enumerate(env.agents):
            has_turn = i == task % workers
            expected = [*np.eye(TASK_COUNT)[task], has_turn, *[1 - spent / 40] * observe_budget]
            np.testing.assert_allclose(observations[agent], expected, rtol=1e-6)
            assert observations[agent] in env.observation_space(agent)
            info = infos[agent]
            assert info["action_mask"].dtype == np.int8 and info["next_costs"].dtype == np.float32
            assert info["action_mask"].tolist() == ([1, 1, 1] if has_turn else [1, 0, 0])
            assert info["next_costs"].tolist() == ([1, 3, 10] if has_turn else [0, 0, 0])
            assert info["least_cost_to_go"].tolist() == [TASK_COUNT - 1 - task if has_turn else 0] * 3
        effort = task % 3
        # Out of turn any action does nothing.
        actions = {agent: effort if i == task % workers else 2 for i, agent in enumerate(env.agents)}
        observations, rewards, terminated, truncated, infos = env.step(actions)
        spent += EFFORTS[effort].cost
        costs = [info["cost"] for info in infos.values()]
        assert costs == [EFFORTS[effort].cost if i == task % workers else 0 for i in range(workers)]
        assert len(set(rewards.values())) == 1 and rewards["worker_0"] in (0.0, 1.0)
        assert set(terminated.values()) == {task == TASK_COUNT - 1} and set(truncated.values()) == {False}
    assert env.agents == [] and all(not row[:9].any() for row in observations.values())


@pytest.mark.parametrize("effort", range(3))
def test_an_effort_succeeds_as_often_as_it_says(effort):
    env = BudgetDag()
    rewards = []
    for seed in range(1500):
        env.reset(seed=seed)
        rewards += [env.step({"worker_0": effort})[1]["worker_0"] for _ in range(TASK_COUNT)]
    p = EFFORTS[effort].success
    assert abs(np.mean(rewards) - p) < 4 * np.sqrt(p * (1 - p) / len(rewards))


def test_overspending_stays_in_the_space():
    env = BudgetDag(budget=7.3)
    env.reset(seed=0)
    for _ in range(TASK_COUNT):
        observation = env.step({"worker_0": 2})[0]["worker_0"]
        assert observation in env.observation_space("worker_0")
    assert observation[-1] == pytest.approx(1 - 80 / 7.3)


@pytest.mark.parametrize("kwargs", [{"workers": 0}, {"workers": 9}, {"budget": 0.0}, {"budget": float("inf")}])
def test_senseless_arguments_are_named(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        BudgetDag(**kwargs)


def test_the_optima_are_the_known_ones():
    assert best_expected_reward(30) == pytest.approx(6.528571, abs=1e-6)
    assert best_capped_reward(30) == pytest.approx(6.4)
    assert [best_constant_reward(budget) for budget in (8, 30, 79, 80)] == pytest.approx([4.8, 6.4, 6.4, 7.6])


@pytest.mark.parametrize("budget", [8, 8.5, 11, 24, 29.9, 30, 31, 47.25, 80, 200])
def test_optima_equal_brute_force(budget):
    """All plans, and all mixtures of two: an optimum of a linear programme with one constraint mixes no more."""
    assert best_capped_reward(budget) == pytest.approx(PLAN_REWARDS[budget >= PLAN_COSTS].max())
    points = np.unique(np.stack([PLAN_COSTS, PLAN_REWARDS], 1).round(9), axis=0)
    best = points[points[:, 0] <= budget, 1].max()
    for cost_a, reward_a in points[points[:, 0] <= budget]:
        for cost_b, reward_b in points[points[:, 0] > budget]:
            share = (budget - cost_a) / (cost_b - cost_a)
            best = max(best, reward_a + share * (reward_b - reward_a))
    assert best_expected_reward(budget) == pytest.approx(best)


@pytest.mark.parametrize("solve", [best_expected_reward, best_capped_reward, best_constant_reward])
def test_no_plan_is_cheap_enough(solve):
    with pytest.raises(MarlRayError, match=r"^budget: 7\.9 is less than 8, the cost of the cheapest plan$"):
        solve(7.9)


@given(st.integers(CHEAPEST, 85), st.sampled_from([1, 2, 8]), st.randoms(use_true_random=False), st.booleans())
def test_no_chain_costs_more_than_its_limit(limit, workers, random, obedient):
    """Not even where players choose what the masks forbid: that is replaced."""
    env = HardBudget(BudgetDag(workers), [limit])
    _, _, costs = play(env, lambda mask: random.choice(np.flatnonzero(mask | (not obedient)).tolist()))
    assert len(costs) == TASK_COUNT and np.sum(costs) <= limit


@pytest.mark.parametrize(("limit", "best"), [(5, 8), (8, 8), (9, 8), (10, 10), (30, 30), (79, 73), (80, 80)])
@pytest.mark.parametrize("workers", [1, 8])
def test_masks_leave_exactly_what_is_affordable(limit, best, workers):
    """Not only safe: in every state each action is allowed from which a plan within the limit continues.

    The cheapest is always allowed, even if none does.
    """
    env = HardBudget(BudgetDag(workers), [limit])
    _, info_rows, costs = play(env, dearest)
    spent = 0.0
    for task, cost in enumerate(costs):
        dearer = [spent + effort.cost + TASK_COUNT - 1 - task <= limit for effort in EFFORTS[1:]]
        for i, info in enumerate(info_rows[task].values()):
            assert info["action_mask"].dtype == np.int8
            assert info["action_mask"].tolist() == ([1, *dearer] if i == task % workers else [1, 0, 0])
        spent += float(cost[0])
    assert spent == best


@st.composite
def markets(draw: Any, signals: int) -> Market:
    """Prices are multiples of 0.1, not exact in binary, and often conflict between signals."""
    shape = (draw(st.integers(2, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4)), signals)
    count = int(np.prod(shape))
    prices = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    return Market(np.array(prices).reshape(shape) / 10)


@pytest.mark.parametrize("signals", [1, 2, 3])
def test_no_team_costs_more_than_its_limits(signals):
    """Several agents act in the same step; whatever each picks, all limits hold, even where only one plan fits."""

    @given(markets(signals), st.integers(0, 30), st.randoms(use_true_random=False), st.booleans())
    def holds(market: Market, slack: int, random: Any, obedient: bool) -> None:
        limits = market.plan_cost() + slack / 10
        play(
            HardBudget(market, limits.tolist()),
            lambda mask: random.choice(np.flatnonzero(mask | (not obedient)).tolist()),
        )
        assert (market.total <= limits + 2e-6).all()

    holds()


@given(markets(1), st.integers(0, 100))
def test_joint_choices_are_safe_and_not_wasteful(market, room):
    """Every combination of allowed actions fits; an agent alone in exceeding its reserve could not do more when first."""
    needs, headroom = list(market.prices[0]), np.array([room / 10])
    masks, cheapest = affordable(needs, headroom, headroom + 1.0, turn=room)
    least = sum(need.min() for need in needs)
    assert all(mask[action] for mask, action in zip(masks, cheapest, strict=True))
    if least > headroom[0] + 1e-6:
        assert all(mask.sum() == 1 for mask in masks)
        return
    worst = sum(need[mask].max() for need, mask in zip(needs, masks, strict=True))
    assert worst <= headroom[0] + 2e-6
    first = room % len(needs)
    costs = needs[first][:, 0] - needs[first].min() + least
    assert masks[first].tolist() == (costs <= headroom[0] + 1e-6).tolist()


def test_agents_come_first_in_turn():
    needs = [np.array([[0.0], [1.0]])] * 3
    firsts = [affordable(needs, np.ones(1), np.ones(1), turn)[0] for turn in range(3)]
    assert [[int(mask.sum()) for mask in masks] for masks in firsts] == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]


def test_each_signal_has_its_own_limit():
    """Offers cost (0, 3), (3, 0), (1, 1); a free signal takes nothing away."""
    market = Market(np.array([[0, 3], [3, 0], [1, 1]], float)[None, None].repeat(2, 0), to_go=False)
    expected = {(None, 2): [0, 1, 1], (2, None): [1, 0, 1], (2, 2): [0, 0, 1], (3, 3): [1, 1, 1], (None, 0): [0, 1, 0]}
    for limits, mask in expected.items():
        infos = HardBudget(market, limits).reset()[1]
        assert infos["b0"]["action_mask"].tolist() == mask


def test_one_joint_choice_is_found_among_conflicting_signals():
    """Each agent's balanced offer breaks the limits; only opposite extremes fit together."""
    offers = np.array([[0, 10], [10, 0], [6, 6]], float)
    masks, _ = affordable([offers, offers], np.full(2, 10.0), np.full(2, 10.0))
    chosen = [np.flatnonzero(mask).tolist() for mask in masks]
    assert sorted(chosen) == [[0], [1]]


def test_without_cost_to_go_only_the_next_step_is_checked():
    market = Market(np.array([[1.0], [3.0]])[None, None].repeat(2, 0), to_go=False)
    _, info_rows, costs = play(HardBudget(market, [3.5]), dearest)
    assert [info["b0"]["action_mask"].tolist() for info in info_rows[:2]] == [[1, 1], [1, 0]]
    assert np.sum(costs) == 4.0


def test_a_box_observation_gets_the_remaining_share():
    env = HardBudget(BudgetDag(2, observe_budget=False), [20])
    space = env.observation_space("worker_0")
    assert space is env.observation_space("worker_0") and space.shape == (10,) and space.dtype == np.float32
    seen, _, costs = play(env, dearest)
    shares = 1 - np.cumsum([0, *np.concatenate(costs)]) / 20
    for rows, share in zip(seen, shares, strict=True):
        for row in rows.values():
            assert row in space and row[-1] == pytest.approx(share)


@pytest.mark.parametrize(
    ("space", "first"),
    [(spaces.Discrete(9, start=1), 1), (spaces.MultiDiscrete([9, 9], dtype=np.int8), 2)],
    ids=["Discrete", "MultiDiscrete"],
)
def test_a_categorical_observation_gets_levels(space, first):
    prices = np.array([[1.0, 0.0]])[None, None].repeat(2, 0)
    env = HardBudget(Market(prices, space), [4.0, 0.0])
    wider: Any = env.observation_space("b0")
    assert wider.nvec.tolist() == [9] * first + [REMAINING_LEVELS, REMAINING_LEVELS]
    assert wider.dtype == space.dtype
    seen, _, _ = play(env, dearest)
    assert all(row["b0"] in wider for row in seen)
    assert [row["b0"][first:].tolist() for row in seen] == [[31, 0], [24, 0], [16, 0]]
    assert [row["b0"][0] for row in seen] == [1, 2, 3]


def test_what_hard_limits_refuse():
    with pytest.raises(
        MarlRayError,
        match=r"^constraints: hard_limit needs an environment that reports infos\[agent\]\['next_costs'\]$",
    ):
        HardBudget(single_agent("CartPole-v1"), [1.0]).reset(seed=0)
    prices = np.ones((2, 1, 2, 2))
    for space in (spaces.Box(0, 1, (2, 2)), spaces.MultiBinary(3), spaces.Dict(a=spaces.Discrete(2))):
        with pytest.raises(MarlRayError, match=r"constraints: .* b0 observes"):
            HardBudget(Market(prices, space), [1.0, None])
    for limits in ([], [None], [-1.0]):
        with pytest.raises(MarlRayError, match="constraints: hard limits"):
            HardBudget(Market(prices), limits)
    with pytest.raises(
        MarlRayError, match=r"^constraints: next_costs of b0 has shape \(2, 2\), expected \(2,\) or \(2, 1\)$"
    ):
        HardBudget(Market(prices), [1.0]).reset()
    with pytest.raises(MarlRayError, match=r"^constraints: 2 limits, but the cost of b0 has 1 signals$"):
        play(HardBudget(Unpriced(prices), [9.0, 9.0]), dearest)


def test_a_step_after_the_last_sub_task_is_refused():
    env = BudgetDag()
    env.reset(seed=0)
    for _ in range(TASK_COUNT):
        env.step({"worker_0": 0})
    with pytest.raises(RuntimeError, match="expected a reset, because the episode is over"):
        env.step({"worker_0": 0})
