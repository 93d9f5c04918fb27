"""What must hold of every algorithm. A property takes an algorithm and a case, and returns what differs, or None.

Means over a batch that holds every path once are expectations, so tolerances are for float32 and for second-order terms.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marl_ray.conformance import seams, truth
from marl_ray.conformance.games import SIGNALS, STATES
from marl_ray.conformance.seams import STILL, UNLIMITED, Case, Trial

Difference = str | None
Property = Callable[[str, Case], Difference]

FIRST = {
    "lr": STILL,
    "epochs": 1,
    "minibatches": 1,
    "entropy_coef": 0.0,
    "max_grad_norm": UNLIMITED,
    "gamma": 1.0,
    "gae_lambda": 0.7,
    "cost_gamma": 1.0,
    "cost_gae_lambda": 0.4,
    "dynamic_sampling": 0,
    "trust_region": 1e-14,
}
"""One gradient step that moves nothing, on undiscounted sums."""
MOVING = {"lr": 3e-3, "multiplier_init": 0.5, "multiplier_lr": 0.1}
BUDGETS = (0.9, 1.1)
AFTER = {state: (0.2 * (state % 2), 0.5 + state % 2, 1.0) for state in range(STATES)}
"""What follows a cut."""


def _trial(algorithm: str, case: Case, rewarded: bool = True, **options: Any) -> Trial:
    """A trial in which a cut episode goes on, if the algorithm is to count that."""
    after = truth.nothing()
    if not (case.ends or seams.whole_episodes(algorithm)):
        after = {state: (reward * rewarded, *costs) for state, (reward, *costs) in AFTER.items()}
    game = {"rewarded": rewarded, **options.pop("game", {})}
    return Trial(algorithm, case, after=after, game=game, **options)


def _most(trial: Trial) -> int:
    """Steps of the game that a batch of whole episodes has."""
    return 1 if trial.whole and trial.case.below else 2


def _compare(what: str, found: float, true: float, tolerance: float) -> Difference:
    """A difference beyond a share of the truth."""
    if abs(found - true) <= tolerance * abs(true):
        return None
    times = f", {found / true:.2f} times" if true else ""
    return f"{what} is {found:.6g}, the true one {true:.6g}{times}"


def _parallel(what: str, found: Tensor, true: Tensor, least: float = 0.9999) -> Difference:
    """Whether two gradients point the same way."""
    if not found.norm():
        return f"{what} is zero, the true one is not"
    cosine = float(found @ true / (found.norm() * true.norm()))
    return None if cosine >= least else f"{what} has cosine {cosine:.4f} with the true one"


def reward_gradient(algorithm: str, case: Case) -> Difference:
    """The first gradient step goes up the true gradient of J."""
    spec = seams.spec_of(algorithm)
    trial = _trial(algorithm, case, hyper=FIRST, mixed=True)
    trial.step()
    for number, learner in enumerate(trial.learners):
        true = truth.gradient(trial.rules, trial.uniform, 0, trial.after, _most(trial), seams.row_weight(trial))
        found = -seams.actor_gradient(learner)
        problem = _parallel("the gradient of J", found, trial.weight_gradient(number, true))
        if problem:
            return problem
    return None


def cost_gradient(algorithm: str, case: Case) -> Difference:
    """Over its budget and without rewards, the first gradient step goes down the true gradient of J_c."""
    trial = _trial(
        algorithm,
        case,
        hyper=FIRST | {"multiplier_init": 1.0},
        budgets=(0.9, UNLIMITED),
        rewarded=False,
        mixed=True,
    )
    before = seams.multipliers(trial)
    trial.step()
    strengths = before if seams.every_step(algorithm) else seams.multipliers(trial)
    for number, learner in enumerate(trial.learners):
        true = torch.zeros(())
        for signal in range(SIGNALS):
            strength = strengths[number][signal].multiplier if strengths[number] else float(signal == 0)
            by_logit = truth.gradient(trial.rules, trial.uniform, 1 + signal, trial.after)
            true = true + strength * trial.weight_gradient(number, by_logit)
        problem = _parallel("the gradient of J_c", seams.actor_gradient(learner), true)
        if problem:
            return problem
    return None


def budget_units(algorithm: str, case: Case) -> Difference:
    """A violation counts per decision: over the budget by D, an episode of L decisions is over by D / L in each; also in
    the batch behind those that the episode spanned, in which none ends."""
    trial = _trial(algorithm, case, hyper=FIRST, budgets=BUDGETS)
    measured = truth.expected(trial.rules, trial.uniform, truth.nothing())[1:]
    for batch in range(3):
        batches, stats = trial.collect()
        trial.update(batches, stats)
        if stats.means is None:
            continue
        for number, learner in enumerate(trial.learners):
            decisions = truth.decisions(trial.rules, trial.uniform, number)
            for signal, found in enumerate(seams.violations(learner, stats)):
                true = (measured[signal] - BUDGETS[signal]) / decisions
                problem = _compare(f"the violation per decision in batch {batch + 1}", found, true, 1e-3)
                if problem:
                    return problem
    return None


def moved_costs(algorithm: str, case: Case) -> Difference:
    """The cost that an episode is expected to have after some policies moved is what it has, to first order."""
    trial = _trial(algorithm, case, hyper=FIRST, mixed=True)
    batches, stats = trial.collect()
    trial.update(batches, stats)
    start = truth.expected(trial.rules, trial.uniform, trial.after)
    factor = None
    shifts = [0.0] * SIGNALS
    for number, learner in enumerate(trial.learners):
        batch = trial.batch_of(batches, number)
        up = truth.gradient(trial.rules, trial.tables(), 1, trial.after)
        seams.nudge(learner, trial.weight_gradient(number, up), 3e-3)
        after = seams.joint_factor(learner, batch, factor)
        expected = seams.moved(learner, stats, batch, after, factor)
        factor = after
        now = truth.expected(trial.rules, trial.tables(), trial.after)
        for signal in range(SIGNALS):
            assert stats.means is not None
            found = expected[signal] - stats.means[signal]
            true = now[1 + signal] - start[1 + signal] - shifts[signal]
            shifts[signal] += true
            problem = _compare(f"the change of J_c by policy {number + 1}", found, true, 0.03)
            if problem:
                return problem
    return None


def multipliers(algorithm: str, case: Case) -> Difference:
    """A multiplier moves by the J_c of the policies as they are when it moves."""
    hyper = FIRST | MOVING
    trial = _trial(algorithm, case, hyper=hyper, budgets=BUDGETS, mixed=True)
    batches, stats = trial.collect()
    measured = truth.expected(trial.rules, trial.uniform, truth.nothing())
    start = truth.expected(trial.rules, trial.uniform, trial.after)
    order, before = trial.order, seams.multipliers(trial)
    trial.update(batches, stats)
    ends, tables = trial.tables(), list(trial.uniform)
    sequential = seams.spec_of(algorithm).order == "sequential"
    for number in order:
        now = truth.expected(trial.rules, tables, trial.after) if sequential else start
        for signal, (old, new) in enumerate(zip(before[number], seams.multipliers(trial)[number], strict=True)):
            shift = now[1 + signal] - start[1 + signal]
            found = seams.implied_cost(old, new) - measured[1 + signal]
            problem = _shift(f"the change of J_c that policy {number + 1}'s multiplier follows", found, shift)
            if problem:
                return problem
        own = slice(number * case.agents, (number + 1) * case.agents)
        tables[own] = ends[own]
    return None


def multiplier_steps(algorithm: str, case: Case) -> Difference:
    """A multiplier that moves after every gradient step moves by the J_c that the steps before have led to."""
    once, twice = (
        _trial(algorithm, case, hyper=FIRST | MOVING | {"epochs": epochs}, budgets=BUDGETS, mixed=True)
        for epochs in (1, 2)
    )
    number = once.order[0]
    once.step()
    twice.step()
    own = slice(number * case.agents, (number + 1) * case.agents)
    tables = list(once.uniform)
    tables[own] = once.tables()[own]
    measured = truth.expected(once.rules, once.uniform, truth.nothing())
    start = truth.expected(once.rules, once.uniform, once.after)
    now = truth.expected(once.rules, tables, once.after)
    for signal in range(SIGNALS):
        old, new = (seams.multipliers(trial)[number][signal] for trial in (once, twice))
        found = seams.implied_cost(old, new) - measured[1 + signal]
        shift = now[1 + signal] - start[1 + signal]
        problem = _shift("the change of J_c that the second gradient step's multiplier follows", found, shift)
        if problem:
            return problem
    return None


def old_costs(algorithm: str, case: Case) -> Difference:
    """A multiplier does not move on a J_c that it has moved on: none is new where no episode ended in a batch."""
    trial = _trial(algorithm, case, hyper=FIRST | {"multiplier_init": 0.5}, budgets=BUDGETS)
    for batch in range(4):
        batches, stats = trial.collect()
        before = seams.multipliers(trial)
        trial.update(batches, stats)
        if not stats.episodes and seams.multipliers(trial) != before:
            found = [[multiplier.multiplier for multiplier in policy] for policy in seams.multipliers(trial)]
            return f"batch {batch + 1} ended no episode, but moved the multipliers to {found}"
    return None


def _shift(what: str, found: float, true: float) -> Difference:
    if abs(found - true) <= 0.05 * abs(true) + 2e-4:
        return None
    return f"{what} is {found:.5f}, the true one {true:.5f}" + (f", {found / true:.2f} times" if true else "")
