"""The learner of one policy: FSDP2 weights, optimiser, normalisers, coefficients, and the update of one batch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from marl_ray.algorithms import algorithm_of
from marl_ray.algorithms.advantages.groups import compared
from marl_ray.algorithms.advantages.normalization import moments, standardise
from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.algorithms.constraints.multipliers import Multiplier
from marl_ray.algorithms.constraints.penalty import constraint_violation
from marl_ray.algorithms.losses.aggregation import counts
from marl_ray.algorithms.losses.kl import adaptive_coefficient, kl_estimate
from marl_ray.algorithms.losses.ratios import truncated_importance
from marl_ray.algorithms.with_critic.ppo import cost_advantages
from marl_ray.config import AlgorithmConfig, ConstraintConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.actor_critic import ActorCritic
from marl_ray.training.collectives import total, totals, world
from marl_ray.training.learner import family_actor_critic, gradient_epochs, trust_region_step
from marl_ray.training.learner.family import Copies, PolicyFamily
from marl_ray.training.learner.minibatches import Cut, Shape, minibatches
from marl_ray.training.learner.optimizers import optimizer_of
from marl_ray.training.learner.prepared_batch import (
    CostStats,
    Fixed,
    centred_costs,
    check_finite,
    normalised,
    not_finite,
    signal_moments,
    trained_decisions,
    updated_norms,
)
from marl_ray.trajectories import Trajectories

LEARNED = ("value", "first_moment", "second_moment", "updates", "integral", "error", "costs")
"""Fields of a multiplier that are state; the others are its settings."""


def family_of(model: Any) -> PolicyFamily:
    """The family's functions, by the model's type."""
    if isinstance(model, ActorCritic):
        return family_actor_critic
    from marl_ray.training.learner import family_token  # loads transformers

    return family_token


class Learner:
    """Trains one policy; holds a plain copy of it for the rollout, refreshed after every update."""

    def __init__(
        self,
        model: Any,
        algorithm: str,
        hyper: AlgorithmConfig,
        mesh: DeviceMesh,
        mixed_precision: bool,
        constraints: tuple[ConstraintConfig, ...] = (),
        horizon: int = 1,
        by_episode: bool = False,
        micro_batch: int | None = None,
        served: bool = False,
    ):
        """`model`, an ActorCritic or a TokenPolicy, has the same weights on every worker and is taken over.

        `by_episode`: rows are whole episodes, so minibatches are sets of them. `micro_batch` environment copies (responses,
        for a token policy) share a forward and backward pass. `served`: batches are of what other policies wrote, so that
        ratios are to the chances with which it was written, whatever this learner's own arithmetic says of them.
        """
        self.hyper, self.algorithm, self.family = hyper, algorithm_of(algorithm), family_of(model)
        self.budgets = tuple(constraint.budget for constraint in constraints) if self.algorithm.spec.costs else ()
        self.horizon, self.by_episode, self.micro_batch, self.served = horizon, by_episode, micro_batch, served
        self.needs_reference = hyper.kl_coef > 0 or self.algorithm.spec.pairs
        self.value_norm = ValueNorm()
        self.cost_norms = tuple(ValueNorm() for _ in self.budgets)
        start = self.algorithm.multiplier
        self.multipliers: tuple[Multiplier, ...] = (
            tuple(start(hyper, budget) for budget in self.budgets) if start else ()
        )
        self.entropy_coef, self.kl_coef = hyper.entropy_coef, hyper.kl_coef
        self.trust_region = hyper.trust_region
        self.mixed_precision = mixed_precision
        self.device = torch.device(mesh.device_type)
        self.copies: Copies = self.family.set_up(model, mesh, mixed_precision, self.needs_reference)
        self.model, self.rollout_model = self.copies.trained, self.copies.rollout
        self.actor, self.critics = self.family.actor(self.model), self.family.critics(self.model)
        # A trust region moves the actor without an optimiser.
        by_gradient = self.algorithm.spec.constraint != "trust_region"
        actor = [self.actor] if by_gradient else []
        self.optimizer = optimizer_of(hyper, [(actor, hyper.lr), (self.critics, hyper.critic_lr or hyper.lr)])
        exact = not mixed_precision and all(own.dtype == torch.float32 for own in self.rollout_model.parameters())
        # A trust region's actor learns on the very copy that samples.
        self.samples_alike = exact or not by_gradient
        """What sampled says of a decision what learns says of it. In bfloat16 the two differ by more than GSPO's clip is
        wide."""
        self.own_groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]

    @property
    def recomputes(self) -> bool:
        """Whether old log-probabilities and values are the learner's own, and not those that the rollout recorded."""
        if self.served:
            return self.algorithm.spec.pairs  # whose rows have none
        return self.algorithm.spec.recompute or self.hyper.importance_cap is not None or not self.samples_alike

    @property
    def pass_copies(self) -> int | None:
        """Copies of a pass: `micro_batch`, or half of it where a copy is a pair of responses."""
        pairs = self.algorithm.spec.pairs and self.micro_batch is not None
        return max(1, cast(int, self.micro_batch) // 2) if pairs else self.micro_batch

    def refresh_rollout_model(self) -> None:
        """Copy the sharded weights into the rollout copy; every worker takes part."""
        self.family.refresh(self.copies, self.mixed_precision)

    def set_progress(self, share: float, batches: int) -> None:
        """Learning rates, and the trust region, for a run of which `share` (0 to 1) and `batches` are done."""
        scale = max(0.0, 1.0 - share) if self.hyper.lr_decay else 1.0
        scale *= min(1.0, (batches + 1) / max(self.hyper.lr_warmup, 1))
        self.trust_region = self.hyper.trust_region * scale
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale

    def update(
        self,
        batch: Trajectories,
        seed: int,
        iteration: int,
        costs: CostStats,
        factor: Tensor | None = None,
        where: str = "training",
    ) -> dict[str, float]:
        """All epochs on one batch; every worker calls it with its own part. Metrics are means over the global batch.

        `factor` (copies, T) is how much more likely the policies updated before this one have made the joint action.
        Raises Diverged naming `where` and the tensor if a number is not finite.
        """
        batch = batch.to(self.device)
        agents = 2 if self.algorithm.spec.pairs else batch.agents
        shape = Shape(agents, batch.mask.shape[1], world()[0], self.family.bounds(batch, agents))
        batch = self.family.padded(batch, agents)
        plan = [
            minibatches(seed, iteration, epoch, self.hyper.minibatches, shape, self.by_episode)
            for epoch in range(self.hyper.epochs)
        ]
        fixed, metrics = self._fix(batch, shape, plan, costs, factor, where)
        violations = self._violations(costs)
        if self.algorithm.spec.constraint == "trust_region":
            metrics |= trust_region_step.update(self, fixed, violations)
            family_actor_critic.adopt_actor(self.copies)
        metrics |= gradient_epochs.update(self, fixed, shape, plan, violations, costs, where)
        self.refresh_rollout_model()
        self._steer(metrics, fixed.sequences)
        return metrics | {f"multiplier_{k}": m.multiplier for k, m in enumerate(self.multipliers)}

    def _fix(
        self,
        batch: Trajectories,
        shape: Shape,
        plan: list[list[Cut]],
        costs: CostStats,
        factor: Tensor | None,
        where: str,
    ) -> tuple[Fixed, dict[str, float]]:
        """Compute what is constant across epochs: advantages, returns, old log-probabilities; and metrics.

        Normalisers and multipliers move first, by this batch. All that workers must agree on is one exchange.
        """
        hyper, spec = self.hyper, self.algorithm.spec
        mask = trained_decisions(batch, hyper)
        left_out = torch.zeros_like(batch.greedy)
        if spec.groups:  # nothing says whether an answer that nobody else gave to its prompt is good
            left_out = mask.any(1) & ~compared(batch, spec.greedy)
            mask = mask & ~left_out[:, None]
        inputs = self.family.inputs(self.model, batch)
        old = batch.log_probs
        # What the critics put out before the first step: the normalisers move below, and with them the units.
        old_values = self.value_norm.normalize(batch.values)
        old_cost_values = normalised(self.cost_norms, batch.cost_values) if self.budgets else batch.cost_values
        # Where there is one gradient step, it is at the old weights itself, and only what is named here needs them before.
        if self.recomputes and (sum(map(len, plan)) > 1 or hyper.importance_cap is not None or hyper.kl_coef):
            asked = batch.mask if hyper.kl_coef else mask
            now = gradient_epochs.evaluate_all(self, inputs, batch, asked, shape, plan[0])
            old = now.log_probs
            old_values = old_values if now.values is None else now.values
            old_cost_values = old_cost_values if now.cost_values is None else now.cost_values
        reference = self._reference_log_probs(batch, shape, plan[0])
        divergence = torch.zeros_like(old)
        if hyper.kl_coef and reference is not None:
            own = old
            if self.served:  # `old` is the policy that wrote, and not the one that is to stay near the reference
                own = gradient_epochs.evaluate_all(self, inputs, batch, batch.mask, shape, plan[0]).log_probs
            divergence = kl_estimate(own, reference, hyper.kl_estimator)
        taxed = self.kl_coef * divergence if hyper.kl_coef and hyper.kl_place == "reward" else None
        batch = replace(batch, rewards=self.algorithm.shape_rewards(batch, hyper, self.horizon, taxed))
        if spec.critic_first:
            batch = replace(batch, values=gradient_epochs.fit_critic(self, inputs, batch, mask, shape))
        raw, targets = self.algorithm.advantages(batch, hyper)
        wanted = {"advantages": raw, **({} if spec.critic == "none" or spec.critic_first else {"targets": targets})}
        for key, found in wanted.items():
            if found is None or found.shape != mask.shape:
                raise MarlRayError(
                    f"algorithm {self.algorithm.name}: its `advantages` gives {key} of shape "
                    f"{None if found is None else tuple(found.shape)}, expected {tuple(mask.shape)}"
                )
        known = torch.zeros_like(raw) if targets is None else targets
        no_costs = batch.costs.new_zeros(*mask.shape, 0)
        raw_costs, cost_targets = cost_advantages(batch, hyper) if self.budgets else (no_costs, no_costs)
        sums = totals(
            {
                "bad": not_finite(batch),
                "advantages": moments(raw, mask),
                "targets": moments(known, mask),
                "residuals": moments(known - batch.values, mask),
                "divergence": moments(divergence, mask),
                "costs": signal_moments(raw_costs, mask),
                "cost_targets": signal_moments(cost_targets, mask),
                "sizes": torch.stack([counts(cut.of(mask, shape.agents)) for epoch in plan for cut in epoch]),
                "whole": counts(mask),
                "left_out": left_out.sum().double(),
            }
        )
        check_finite(where, sums["bad"])
        metrics: dict[str, float] = {}
        if hyper.kl_coef:
            metrics["reference_kl"] = _mean(sums["divergence"])
        if spec.groups and batch.prompts is not None:
            rows = float(sums["left_out"]) + float(sums["whole"][1])
            metrics["left_out"] = float(sums["left_out"]) / max(rows, 1.0)
        if hyper.advantage_norm == "batch":
            advantages = standardise(raw, mask, sums["advantages"], hyper.std_ddof)
        else:
            advantages = raw * mask
        returns = None
        if targets is not None and not spec.critic_first:
            (self.value_norm,) = updated_norms([self.value_norm], sums["targets"][None])
            returns = self.value_norm.normalize(targets)
            n, total_return, square = sums["targets"].tolist()
            variance = square / max(n, 1) - (total_return / max(n, 1)) ** 2
            residual = float(sums["residuals"][2]) / max(n, 1)
            metrics["explained_variance"] = 1 - residual / variance if variance > 1e-8 else 0.0
        cost_adv, cost_returns = no_costs, None
        if self.budgets:
            scale = spec.constraint == "penalty"
            cost_adv, self.cost_scale = centred_costs(raw_costs, mask, sums["costs"], scale)
            self.cost_norms = updated_norms(self.cost_norms, sums["cost_targets"])
            cost_returns = normalised(self.cost_norms, cost_targets)
            if costs.means is not None and costs.episodes and not self.algorithm.every_step:
                pairs = zip(self.multipliers, costs.means, strict=False)
                self.multipliers = tuple(multiplier.updated(cost) for multiplier, cost in pairs)
        if factor is not None:
            per_row = factor.to(self.device).repeat_interleave(shape.agents, 0)
            advantages, cost_adv = advantages * per_row, cost_adv * per_row[..., None]
        fixed = Fixed(
            batch,
            mask,
            inputs,
            self.family.order(self.model, batch, shape.agents),
            advantages,
            cost_adv,
            returns,
            cost_returns,
            old_values,
            old_cost_values,
            old,
            self.recomputes,
            None if hyper.importance_cap is None else truncated_importance(old, batch.log_probs, hyper.importance_cap),
            reference,
            sums["sizes"],
            int(sums["whole"][1]),
        )
        return fixed, metrics

    def _violations(self, costs: CostStats) -> Tensor:
        """(K,) per decision, in the units of the cost advantages."""
        if not self.budgets or costs.means is None:
            return torch.zeros(len(self.budgets), device=self.device)
        raw = [
            constraint_violation(mean, budget, costs.decisions)
            for mean, budget in zip(costs.means, self.budgets, strict=True)
        ]
        return torch.tensor(raw, device=self.device) / self.cost_scale.to(self.device)

    def _reference_log_probs(self, batch: Trajectories, shape: Shape, cuts: Sequence[Cut]) -> Tensor | None:
        if not self.needs_reference:
            return None
        (found,) = gradient_epochs.in_passes(
            self, batch, shape, lambda cut: [self.family.reference(self.copies, batch, shape, cut)], cuts
        )
        return found

    def _steer(self, metrics: Mapping[str, float], sequences: int) -> None:
        """Move the coefficients that have a target, after a batch of `sequences` rows over all workers."""
        hyper = self.hyper
        if hyper.kl_target is not None and "reference_kl" in metrics:
            self.kl_coef = adaptive_coefficient(
                self.kl_coef, metrics["reference_kl"], hyper.kl_target, hyper.kl_horizon, sequences
            )
        if hyper.entropy_target is not None:
            step = hyper.entropy_step if metrics["entropy"] < hyper.entropy_target else -hyper.entropy_step
            self.entropy_coef = max(0.0, self.entropy_coef + step)

    def log_ratio(self, batch: Trajectories) -> Tensor:
        """(copies, T) how the update has changed the log-probability of what this actor-critic's agents did, on CPU."""
        return family_actor_critic.log_ratio(self.rollout_model, batch)

    def moved_costs(self, costs: CostStats, batch: Trajectories, after: Tensor, before: Tensor | None) -> CostStats:
        """What an episode is expected to cost after this update, (copies, T) factors of all updates until then and before.

        Sequential constrained updates share one budget: what one policy's step uses of it, the next must not use again.
        A factor is of all agents that act together, and a cost is the team's, so a step of a copy counts once: with the
        mean of what the deciding agents' critics say of it.
        """
        if not self.budgets or costs.means is None:
            return costs
        raw, _ = cost_advantages(batch, self.hyper)
        mask = trained_decisions(batch, self.hyper)
        deciding, per_agent = (x.unflatten(0, (-1, batch.agents)) for x in (mask[..., None], raw))
        team = (per_agent * deciding).sum(1) / deciding.sum(1).clamp(min=1)
        change = (after - (1.0 if before is None else before))[..., None] * team
        sums = total(torch.cat([change.sum((0, 1)), mask.sum()[None].float()]))
        shift = (sums[:-1] / sums[-1].clamp(min=1) * costs.decisions).tolist()
        return replace(costs, means=tuple(mean + moved for mean, moved in zip(costs.means, shift, strict=True)))

    def state(self) -> dict[str, Any]:
        """Plain data beside the weights and the optimiser."""
        return {
            "value_norm": vars(self.value_norm),
            "cost_norms": [vars(norm) for norm in self.cost_norms],
            "multipliers": [vars(multiplier) for multiplier in self.multipliers],
            "entropy_coef": self.entropy_coef,
            "kl_coef": self.kl_coef,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the weights were loaded before."""
        self.value_norm = ValueNorm(**state["value_norm"])
        self.cost_norms = tuple(ValueNorm(**norm) for norm in state["cost_norms"])
        pairs = zip(self.multipliers, state["multipliers"], strict=True)
        self.multipliers = tuple(type(multiplier)(**saved) for multiplier, saved in pairs)
        self.entropy_coef, self.kl_coef = state["entropy_coef"], state["kl_coef"]
        self.refresh_rollout_model()

    def apply_hyper(self) -> None:
        """Put this learner's hyper-parameters over those that came with a loaded state. What a controller has learned
        (multipliers, coefficients with a target) stays as it came."""
        hyper = self.hyper
        for group, own in zip(self.optimizer.param_groups, self.own_groups, strict=True):
            group |= own
        if hyper.entropy_target is None:
            self.entropy_coef = hyper.entropy_coef
        if hyper.kl_target is None:
            self.kl_coef = hyper.kl_coef
        start = self.algorithm.multiplier
        if start is not None:
            fresh = [start(hyper, budget) for budget in self.budgets]
            self.multipliers = tuple(
                replace(new, **{key: value for key, value in vars(old).items() if key in LEARNED})
                for new, old in zip(fresh, self.multipliers, strict=True)
            )


def _mean(found: Tensor) -> float:
    """Of moments (count, sum, sum of squares)."""
    return float(found[1] / found[0].clamp(min=1))
