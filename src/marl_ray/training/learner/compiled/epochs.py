"""The epochs of one batch by compiled gradient steps, with the results of `gradient_epochs.descend` within 1e-5."""

import math
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from marl_ray.policies.actor_critic.compiled.adam import AdamSettings, adam_step
from marl_ray.policies.actor_critic.compiled.arguments import DecisionArrays, NetworkInputs, PPOTerms, of_vectors
from marl_ray.policies.actor_critic.compiled.kernels import ppo_gradient, standardise
from marl_ray.policies.actor_critic.compiled.network import categories_of, layout_of
from marl_ray.policies.actor_critic.networks import Network
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.training.collectives import total, world
from marl_ray.training.errors import DivergedError
from marl_ray.training.learner.compiled.flat_state import FlatState
from marl_ray.training.learner.minibatches import Selection
from marl_ray.training.learner.optimizers import backward_over_workers, local_part
from marl_ray.training.learner.pass_loss import EvaluatedPass, pass_loss
from marl_ray.training.learner.prepared_batch import PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState

TOLERANCE = 1e-5
"""Greatest difference of a gradient from torch's, as a share of the greatest gradient if that is above 1."""


class CompiledBatch:
    """A prepared batch of a policy that learns by compiled code, as arrays."""

    def __init__(self, policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch):
        model, hyper, batch = cast(ActorCritic, policy.rollout_model), policy.hyper, prepared.batch
        assert model.critic is not None and prepared.returns is not None
        self.actor, self.critic = layout_of(model.actor), layout_of(model.critic)
        self.inputs = _inputs(model.actor, batch.observations.flatten(0, 1))
        masks, actions = batch.action_masks, int(self.actor.widths[-1])
        self.allowed = np.empty((0, actions), bool) if masks is None else _array(masks.flatten(0, 1), bool)
        floats = (prepared.old.log_probs, prepared.advantages, prepared.returns, prepared.old.values)
        self.data = DecisionArrays(
            _array(batch.actions.flatten(), np.int64), *(_array(x.flatten(), np.float32) for x in floats)
        )
        low, high = hyper.clip_range
        self.terms = PPOTerms(
            float(low),
            float(high),
            float(hyper.dual_clip or 0.0),
            float(hyper.value_clip or 0.0),
            float(hyper.huber_delta),
            float(hyper.value_coef),
            float(state.entropy_coef),
            1.0,
        )
        self.number = torch.arange(prepared.mask.numel()).view(prepared.mask.shape)
        self.prepared = prepared

    def gradient(self, weights: np.ndarray, selection: Selection, decisions: float, sums: np.ndarray) -> np.ndarray:
        """The gradient of a minibatch's loss over all workers; adds this worker's metrics to `sums` (5,)."""
        agents = self.prepared.shape.agents
        chosen = selection.take(self.number, agents)[selection.take(self.prepared.mask, agents)].numpy()
        gradient, terms = np.empty_like(weights), self.terms._replace(decisions=max(float(decisions), 1.0))
        networks = self.actor, self.critic
        ppo_gradient(weights, *networks, self.inputs, self.allowed, chosen, self.data, terms, gradient, sums)
        return gradient if world()[1] == 1 else total(torch.from_numpy(gradient)).numpy()


def largest_difference(policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch) -> float:
    """The greatest difference of the first minibatch's compiled gradient from torch's, as `TOLERANCE` measures it; equal on
    all workers. Changes nothing."""
    selection, size = prepared.minibatch_plan[0][0], prepared.sizes[0].tolist()
    flat = FlatState(policy)
    compiled = CompiledBatch(policy, state, prepared).gradient(flat.weights, selection, size[0], np.zeros(5))
    policy.optimizer.zero_grad(set_to_none=True)
    evaluated = EvaluatedPass(policy, state, prepared, selection, True)
    loss, _ = pass_loss(policy, state, prepared, evaluated, size, torch.zeros(0))
    backward_over_workers(loss)
    worst = 0.0
    for parameter, expected in flat.own(compiled):
        given = local_part(cast(Tensor, parameter.grad)).reshape(-1).numpy()
        if given.size:
            worst = max(worst, float(np.abs(given - expected).max()) / max(1.0, float(np.abs(given).max())))
    policy.optimizer.zero_grad(set_to_none=True)
    cast(FSDPModule, policy.model).reshard()
    return float(total(torch.tensor(worst)))


def descend(
    policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch, where: str
) -> tuple[UpdateState, dict[str, float]]:
    """Take all gradient steps on a batch, as `gradient_epochs.descend` does; the state stays as it is.

    Raises DivergedError naming `where` and a metric that is not finite.
    """
    hyper, flat, batch = policy.hyper, FlatState(policy), CompiledBatch(policy, state, prepared)
    bounds = np.array([0, batch.actor.size, batch.actor.size + batch.critic.size])
    settings = AdamSettings(flat.rates, flat.decays, bounds, hyper.max_grad_norm, *hyper.adam_betas, hyper.adam_eps)
    sizes, sums, norms, steps = iter(prepared.sizes[:, 0].tolist()), np.zeros(5), 0.0, 0
    for epoch in prepared.minibatch_plan:
        before, steps_before = sums.copy(), steps
        for selection in epoch:
            if not (size := next(sizes)):
                continue  # no decision is trained on: a step would only follow the optimiser's momentum
            gradient = batch.gradient(flat.weights, selection, size, sums)
            flat.step, steps = flat.step + 1, steps + 1
            norms += adam_step(flat.weights, gradient, flat.first, flat.second, settings, flat.step)
        taken = max(steps - steps_before, 1)
        if hyper.target_kl is not None and _total(sums - before)[2] / taken > hyper.target_kl:
            break
    flat.write_back()
    policy_loss, entropy, kl, clipped, value_loss = (_total(sums) / max(steps, 1)).tolist()
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "kl": kl}
    metrics |= {"clip_fraction": clipped, "grad_norm": norms / max(steps, 1)}
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise DivergedError(f"{where}: {name} is not finite")
    return state, metrics


def _inputs(network: Network, observations: Tensor) -> NetworkInputs:
    """The rows that the decisions (N,) read, from their observations (N, D)."""
    if (categories := categories_of(network)) is not None:
        return categories.inputs(_array(observations))
    rows = _array(observations, np.float32)
    if not layout_of(network).norm:
        return of_vectors(rows)
    normalised = np.empty_like(rows)
    standardise(rows, normalised)
    return of_vectors(normalised)


def _total(sums: np.ndarray) -> np.ndarray:
    return sums if world()[1] == 1 else total(torch.from_numpy(sums)).numpy()


def _array(values: Tensor, dtype: type | None = None) -> np.ndarray:
    return np.ascontiguousarray(values.numpy(), dtype)
