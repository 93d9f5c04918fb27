"""Prepare a batch for its epochs: what is constant across them (advantages, returns, old log-probabilities)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marl_ray.algorithms.advantages.groups import compared
from marl_ray.algorithms.advantages.normalization import moments, standardise
from marl_ray.algorithms.advantages.of_batch import cost_advantages
from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.algorithms.constraints.penalty import constraint_violation
from marl_ray.algorithms.losses.aggregation import counts
from marl_ray.algorithms.losses.kl import kl_estimate
from marl_ray.algorithms.losses.ratios import truncated_importance
from marl_ray.config import AlgorithmConfig
from marl_ray.errors import MarlRayError
from marl_ray.training.collectives import totals
from marl_ray.training.learner.minibatches import Cut, Shape
from marl_ray.training.learner.passes import evaluate_all, fit_critic, in_passes
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState
from marl_ray.trajectories import Trajectories


class Diverged(MarlRayError):
    """A number that is not finite: training again from the same checkpoint would meet it again."""


@dataclass(frozen=True)
class CostStats:
    """The mean costs of the episodes that ended in this batch."""

    means: tuple[float, ...] | None
    """Mean cost of an episode by signal; None while no episode has ended."""
    episodes: int
    """Number of episodes that ended in this batch, on all workers; 0 if `means` are those of earlier ones."""
    decisions: float = 1.0
    """Decisions of the learner's policy in one of these episodes, all its agents together, on average."""


class OldOutputs(NamedTuple):
    """Outputs of the weights that the update begins with, (B, T)."""

    log_probs: Tensor
    values: Tensor
    """(B, T), the critic's raw outputs, which are normalised. The value clip has its centre there."""
    cost_values: Tensor
    """(B, T, K), likewise for the cost critics."""


@dataclass(frozen=True)
class PreparedBatch:
    """A batch ready for its epochs; (B, T) unless said otherwise, on the learner's device."""

    batch: Trajectories
    shape: Shape
    plan: list[list[Cut]]
    """The minibatches of every epoch."""
    mask: Tensor
    """bool: decisions that are trained on."""
    inputs: Any
    """The encoded inputs that the family's `evaluate` takes."""
    order: Tensor | None
    """(copies,) copies with like numbers cost less in one pass; None where all passes cost the same."""
    advantages: Tensor
    cost_advantages: Tensor
    """(B, T, K)."""
    returns: Tensor | None
    """In units of the value normaliser; None without a critic."""
    cost_returns: Tensor | None
    """(B, T, K), in units of each signal's normaliser."""
    old: OldOutputs
    recomputed: bool
    """The learner itself has evaluated `old`: the first gradient step computes the same numbers, so that its ratios are
    exactly 1."""
    importance: Tensor | None
    """Weight of each decision's loss, for experience of another policy."""
    reference: Tensor | None
    """Log-probabilities under the reference policy; None where nothing is measured from it."""
    costs: CostStats
    violations: Tensor
    """(K,) constraint violations per decision, in the units of the cost advantages."""
    sizes: Tensor
    """(minibatches of all epochs, 2) decisions and sequences of each over all workers."""
    sequences: int
    """Rows with a trained decision, over all workers."""

    @property
    def behaviour_log_probs(self) -> Tensor:
        """(B, T) log-probabilities under the policy that sampled."""
        return self.batch.log_probs


def prepare(
    policy: TrainedPolicy,
    state: UpdateState,
    batch: Trajectories,
    shape: Shape,
    plan: list[list[Cut]],
    costs: CostStats,
    factor: Tensor | None,
    where: str,
) -> tuple[PreparedBatch, UpdateState, dict[str, float]]:
    """Compute what is constant across the epochs of `plan`; returns it, the state with moved normalisers and multipliers,
    and metrics.

    `factor` (copies, T) multiplies all advantages. All that workers must agree on is one exchange.
    Raises Diverged naming `where` and a tensor that is not finite, and MarlRayError if the algorithm's advantages have
    another shape than the batch.
    """
    hyper, algorithm, spec = policy.hyper, policy.algorithm, policy.algorithm.spec
    mask, left_out = _trained_rows(policy, batch)
    inputs = policy.family.inputs(policy.model, batch)
    old = _old_outputs(policy, state, inputs, batch, mask, shape, plan)
    reference = _reference_log_probs(policy, batch, shape, plan[0])
    divergence = _divergence(policy, inputs, batch, old.log_probs, reference, shape, plan[0])
    taxed = state.kl_coef * divergence if hyper.kl_coef and hyper.kl_place == "reward" else None
    batch = replace(batch, rewards=algorithm.shape_rewards(batch, hyper, policy.settings.horizon, taxed))
    if spec.critic_first:
        batch = replace(batch, values=fit_critic(policy, inputs, batch, mask, shape))
    raw, targets = _checked_advantages(policy, batch)
    known = torch.zeros_like(raw) if targets is None else targets
    no_costs = batch.costs.new_zeros(*mask.shape, 0)
    raw_costs, cost_targets = cost_advantages(batch, hyper) if policy.budgets else (no_costs, no_costs)
    sums = totals(
        {
            "bad": not_finite(batch),
            "advantages": moments(raw, mask),
            "targets": moments(known, mask),
            "residuals": moments(known - batch.values, mask),
            "divergence": moments(divergence, mask),
            "costs": signal_moments(raw_costs, mask),
            "cost_targets": signal_moments(cost_targets, mask),
            "sizes": torch.stack([counts(cut.take(mask, shape.agents)) for epoch in plan for cut in epoch]),
            "all": counts(mask),
            "left_out": left_out.sum().double(),
        }
        | (
            {"engine_gap": moments((old.log_probs - batch.log_probs).abs(), mask)}
            if policy.settings.other_engine
            else {}
        )
    )
    check_finite(where, sums["bad"])
    metrics: dict[str, float] = {}
    if hyper.kl_coef:
        metrics["reference_kl"] = _mean(sums["divergence"])
    if policy.settings.other_engine:
        metrics["engine/log_prob_gap"] = _mean(sums["engine_gap"])
    if spec.groups and batch.prompts is not None:
        rows = float(sums["left_out"]) + float(sums["all"][1])
        metrics["left_out"] = float(sums["left_out"]) / max(rows, 1.0)
    batch_norm = hyper.advantage_norm == "batch"
    advantages = standardise(raw, mask, sums["advantages"], hyper.std_ddof) if batch_norm else raw * mask
    returns = None
    if targets is not None and not spec.critic_first:
        (value_norm,) = updated_norms([state.value_norm], sums["targets"][None])
        state = replace(state, value_norm=value_norm)
        returns = value_norm.normalize(targets)
        metrics["explained_variance"] = _explained_variance(sums["targets"], sums["residuals"])
    cost_adv, cost_scale, cost_returns = no_costs, no_costs.new_zeros(0), None
    if policy.budgets:
        cost_adv, cost_scale = centred_costs(raw_costs, mask, sums["costs"], spec.constraint == "penalty")
        state = replace(state, cost_norms=updated_norms(state.cost_norms, sums["cost_targets"]))
        cost_returns = normalised(state.cost_norms, cost_targets)
        if costs.means is not None and costs.episodes and not algorithm.every_step:
            pairs = zip(state.multipliers, costs.means, strict=False)
            state = replace(state, multipliers=tuple(multiplier.updated(cost) for multiplier, cost in pairs))
    if factor is not None:
        per_row = factor.to(policy.device).repeat_interleave(shape.agents, 0)
        advantages, cost_adv = advantages * per_row, cost_adv * per_row[..., None]
    cap = policy.importance_cap
    prepared = PreparedBatch(
        batch,
        shape,
        plan,
        mask,
        inputs,
        policy.family.order(policy.model, batch, shape.agents),
        advantages,
        cost_adv,
        returns,
        cost_returns,
        old,
        policy.recomputes,
        None if cap is None else truncated_importance(old.log_probs, batch.log_probs, cap),
        reference,
        costs,
        _violations(policy, costs, cost_scale),
        sums["sizes"],
        int(sums["all"][1]),
    )
    return prepared, state, metrics


def _trained_rows(policy: TrainedPolicy, batch: Trajectories) -> tuple[Tensor, Tensor]:
    """The decisions that are trained on, (B, T) bool, and the rows that a comparison of groups leaves out, (B,) bool."""
    spec, mask = policy.algorithm.spec, trained_decisions(batch, policy.hyper)
    left_out = torch.zeros_like(batch.greedy)
    if spec.groups:  # nothing says whether an answer that nobody else gave to its prompt is good
        left_out = mask.any(1) & ~compared(batch, spec.greedy)
        mask = mask & ~left_out[:, None]
    return mask, left_out


def _old_outputs(
    policy: TrainedPolicy,
    state: UpdateState,
    inputs: Any,
    batch: Trajectories,
    mask: Tensor,
    shape: Shape,
    plan: list[list[Cut]],
) -> OldOutputs:
    """The outputs before the first step: as the rollout recorded them, or evaluated again where the policy asks for it.

    `state` has the normalisers as they were when the batch was gathered: when they move, so do the critics' units.
    """
    hyper = policy.hyper
    values = state.value_norm.normalize(batch.values)
    cost_values = normalised(state.cost_norms, batch.cost_values) if policy.budgets else batch.cost_values
    # A single gradient step starts at the old weights and computes their outputs itself; only these need them before it.
    needed = policy.importance_cap is not None or policy.settings.other_engine or hyper.kl_coef
    if not policy.recomputes or not (sum(map(len, plan)) > 1 or needed):
        return OldOutputs(batch.log_probs, values, cost_values)
    now = evaluate_all(policy, inputs, batch, batch.mask if hyper.kl_coef else mask, shape, plan[0])
    return OldOutputs(
        now.log_probs,
        values if now.values is None else now.values,
        cost_values if now.cost_values is None else now.cost_values,
    )


def _reference_log_probs(
    policy: TrainedPolicy, batch: Trajectories, shape: Shape, cuts: Sequence[Cut]
) -> Tensor | None:
    """(B, T), or None where the update reads no reference policy."""
    if not policy.needs_reference:
        return None
    (log_probs,) = in_passes(
        policy, batch, shape, lambda cut: [policy.family.reference(policy.copies, batch, shape, cut)], cuts
    )
    return log_probs


def _divergence(
    policy: TrainedPolicy,
    inputs: Any,
    batch: Trajectories,
    old_log_probs: Tensor,
    reference: Tensor | None,
    shape: Shape,
    cuts: Sequence[Cut],
) -> Tensor:
    """(B, T) estimated KL divergence (nats) of the policy from the reference before the first step; 0 where unused."""
    hyper = policy.hyper
    if not hyper.kl_coef or reference is None:
        return torch.zeros_like(old_log_probs)
    own = old_log_probs
    if (
        policy.settings.served
    ):  # the old log-probabilities are those of the policy that wrote, and not of the one that learns
        own = evaluate_all(policy, inputs, batch, batch.mask, shape, cuts).log_probs
    return kl_estimate(own, reference, hyper.kl_estimator)


def _checked_advantages(policy: TrainedPolicy, batch: Trajectories) -> tuple[Tensor, Tensor | None]:
    """The algorithm's advantages (B, T), not normalised, and targets (B, T); raises MarlRayError for other shapes."""
    algorithm, spec, expected = policy.algorithm, policy.algorithm.spec, batch.mask.shape
    raw, targets = algorithm.advantages(batch, policy.hyper)
    checked = {"advantages": raw, **({} if spec.critic == "none" or spec.critic_first else {"targets": targets})}
    for key, given in checked.items():
        if given is None or given.shape != expected:
            raise MarlRayError(
                f"algorithm {algorithm.name}: its `advantages` gives {key} of shape "
                f"{None if given is None else tuple(given.shape)}, expected {tuple(expected)}"
            )
    return raw, targets


def _explained_variance(targets: Tensor, residuals: Tensor) -> float:
    """1 - the mean square residual over the variance of the targets, from their moments (3,); 0 without variance."""
    n, total, square = targets.tolist()
    variance = square / max(n, 1) - (total / max(n, 1)) ** 2
    residual = float(residuals[2]) / max(n, 1)
    return 1 - residual / variance if variance > 1e-8 else 0.0


def _violations(policy: TrainedPolicy, costs: CostStats, cost_scale: Tensor) -> Tensor:
    """(K,) per decision; `cost_scale` (K,) are the divisors of the cost advantages."""
    raw = raw_violations(policy.budgets, costs)
    if raw is None:
        return torch.zeros(len(policy.budgets), device=policy.device)
    return torch.tensor(raw, device=policy.device) / cost_scale.to(policy.device)


def raw_violations(budgets: Sequence[float], costs: CostStats) -> list[float] | None:
    """The excess of a decision over its share of each budget, in units of the cost; None without budgets or episodes."""
    if not budgets or costs.means is None:
        return None
    pairs = zip(costs.means, budgets, strict=True)
    return [constraint_violation(mean, budget, costs.decisions) for mean, budget in pairs]


def _mean(sums: Tensor) -> float:
    """The mean, from moments (count, sum, sum of squares)."""
    return float(sums[1] / sums[0].clamp(min=1))


CHECKED = ("rewards", "costs", "log_probs", "values", "cost_values")
"""Tensors of a batch that must be finite."""


def not_finite(batch: Trajectories) -> Tensor:
    """1 for each of CHECKED that holds a NaN or an infinity, (5,)."""
    return torch.stack([(~getattr(batch, name).isfinite()).any() for name in CHECKED]).double()


def check_finite(where: str, bad: Tensor) -> None:
    """Raise Diverged naming the tensor if `not_finite`, summed over the workers, is positive for one."""
    for name, count in zip(CHECKED, bad.tolist(), strict=True):
        if count:
            raise Diverged(f"{where}: {name} of the batch are not finite")


def trained_decisions(batch: Trajectories, hyper: AlgorithmConfig) -> Tensor:
    """(B, T) bool: own decisions, without greedy rows and, if asked, without rows that were cut."""
    mask = batch.mask & ~batch.greedy[:, None]
    if hyper.overlong_filter:
        mask = mask & ~batch.truncated.any(1, keepdim=True)
    return mask


def signal_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Moments of every signal of (B, T, K) over own decisions, (K, 3)."""
    return (
        torch.stack([moments(column, mask) for column in values.unbind(-1)])
        if values.shape[-1]
        else mask.new_zeros(0, 3)
    )


def centred_costs(raw: Tensor, mask: Tensor, all_moments: Tensor, scale: bool) -> tuple[Tensor, Tensor]:
    """Centre cost advantages (B, T, K) and, with `scale`, divide them by each signal's spread; also the divisors, (K,).

    `all_moments` (K, 3) are over all workers. Without `scale` the advantages keep their units, which are the budgets'.
    """
    columns, divisors = [], []
    for column, sums in zip(raw.unbind(-1), all_moments, strict=True):
        n, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
        deviation = (sums[2] / n - mean**2).clamp(min=0).sqrt()
        divisor = deviation if scale and float(deviation) > 1e-8 else torch.ones_like(deviation)
        columns.append(standardise(column, mask, sums, center=True, scale=False) / divisor.to(column.dtype))
        divisors.append(divisor)
    return torch.stack(columns, -1), torch.stack(divisors).float()


def updated_norms(norms: Sequence[ValueNorm], all_moments: Tensor) -> tuple[ValueNorm, ...]:
    """Update normalisers with a batch's targets, given the moments (K, 3) of these over all workers.

    A batch without decisions moves none.
    """
    pairs = zip(norms, all_moments.tolist(), strict=True)
    return tuple(norm.updated(total / n, square / n) if n else norm for norm, (n, total, square) in pairs)


def normalised(norms: Sequence[ValueNorm], values: Tensor) -> Tensor:
    """Convert (B, T, K) from units of the cost to units of each signal's normaliser."""
    return torch.stack([norm.normalize(column) for norm, column in zip(norms, values.unbind(-1), strict=True)], -1)
