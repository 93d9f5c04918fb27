"""What must hold of every algorithm. A property takes an algorithm and a case, and returns what differs, or None.

Means over a batch that holds every path once are expectations, so tolerances are for float32 and for second-order terms.
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marl_ray.config import spec_of
from marl_ray.conformance import seams, truth
from marl_ray.conformance.games import POLICIES, SIGNALS, STATES, Rules
from marl_ray.conformance.seams import STILL, UNLIMITED, Case, Trial
from marl_ray.trajectories import Trajectories

Difference = str | None

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
FIT = {"critic_lr": 0.2, "critic_epochs": 30}
"""What fits a critic that is fitted first."""
CERTAIN = {"critic_lr": 5.0, "critic_epochs": 10}
"""What makes such a critic certain that nothing is earned."""
DRIFT = {"lr": 1e-2, "epochs": 2, "entropy_coef": 0.0, "dynamic_sampling": 0}
MOVING = {"lr": 3e-3, "multiplier_init": 0.5, "multiplier_lr": 0.1}
BUDGETS = (0.9, 1.1)
AFTER = {state: (0.2 * (state % 2), 0.5 + state % 2, 1.0) for state in range(STATES)}
"""What follows a cut."""


def _trial(algorithm: str, case: Case, rewarded: bool = True, priced: bool = True, **options: Any) -> Trial:
    """A trial in which a cut episode goes on, if the algorithm is to count that."""
    after = truth.nothing()
    if not (case.ends or seams.whole_episodes(algorithm)):
        after = {state: (reward * rewarded, *(c * priced for c in costs)) for state, (reward, *costs) in AFTER.items()}
    priced = priced and spec_of(algorithm).costs
    game = {"rewarded": rewarded, "priced": priced, **options.pop("game", {})}
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


@lru_cache(maxsize=16)
def _first(algorithm: str, case: Case) -> tuple[Trial, dict[str, Trajectories]]:
    """A trial after its first gradient step, which moved nothing, and the batch of that step."""
    hyper = FIRST | (FIT if spec_of(algorithm).critic_first else {})
    trial = _trial(algorithm, case, hyper=hyper, mixed=True)
    batches = trial.collect()
    trial.update(batches)
    return trial, batches


def reward_gradient(algorithm: str, case: Case) -> Difference:
    """The first gradient step goes up the true gradient of J."""
    trial, _ = _first(algorithm, case)
    true = truth.gradient(trial.rules, trial.uniform, 0, trial.after, _most(trial), seams.row_weight(trial))
    for number, learner in enumerate(trial.learners):
        found = -seams.actor_gradient(learner)
        least = 0.999 if spec_of(algorithm).critic_first else 0.9999  # such a critic is not exact
        problem = _parallel("the gradient of J", found, trial.weight_gradient(number, true), least)
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


class _Batch(NamedTuple):
    """What one batch of a trial led to."""

    ended: int
    violations: list[list[float]]
    """By policy and signal; none while no episode has ended."""
    moved: bool
    """Whether multipliers moved."""


@lru_cache(maxsize=16)
def _accounts(algorithm: str, case: Case) -> list[_Batch]:
    """Batches of copies that all stand at the same step, over two episodes where one outlasts the horizon."""
    trial = _trial(algorithm, case, hyper=FIRST | {"multiplier_init": 0.5}, budgets=BUDGETS)
    found = []
    for batch in range(4 if case.below else 1):
        before = seams.multipliers(trial)
        batches = trial.collect()
        if batch == 0 or any(before):  # without multipliers there is nothing to see of the later updates
            trial.update(batches)
        else:
            trial.skip()
        known = trial.means is not None
        violations = [seams.violations(trial, number) for number in range(case.policies)] if known else []
        found.append(_Batch(trial.ended, violations, seams.multipliers(trial) != before))
    return found


def budget_units(algorithm: str, case: Case) -> Difference:
    """A violation counts per decision: over the budget by D, an episode of L decisions is over by D / L in each; also in
    batches in which no episode ends."""
    rules = Rules(case.policies, case.agents, case.ends)
    measured = truth.expected(rules, _uniform(case), truth.nothing())[1:]
    for batch, account in enumerate(_accounts(algorithm, case)):
        for number, violations in enumerate(account.violations):
            decisions = truth.decisions(rules, _uniform(case), number)
            for signal, found in enumerate(violations):
                true = (measured[signal] - BUDGETS[signal]) / decisions
                problem = _compare(f"the violation per decision in batch {batch + 1}", found, true, 1e-3)
                if problem:
                    return problem
    return None


def old_costs(algorithm: str, case: Case) -> Difference:
    """A multiplier does not move on a J_c that it has moved on: none is new where no episode ended in a batch."""
    for batch, account in enumerate(_accounts(algorithm, case)):
        if account.moved and not account.ended:
            return f"batch {batch + 1} ended no episode, but moved the multipliers"
    return None


def moved_costs(algorithm: str, case: Case) -> Difference:
    """The cost that an episode is expected to have after some policies moved is what it has, to first order."""
    trial, batches = _first(algorithm, case)
    before = truth.expected(trial.rules, trial.uniform, trial.after)
    factor = None
    with ExitStack() as moves:
        for number, learner in enumerate(trial.learners):
            batch = batches[POLICIES[number]]
            up = truth.gradient(trial.rules, trial.tables(), 1, trial.after)
            moves.enter_context(seams.nudged(trial, number, trial.weight_gradient(number, up), 3e-3))
            after = seams.joint_factor(learner, batch, factor)
            found = seams.moved(trial, number, batch, after, factor)
            now = truth.expected(trial.rules, trial.tables(), trial.after)
            for signal in range(SIGNALS):
                true = now[1 + signal] - before[1 + signal]
                problem = _compare(f"the change of J_c by policy {number + 1}", found[signal], true, 0.03)
                if problem:
                    return problem
            factor, before = after, now
    return None


@lru_cache(maxsize=16)
def _once(algorithm: str, case: Case) -> Trial:
    """A trial after one gradient step that moved the policies."""
    trial = _trial(algorithm, case, hyper=FIRST | MOVING, budgets=BUDGETS, mixed=True)
    trial.step()
    return trial


def multipliers(algorithm: str, case: Case) -> Difference:
    """A multiplier moves by the J_c of the policies as they are when it moves."""
    trial = _once(algorithm, case)
    measured = truth.expected(trial.rules, trial.uniform, truth.nothing())
    start = truth.expected(trial.rules, trial.uniform, trial.after)
    order, before = trial.order_of(0), seams.fresh_multipliers(trial)
    ends, tables = trial.tables(), list(trial.uniform)
    sequential = spec_of(algorithm).order == "sequential"
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
    once = _once(algorithm, case)
    twice = _trial(algorithm, case, hyper=FIRST | MOVING | {"epochs": 2}, budgets=BUDGETS, mixed=True)
    twice.step()
    number = once.order_of(0)[0]
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


def _shift(what: str, found: float, true: float) -> Difference:
    if abs(found - true) <= 0.05 * abs(true) + 2e-4:
        return None
    return f"{what} is {found:.5f}, the true one {true:.5f}" + (f", {found / true:.2f} times" if true else "")


def lands_on_budget(algorithm: str, case: Case) -> Difference:
    """A trust-region step from just above a budget ends at the budget, though rewards pull the other way."""
    off = 6e-4
    measured = truth.expected(Rules(case.policies, case.agents, case.ends), _uniform(case), truth.nothing())[1]
    trial = _trial(
        algorithm,
        case,
        hyper=FIRST | {"trust_region": 1e-5, "cg_damping": 1e-6, "cg_iterations": 30},
        budgets=(measured - off, UNLIMITED),
        mixed=True,
    )
    start = truth.expected(trial.rules, trial.uniform, trial.after)[1]
    trial.step()
    ends, tables = trial.tables(), list(trial.uniform)
    for number in trial.order_of(0):
        own = slice(number * case.agents, (number + 1) * case.agents)
        if spec_of(algorithm).order != "sequential":
            tables = list(trial.uniform)
        tables[own] = ends[own]
        change = truth.expected(trial.rules, tables, trial.after)[1] - start
        # A line search that meets the trust region's edge from outside, by rounding, shortens the step once.
        problem = _compare(f"the change of J_c by policy {number + 1}'s step", change, -off, 0.25)
        if problem:
            return problem
    return None


def _uniform(case: Case) -> truth.Tables:
    return [[[0.5, 0.5]] * STATES for _ in range(case.policies * case.agents)]


def no_drift(algorithm: str, case: Case) -> Difference:
    """Without rewards and costs nothing moves the policy, whether episodes end or are cut at the horizon."""
    hyper = DRIFT | (CERTAIN if spec_of(algorithm).critic_first else {})
    trial = _trial(
        algorithm,
        case,
        rewarded=False,
        priced=False,
        hyper=hyper,
        game={"early": seams.whole_episodes(algorithm)},
        scripted=False,
        budgets=(1.0, 1.0),
    )
    for iteration in range(2 if case.below else 1):
        batches = trial.collect()
        trial.update(batches)
        for learner, batch in zip(trial.learners, batches.values(), strict=True):
            problem = _still(seams.movement(learner, batch), iteration)
            if problem:
                return problem
    return None


def no_drift_of_texts(algorithm: str, case: Case) -> Difference:
    """Without rewards nothing moves a language model, though some responses end and some are cut."""
    hyper = DRIFT | {"lr": 1e-4} | (CERTAIN if spec_of(algorithm).critic_first else {})
    trial = Trial(algorithm, case, hyper=hyper, budgets=(1.0, 1.0), scripted=False, text=True)
    batches = trial.collect()
    if not all(bool(batch.terminated.any() and batch.truncated.any()) for batch in batches.values()):
        return "the game is none: expected some responses that ended and some that were cut"
    trial.update(batches)
    for learner, batch in zip(trial.learners, batches.values(), strict=True):
        problem = _still(seams.movement(learner, batch), 0)
        if problem:
            return problem
    return None


def _still(movement: float, iteration: int) -> Difference:
    if movement <= 1e-3:
        return None
    return f"a log-probability moved by {movement:.4f} in iteration {iteration + 1}, without any reward"


def value_clip(algorithm: str, case: Case) -> Difference:
    """Before any gradient step the value clip takes no gradient away."""
    trials = [_trial(algorithm, case, hyper=FIRST | {"value_clip": clip}, mixed=True) for clip in (0.2, UNLIMITED)]
    for iteration in range(2):
        for trial in trials:
            trial.step()
        for clipped, free in zip(*(trial.learners for trial in trials), strict=True):
            with_clip, without = seams.critic_gradient(clipped), seams.critic_gradient(free)
            off = float((with_clip - without).norm() / without.norm())
            if off > 1e-4:
                return f"in iteration {iteration + 1} the clip takes away {off:.0%} of the critics' first gradient"
    return None


def empty_batch(algorithm: str, case: Case) -> Difference:
    """A batch without decisions moves no normaliser."""
    trial = _trial(algorithm, case, hyper=FIRST)
    trial.step()
    batches = trial.collect()
    before = [seams.normaliser_state(learner) for learner in trial.learners]
    trial.update({name: seams.emptied(batch) for name, batch in batches.items()})
    after = [seams.normaliser_state(learner) for learner in trial.learners]
    return None if before == after else f"an empty batch moved the normalisers from {before[0]} to {after[0]}"


def adaptive_kl(algorithm: str, case: Case) -> Difference:
    """The divergence's coefficient follows the number of sequences, however the batch is cut into minibatches."""
    hyper = FIRST | {"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100_000}
    found = []
    for minibatches in (1, 2):
        case = case._replace(below=case.below and seams.whole_episodes(algorithm))
        trial = _trial(algorithm, case, hyper=hyper | {"minibatches": minibatches})
        trial.step()
        found.append([learner.kl_coef for learner in trial.learners])
    return None if found[0] == found[1] else f"one minibatch led to {found[0]}, two to {found[1]}"


def micro_batches(algorithm: str, case: Case) -> Difference:
    """How a batch is cut into passes changes no gradient."""
    hyper = FIRST | {"multiplier_init": 1.0}
    whole, cut = (
        _trial(algorithm, case, hyper=hyper, budgets=BUDGETS, mixed=True, micro_batch=size) for size in (None, 3)
    )
    for trial in (whole, cut):
        trial.step()
    for one, other in zip(whole.learners, cut.learners, strict=True):
        found, true = seams.gradient(other), seams.gradient(one)
        off = float((found - true).norm() / true.norm())
        if off > 1e-4:
            return f"the gradient of passes of 3 copies differs from that of one pass by {off:.1e}"
    return None


def uneven_lengths(algorithm: str, case: Case) -> Difference:
    """The gradient of J is right where episodes differ in length, or the config refuses the aggregation."""
    default = seams.defaults(algorithm)
    levels = seams.choices("ratio_level") if "ratio_level" in seams.reads(algorithm) else (default.ratio_level,)
    for level in levels:
        for aggregation in {default.aggregation, "token-mean", "seq-mean-token-sum"}:
            hyper = {"aggregation": aggregation, **({} if len(levels) == 1 else {"ratio_level": level})}
            if not seams.accepted(algorithm, hyper):
                continue
            trial = _trial(algorithm, case, hyper=FIRST | hyper, game={"early": True})
            trial.step()
            true = truth.gradient(trial.rules, trial.uniform, 0, trial.after, _most(trial), seams.row_weight(trial))
            for number, learner in enumerate(trial.learners):
                found = -seams.actor_gradient(learner)
                what = f"with {aggregation} and one ratio a {level} the gradient of J"
                problem = _parallel(what, found, trial.weight_gradient(number, true))
                if problem:
                    return problem
    return None


def entropy_bonus(algorithm: str, case: Case) -> Difference:
    """Where nothing is earned, `entropy_coef` makes the policy more random."""
    hyper = DRIFT | {"entropy_coef": 1.0}
    trial = _trial(algorithm, case, rewarded=False, priced=False, hyper=hyper)
    for learner in trial.learners:
        seams.tilt(learner)
    before = trial.tables()[0][0]
    trial.step()
    after = trial.tables()[0][0]
    if abs(after[0] - 0.5) < abs(before[0] - 0.5) - 1e-4:
        return None
    return f"probabilities {before[0]:.3f}, {before[1]:.3f} became {after[0]:.3f}, {after[1]:.3f} with entropy_coef=1"


def divergence_penalty(algorithm: str, case: Case) -> Difference:
    """Where nothing is earned, `kl_coef` in the loss pulls the policy to the reference, by every estimator that is taken."""
    for estimator in seams.choices("kl_estimator"):
        own = {"kl_coef": 1.0, "kl_place": "loss", "kl_estimator": estimator}
        if not seams.accepted(algorithm, own):
            continue
        trial = _trial(algorithm, case, rewarded=False, priced=False, hyper=FIRST | own)
        reference = seams.aim_reference(trial.learners[0])
        trial.step()
        by_logit = truth.divergence_gradient(trial.rules, trial.uniform, reference)
        true = trial.weight_gradient(0, by_logit)
        # `abs` descends the total variation, and k3 the divergence the other way round: not parallel, but downhill.
        problem = _parallel(f"{estimator}'s gradient", seams.actor_gradient(trial.learners[0]), true, least=0.5)
        if problem:
            return problem
    return None


def refusals(algorithm: str, case: Case) -> Difference:
    """A config refuses hyper-parameters that the algorithm does not read, and lengths of rows that have none."""
    if not seams.accepted(algorithm, {}):
        return "no config takes the algorithm"
    taken = [key for key, value in seams.unread(algorithm).items() if seams.accepted(algorithm, {key: value})]
    if taken:
        return f"the config takes keys that the algorithm does not read: {', '.join(taken)}"
    if not seams.whole_episodes(algorithm):
        for key in ("overlong_buffer", "overlong_filter"):
            if key in seams.reads(algorithm) and seams.accepted(algorithm, {key: 1}, rolling=True):
                return f"the config takes {key}, though a row is a stretch of play, which has no length of its own"
    return None


class Property(NamedTuple):
    """One line of the report."""

    check: Callable[[str, Case], Difference]
    applies: Callable[[str], bool]
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        return self.check.__name__.replace("_", " ")

    @property
    def text(self) -> str:
        """What holds, in one sentence."""
        return " ".join((self.check.__doc__ or "").split())

    def differs(self, algorithm: str) -> Difference:
        """The first case that differs, and by how much."""
        for case in self.cases:
            found = self.check(algorithm, case)
            if found:
                return f"{case}: {found}"
        return None


GRID = tuple(Case(*point) for point in itertools.product((1, 2), (1, 3), (False, True), (True, False)))
LONE = (Case(),)


def _reads(key: str) -> Callable[[str], bool]:
    return lambda algorithm: key in seams.reads(algorithm)


def _is(**wanted: Any) -> Callable[[str], bool]:
    return lambda algorithm: all(getattr(spec_of(algorithm), key) == value for key, value in wanted.items())


def _descends(algorithm: str) -> bool:
    return bool(spec_of(algorithm).constraint != "trust_region")


def _counts_lengths(algorithm: str) -> bool:
    spec = spec_of(algorithm)
    return bool(spec.episodes and not spec.critic_first)


def _speaks(algorithm: str) -> bool:
    spec = spec_of(algorithm)
    return bool(spec.token_policies and spec.critic != "central")


PROPERTIES = (
    Property(reward_gradient, _descends, GRID),
    Property(uneven_lengths, _counts_lengths, (Case(1, 1), Case(2, 1))),
    Property(cost_gradient, lambda name: _is(costs=True)(name) and _descends(name), GRID),
    Property(budget_units, _is(costs=True), GRID),
    Property(moved_costs, _is(costs=True), GRID),
    Property(multipliers, _is(constraint="multiplier"), GRID),
    Property(multiplier_steps, lambda name: seams.every_step(name), GRID),
    Property(old_costs, _is(constraint="multiplier"), GRID),
    Property(lands_on_budget, _is(constraint="trust_region"), GRID),
    Property(no_drift, lambda name: True, GRID),
    Property(no_drift_of_texts, _speaks, (Case(1, 1), Case(2, 1))),
    Property(value_clip, _reads("value_clip"), (Case(1, 3), Case(2, 1, True, False))),
    Property(empty_batch, lambda name: True, LONE),
    Property(adaptive_kl, _reads("kl_target"), (Case(1, 3), Case(2, 1))),
    Property(micro_batches, lambda name: True, (Case(1, 3), Case(2, 1, True, False))),
    Property(entropy_bonus, _reads("entropy_coef"), LONE),
    Property(divergence_penalty, _reads("kl_coef"), LONE),
    Property(refusals, lambda name: True, LONE),
)
