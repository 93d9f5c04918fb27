"""The actor's step of CPO and MACPO, on the plain copy of the policy that every worker holds.

Second-order steps are for small policies. Gradients, Fisher products and line-search values are summed over the
workers, so all workers arrive at equal weights.
"""

import torch
from torch import Tensor
from torch.func import functional_call

from marl_ray.algorithms.constraints.trust_region import (
    Parameters,
    backtracking_line_search,
    constrained_step,
    fisher_product,
    flatten,
    head_kl,
    unflatten,
)
from marl_ray.algorithms.definition import PolicyLossInputs
from marl_ray.algorithms.losses.ratios import token_ratio
from marl_ray.policies.actor_critic.distributions import Categorical, Distribution
from marl_ray.policies.actor_critic.policy import EncodedRows
from marl_ray.training.collectives import sum_over_workers
from marl_ray.training.learner.prepared_batch import PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy

CASES = {"unconstrained": 0.0, "constrained": 1.0, "recovery": 2.0}
"""The metric `trust_region_case` of each case of the dual problem."""


def constrained_weights(
    policy: TrainedPolicy, prepared: PreparedBatch, trust_region: float
) -> tuple[Parameters, dict[str, float]]:
    """Compute the weights of the rollout copy's actor after one constrained step, and the step's metrics.

    The weights are equal on all workers. `trust_region` bounds the mean KL divergence of the step (nats).
    """
    hyper, problem = policy.hyper, _ActorProblem(policy, prepared)
    gradient, cost_gradients = problem.gradients()
    local = fisher_product(problem.outputs, problem.parameters, problem.weights, problem.sizes)

    def product(vector: Tensor) -> Tensor:
        return sum_over_workers(local(vector)) + hyper.cg_damping * vector

    violations = prepared.violations.cpu()
    solution = constrained_step(gradient, cost_gradients, violations, trust_region, product, hyper.cg_iterations)
    search = backtracking_line_search(
        problem.evaluate,
        flatten(problem.parameters),
        solution.step,
        violations.tolist(),
        trust_region,
        hyper.line_search_decay,
        hyper.line_search_steps,
    )
    return unflatten(search.vector, problem.parameters), {
        "trust_region_kl": search.kl,
        "trust_region_case": CASES[solution.case],
        "line_search_steps": float(hyper.line_search_steps if search.accepted is None else search.accepted),
    }


class _ActorProblem:
    """The actor's losses on one batch as functions of its weights. N is the number of this worker's decisions."""

    def __init__(self, policy: TrainedPolicy, prepared: PreparedBatch):
        batch, rows, self.policy = prepared.batch, prepared.inputs.actor, policy
        self.actor = policy.rollout_model.actor
        self.distribution: Distribution = policy.rollout_model.distribution
        self.allowed = None if batch.action_masks is None else batch.action_masks.flatten(0, 1).cpu()
        self.actions, self.mask = batch.actions.flatten(0, 1).cpu(), prepared.mask.flatten().cpu()
        self.old, self.behaviour = prepared.old.log_probs.flatten().cpu(), prepared.behaviour_log_probs.flatten().cpu()
        self.old_values, self.advantages = batch.values.flatten().cpu(), prepared.advantages.flatten().cpu()
        self.cost_advantages = prepared.cost_advantages.flatten(0, 1).cpu()
        self.weights = self.mask.float() / max(float(sum_over_workers(self.mask.sum().float())), 1.0)
        self.sizes = self.distribution.sizes if isinstance(self.distribution, Categorical) else None
        self.values, self.columns = rows.values.cpu(), None if rows.columns is None else rows.columns.cpu()
        self.rows = EncodedRows(self.values, self.columns, None if rows.index is None else rows.index.cpu())
        self.parameters: Parameters = {name: p.detach().clone() for name, p in self.actor.named_parameters()}

    def outputs(self, parameters: Parameters) -> Tensor:
        """Return the normalised outputs (N, P) of every decision at these weights."""
        raw: Tensor = functional_call(self.actor, dict(parameters), (self.values, self.columns))
        return self.distribution.normalize(self.rows.expand(raw), self.allowed)

    def surrogates(self, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reward loss, cost surrogates (K,) and outputs at these weights.

        Losses and surrogates are this worker's part of the means.
        """
        outputs = self.outputs(parameters)
        log_probs = self.distribution.log_prob(outputs, self.actions)
        parts = (log_probs, self.old, self.advantages, self.mask, self.behaviour, self.old_values)
        evaluated = PolicyLossInputs(*(part[None] for part in parts))
        loss = (self.policy.algorithm.policy_loss(evaluated, self.policy.hyper).loss[0] * self.weights).sum()
        ratio = token_ratio(log_probs, self.old)
        return loss, (ratio[:, None] * self.cost_advantages * self.weights[:, None]).sum(0), outputs

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the reward loss, (D,), and of the cost surrogates, (K, D).

        The gradients are taken at the current weights, and are sums over all workers.
        """
        tracked = {name: p.clone().requires_grad_(True) for name, p in self.parameters.items()}
        loss, costs, outputs = self.surrogates(tracked)
        self.old_outputs = outputs.detach()  # divergences are measured from these
        worker_gradients = [
            flatten(
                dict(zip(tracked, torch.autograd.grad(term, list(tracked.values()), retain_graph=True), strict=True))
            )
            for term in (loss, *costs)
        ]
        summed = sum_over_workers(torch.stack(worker_gradients))
        return summed[0], summed[1:].clone()  # in memory of its own, whose alignment decides the last bits of products

    def evaluate(self, vector: Tensor) -> tuple[float, list[float], float]:
        """Return the reward loss, cost surrogates and mean KL divergence (nats) at other weights, (D,).

        The divergence is measured from the outputs at the current weights.
        """
        with torch.no_grad():
            new_loss, new_costs, new = self.surrogates(unflatten(vector, self.parameters))
            kl = (head_kl(self.old_outputs, new, self.sizes) * self.weights).sum()
            reward_loss, divergence, *cost_surrogates = sum_over_workers(
                torch.stack([new_loss, kl, *new_costs])
            ).tolist()
        return reward_loss, cost_surrogates, divergence
