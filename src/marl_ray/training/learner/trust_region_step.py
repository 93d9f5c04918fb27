"""The actor's step of CPO and MACPO, on the plain copy of the policy that every worker holds.

Second-order steps are for small policies. Gradients, Fisher products and line-search values are summed over the
workers, so all workers arrive at equal weights.
"""

import torch
from torch import Tensor
from torch.func import functional_call

from marl_ray.algorithms.base import Evaluated
from marl_ray.algorithms.constraints.trust_region import (
    Parameters,
    backtracking,
    constrained_step,
    fisher_product,
    flatten,
    head_kl,
    unflatten,
)
from marl_ray.algorithms.losses.ratios import token_ratio
from marl_ray.policies.actor_critic.distributions import Categorical, Distribution
from marl_ray.policies.actor_critic.policy import Prepared
from marl_ray.training.collectives import total
from marl_ray.training.learner.prepared_batch import PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy

CASES = {"unconstrained": 0.0, "constrained": 1.0, "recovery": 2.0}
"""The metric `trust_region_case` of each case of the dual problem."""


def constrained_weights(
    policy: TrainedPolicy, prepared: PreparedBatch, trust_region: float
) -> tuple[Parameters, dict[str, float]]:
    """Compute the weights of the rollout copy's actor after one constrained step, equal on all workers, and the step's
    metrics.

    `trust_region` bounds the mean KL divergence of the step (nats).
    """
    actor, hyper = policy.rollout_model.actor, policy.hyper
    distribution: Distribution = policy.rollout_model.distribution
    batch = prepared.batch
    rows: Prepared = prepared.inputs.actor
    mask = prepared.mask.flatten().cpu()
    allowed = None if batch.action_masks is None else batch.action_masks.flatten(0, 1).cpu()
    actions, old = batch.actions.flatten(0, 1).cpu(), prepared.old.log_probs.flatten().cpu()
    behaviour, values_then = prepared.behaviour_log_probs.flatten().cpu(), batch.values.flatten().cpu()
    advantages, cost_advantages = prepared.advantages.flatten().cpu(), prepared.cost_advantages.flatten(0, 1).cpu()
    weights = mask.float() / max(float(total(mask.sum().float())), 1.0)
    sizes = distribution.sizes if isinstance(distribution, Categorical) else None
    values, columns = rows.values.cpu(), None if rows.columns is None else rows.columns.cpu()
    spread = Prepared(values, columns, None if rows.index is None else rows.index.cpu())
    parameters: Parameters = {name: p.detach().clone() for name, p in actor.named_parameters()}

    def outputs(at: Parameters) -> Tensor:
        """Normalised outputs (N, P) of every decision."""
        raw: Tensor = functional_call(actor, dict(at), (values, columns))
        return distribution.normalize(spread.spread(raw), allowed)

    def surrogates(at: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """Reward loss, cost surrogates (K,) and outputs; this worker's part of the means."""
        now = outputs(at)
        log_probs = distribution.log_prob(now, actions)
        evaluated = Evaluated(*(x[None] for x in (log_probs, old, advantages, mask, behaviour, values_then)))
        loss = (policy.algorithm.policy_loss(evaluated, hyper).loss[0] * weights).sum()
        ratio = token_ratio(log_probs, old)
        return loss, (ratio[:, None] * cost_advantages * weights[:, None]).sum(0), now

    tracked = {name: p.clone().requires_grad_(True) for name, p in parameters.items()}
    loss, costs, now = surrogates(tracked)
    before = now.detach()
    gradients = [
        flatten(dict(zip(tracked, torch.autograd.grad(term, list(tracked.values()), retain_graph=True), strict=True)))
        for term in (loss, *costs)
    ]
    gradient, *cost_gradients = total(torch.stack(gradients)).unbind()
    local = fisher_product(outputs, parameters, weights, sizes)

    def product(vector: Tensor) -> Tensor:
        return total(local(vector)) + hyper.cg_damping * vector

    violations = prepared.violations.cpu()
    solution = constrained_step(
        gradient,
        torch.stack(cost_gradients) if cost_gradients else gradient.new_zeros(0, len(gradient)),
        violations,
        trust_region,
        product,
        hyper.cg_iterations,
    )

    def evaluate(vector: Tensor) -> tuple[float, list[float], float]:
        with torch.no_grad():
            new_loss, new_costs, new = surrogates(unflatten(vector, parameters))
            kl = (head_kl(before, new, sizes) * weights).sum()
            reward_loss, divergence, *rest = total(torch.stack([new_loss, kl, *new_costs])).tolist()
        return reward_loss, rest, divergence

    search = backtracking(
        evaluate,
        flatten(parameters),
        solution.step,
        violations.tolist(),
        trust_region,
        hyper.line_search_decay,
        hyper.line_search_steps,
    )
    return unflatten(search.vector, parameters), {
        "trust_region_kl": search.kl,
        "trust_region_case": CASES[solution.case],
        "line_search_steps": float(hyper.line_search_steps if search.accepted is None else search.accepted),
    }
