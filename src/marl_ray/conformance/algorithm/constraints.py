"""Properties of algorithms with budgets.

A property takes an algorithm and a case, and returns what differs, or None.
"""

from contextlib import ExitStack
from functools import lru_cache
from typing import NamedTuple

import torch

from marl_ray.config import spec_of
from marl_ray.conformance.algorithm import learner_access, truth
from marl_ray.conformance.algorithm.comparing import (
    BUDGETS,
    FIRST_STEP_SETTINGS,
    MOVING_MULTIPLIER_SETTINGS,
    Difference,
    begin_run,
    describe_angle,
    describe_difference,
    first_update,
)
from marl_ray.conformance.algorithm.game_run import UNLIMITED, GameRun, GridPoint
from marl_ray.conformance.algorithm.games import POLICY_NAMES, SIGNAL_COUNT, STATE_COUNT, GameRules

MEAN_TOLERANCE = 1e-3
"""Share of the truth by which an exact mean may be off: rounding of float32 is far below it, and a mean per episode or per
step in place of one per decision, the mistakes that it finds, is far above."""
NUDGE = 3e-3
"""Length of the step in the weights whose change of J_c is measured: long against float32's rounding, and short enough for
the first order to describe it."""
FIRST_ORDER_TOLERANCE = 0.03
"""Share of the truth by which a first-order estimate may be off after such a step: room for the second-order term."""
SHIFT_TOLERANCE, SHIFT_ROUNDING = 0.05, 2e-4
"""Share of the true change of J_c, and an absolute part, by which a multiplier's change may be off: room for second-order
terms of a step, and for the rounding of a change that is the difference of two multipliers in float32."""
LINE_SEARCH_TOLERANCE = 0.25
"""Share by which a step may miss the budget: a line search that meets the trust region's edge from outside, by rounding,
shortens the step once, to 0.8 of it."""


def cost_gradient(algorithm: str, case: GridPoint) -> Difference:
    """Check that over its budget and without rewards, the first gradient step goes down the true gradient of J_c."""
    game_run = begin_run(
        algorithm,
        case,
        hyper=FIRST_STEP_SETTINGS | {"multiplier_init": 1.0},
        budgets=(0.9, UNLIMITED),
        rewarded=False,
        mixed=True,
    )
    before = learner_access.multipliers(game_run)
    game_run.step()
    strengths = before if learner_access.every_step(algorithm) else learner_access.multipliers(game_run)
    for number, learner in enumerate(game_run.learners):
        true = torch.zeros(())
        for signal in range(SIGNAL_COUNT):
            strength = strengths[number][signal].multiplier if strengths[number] else float(signal == 0)
            by_logit = truth.gradient(game_run.rules, game_run.uniform, 1 + signal, game_run.after)
            true = true + strength * game_run.weight_gradient(number, by_logit)
        difference = describe_angle("the gradient of J_c", learner_access.actor_gradient(learner), true)
        if difference:
            return difference
    return None


class _BatchMeasurements(NamedTuple):
    """Measurements of one batch of a run of a game."""

    ended: int
    """Number of episodes that ended in the batch."""
    violations: list[list[float]]
    """Violations by policy and signal; empty while no episode has ended."""
    moved: bool
    """True if multipliers moved."""


@lru_cache(maxsize=16)
def _measure_batches(algorithm: str, case: GridPoint) -> list[_BatchMeasurements]:
    """Return the measurements of batches over two episodes where one outlasts the horizon.

    All copies of the batches stand at the same step.
    """
    game_run = begin_run(algorithm, case, hyper=FIRST_STEP_SETTINGS | {"multiplier_init": 0.5}, budgets=BUDGETS)
    accounts = []
    for batch in range(4 if case.below else 1):
        before = learner_access.multipliers(game_run)
        batches = game_run.collect()
        if batch == 0 or any(before):  # without multipliers there is nothing to see of the later updates
            game_run.update(batches)
        else:
            game_run.skip()
        has_means = game_run.means is not None
        violations = (
            [learner_access.violations(game_run, number) for number in range(case.policies)] if has_means else []
        )
        accounts.append(_BatchMeasurements(game_run.ended, violations, learner_access.multipliers(game_run) != before))
    return accounts


def budget_units(algorithm: str, case: GridPoint) -> Difference:
    """Check that a violation counts per decision, also in batches in which no episode ends.

    Over the budget by D, an episode of L decisions is over by D / L in each.
    """
    rules = GameRules(case.policies, case.agents, case.is_terminated)
    measured = truth.expected_returns(rules, _uniform(case), truth.zero_sums())[1:]
    for batch, account in enumerate(_measure_batches(algorithm, case)):
        for number, violations in enumerate(account.violations):
            decisions = truth.decisions(rules, _uniform(case), number)
            for signal, violation in enumerate(violations):
                true = (measured[signal] - BUDGETS[signal]) / decisions
                difference = describe_difference(
                    f"the violation per decision in batch {batch + 1}", violation, true, MEAN_TOLERANCE
                )
                if difference:
                    return difference
    return None


def old_costs(algorithm: str, case: GridPoint) -> Difference:
    """Check that a multiplier does not move on a J_c that it has moved on.

    None is new where no episode ended in a batch.
    """
    for batch, account in enumerate(_measure_batches(algorithm, case)):
        if account.moved and not account.ended:
            return f"batch {batch + 1} ended no episode, but moved the multipliers"
    return None


def moved_costs(algorithm: str, case: GridPoint) -> Difference:
    """Check that the expected cost of an episode after some policies moved is its true cost, to first order."""
    game_run, batches = first_update(algorithm, case)
    before = truth.expected_returns(game_run.rules, game_run.uniform, game_run.after)
    factor = None
    with ExitStack() as moves:
        for number, learner in enumerate(game_run.learners):
            batch = batches[POLICY_NAMES[number]]
            up = truth.gradient(game_run.rules, game_run.tables(), 1, game_run.after)
            moves.enter_context(
                learner_access.nudge_policy(game_run, number, game_run.weight_gradient(number, up), NUDGE)
            )
            after = learner_access.joint_factor(learner, batch, factor)
            changes = learner_access.moved_costs(game_run, number, batch, after, factor)
            now = truth.expected_returns(game_run.rules, game_run.tables(), game_run.after)
            for signal in range(SIGNAL_COUNT):
                true = now[1 + signal] - before[1 + signal]
                difference = describe_difference(
                    f"the change of J_c by policy {number + 1}", changes[signal], true, FIRST_ORDER_TOLERANCE
                )
                if difference:
                    return difference
            factor, before = after, now
    return None


@lru_cache(maxsize=16)
def _run_one_step(algorithm: str, case: GridPoint) -> GameRun:
    """Return a run of a game after one gradient step that moved the policies."""
    game_run = begin_run(
        algorithm, case, hyper=FIRST_STEP_SETTINGS | MOVING_MULTIPLIER_SETTINGS, budgets=BUDGETS, mixed=True
    )
    game_run.step()
    return game_run


def multipliers(algorithm: str, case: GridPoint) -> Difference:
    """Check that a multiplier moves by the J_c of the policies as they are when it moves."""
    game_run = _run_one_step(algorithm, case)
    measured = truth.expected_returns(game_run.rules, game_run.uniform, truth.zero_sums())
    start = truth.expected_returns(game_run.rules, game_run.uniform, game_run.after)
    order, before = game_run.order_of(0), learner_access.fresh_multipliers(game_run)
    ends, tables = game_run.tables(), list(game_run.uniform)
    sequential = spec_of(algorithm).order == "sequential"
    for number in order:
        now = truth.expected_returns(game_run.rules, tables, game_run.after) if sequential else start
        for signal, (old, new) in enumerate(
            zip(before[number], learner_access.multipliers(game_run)[number], strict=True)
        ):
            shift = now[1 + signal] - start[1 + signal]
            change = learner_access.implied_cost(old, new) - measured[1 + signal]
            difference = describe_shift(
                f"the change of J_c that policy {number + 1}'s multiplier follows", change, shift
            )
            if difference:
                return difference
        members = slice(number * case.agents, (number + 1) * case.agents)
        tables[members] = ends[members]
    return None


def multiplier_steps(algorithm: str, case: GridPoint) -> Difference:
    """Check that a multiplier that moves after every gradient step moves by the J_c that the steps led to."""
    once = _run_one_step(algorithm, case)
    twice = begin_run(
        algorithm,
        case,
        hyper=FIRST_STEP_SETTINGS | MOVING_MULTIPLIER_SETTINGS | {"epochs": 2},
        budgets=BUDGETS,
        mixed=True,
    )
    twice.step()
    number = once.order_of(0)[0]
    members = slice(number * case.agents, (number + 1) * case.agents)
    tables = list(once.uniform)
    tables[members] = once.tables()[members]
    measured = truth.expected_returns(once.rules, once.uniform, truth.zero_sums())
    start = truth.expected_returns(once.rules, once.uniform, once.after)
    now = truth.expected_returns(once.rules, tables, once.after)
    for signal in range(SIGNAL_COUNT):
        old, new = (learner_access.multipliers(game_run)[number][signal] for game_run in (once, twice))
        change = learner_access.implied_cost(old, new) - measured[1 + signal]
        shift = now[1 + signal] - start[1 + signal]
        difference = describe_shift(
            "the change of J_c that the second gradient step's multiplier follows", change, shift
        )
        if difference:
            return difference
    return None


def describe_shift(what: str, measured: float, true: float) -> Difference:
    """Return a sentence about a change of a cost that is not the true one; None within the tolerances of shifts."""
    if abs(measured - true) <= SHIFT_TOLERANCE * abs(true) + SHIFT_ROUNDING:
        return None
    return f"{what} is {measured:.5f}, the true one {true:.5f}" + (f", {measured / true:.2f} times" if true else "")


def lands_on_budget(algorithm: str, case: GridPoint) -> Difference:
    """Check that a trust-region step from just above a budget ends at the budget, though rewards pull the other way."""
    excess = 6e-4
    measured = truth.expected_returns(
        GameRules(case.policies, case.agents, case.is_terminated), _uniform(case), truth.zero_sums()
    )[1]
    game_run = begin_run(
        algorithm,
        case,
        hyper=FIRST_STEP_SETTINGS | {"trust_region": 1e-5, "cg_damping": 1e-6, "cg_iterations": 30},
        budgets=(measured - excess, UNLIMITED),
        mixed=True,
    )
    start = truth.expected_returns(game_run.rules, game_run.uniform, game_run.after)[1]
    game_run.step()
    ends, tables = game_run.tables(), list(game_run.uniform)
    for number in game_run.order_of(0):
        members = slice(number * case.agents, (number + 1) * case.agents)
        if spec_of(algorithm).order != "sequential":
            tables = list(game_run.uniform)
        tables[members] = ends[members]
        change = truth.expected_returns(game_run.rules, tables, game_run.after)[1] - start
        difference = describe_difference(
            f"the change of J_c by policy {number + 1}'s step", change, -excess, LINE_SEARCH_TOLERANCE
        )
        if difference:
            return difference
    return None


def _uniform(case: GridPoint) -> truth.Tables:
    return [[[0.5, 0.5]] * STATE_COUNT for _ in range(case.policies * case.agents)]
