"""The epochs of one batch by compiled gradient steps, with the results of `gradient_epochs.descend` within 1e-5."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from marl_ray.config import HyperParameters
from marl_ray.policies.actor_critic.compiled.adam import AdamSettings, adam_step
from marl_ray.policies.actor_critic.compiled.arguments import DecisionArrays, NetworkInputs, PPOSettings, of_vectors
from marl_ray.policies.actor_critic.compiled.kernels import network_gradient, standardize
from marl_ray.policies.actor_critic.compiled.network import categories_of, layout_of
from marl_ray.policies.actor_critic.compiled.rows import sort_by_row
from marl_ray.policies.actor_critic.networks import Network
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.training.collectives import rank_and_world_size, sum_over_workers
from marl_ray.training.errors import DivergedError
from marl_ray.training.learner.compiled.flat_state import FlatState
from marl_ray.training.learner.minibatches import Selection
from marl_ray.training.learner.optimizers import backward_over_workers, local_part
from marl_ray.training.learner.pass_loss import ScoredPass, pass_loss
from marl_ray.training.learner.prepared_batch import MinibatchSize, PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState

TOLERANCE = 1e-5
"""Maximum difference of a gradient from torch's, as a share of the greatest gradient if that is above 1."""


class CompiledBatch:
    """A prepared batch of a policy that learns by compiled code, as arrays."""

    def __init__(self, policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch):
        model, hyper, batch = cast(ActorCritic, policy.rollout_model), policy.hyper, prepared.batch
        assert model.critic is not None and prepared.returns is not None
        self.networks = layout_of(model.actor), layout_of(model.critic)
        size = self.networks[0].size
        self.parts = slice(0, size), slice(size, size + self.networks[1].size)
        """The places of the actor's and of the critic's weights in a row of both."""
        critic_inputs, heads = _encode_critic_rows(model, prepared)
        self.inputs = _encode_rows(model.actor, batch.observations.flatten(0, 1)), critic_inputs
        masks, actions = batch.action_masks, int(self.networks[0].widths[-1])
        self.allowed = np.empty((0, actions), bool) if masks is None else _to_array(masks.flatten(0, 1), bool)
        floats = (prepared.old.log_probs, prepared.advantages, prepared.returns, prepared.old.values)
        log_probs, advantages, returns, values = (_to_array(x.flatten(), np.float32) for x in floats)
        taken = _to_array(batch.actions.flatten(), np.int64)
        self.data = DecisionArrays(taken, log_probs, advantages, returns, values, heads)
        low, high = hyper.clip_range
        self.terms = PPOSettings(
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

    def decision_numbers(self, selection: Selection) -> np.ndarray:
        """Return the numbers (n,) of the decisions of a minibatch that are trained on."""
        agents = self.prepared.share.agents
        return selection.take(self.number, agents)[selection.take(self.prepared.mask, agents)].numpy()

    def gradient(self, weights: np.ndarray, minibatch: np.ndarray, decisions: float, sums: np.ndarray) -> np.ndarray:
        """Return the gradient (weights,) of a minibatch's loss over all workers.

        Adds this worker's metrics to `sums` (5,).
        """
        gradient = np.empty_like(weights)
        for k, part in enumerate(self.parts):
            self.part_gradient(k, weights[part], minibatch, decisions, gradient[part], sums)
        return gradient if rank_and_world_size()[1] == 1 else sum_over_workers(torch.from_numpy(gradient)).numpy()

    def part_gradient(
        self,
        k: int,
        weights: np.ndarray,
        minibatch: np.ndarray,
        decisions: float,
        gradient: np.ndarray,
        sums: np.ndarray,
    ) -> None:
        """Write this worker's gradient of network `k`, the actor or the critic, and add its metrics to `sums` (5,)."""
        terms = self.terms._replace(decisions=max(float(decisions), 1.0))
        inputs = self.inputs[k]
        row_order = sort_by_row(minibatch, inputs.numbers, max(len(inputs.rows), len(inputs.codes)))
        arguments = inputs, self.allowed, row_order, self.data, terms
        network_gradient(weights, self.networks[k], k == 1, *arguments, gradient, sums)


def largest_difference(policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch) -> float:
    """Return the greatest difference of the first minibatch's compiled gradient from torch's.

    `TOLERANCE` measures it, and it is equal on all workers. Changes nothing.
    """
    selection, size = prepared.minibatch_plan[0][0], MinibatchSize(*prepared.sizes[0].tolist())
    flat = FlatState(policy)
    batch = CompiledBatch(policy, state, prepared)
    compiled = batch.gradient(flat.weights, batch.decision_numbers(selection), size.decisions, np.zeros(5))
    policy.optimizer.zero_grad(set_to_none=True)
    scored = ScoredPass(policy, state, prepared, selection, True)
    loss, _ = pass_loss(policy, state, prepared, scored, size, torch.zeros(0))
    backward_over_workers(loss)
    worst = 0.0
    for parameter, expected in flat.worker_parts(compiled):
        gradient = local_part(cast(Tensor, parameter.grad)).reshape(-1).numpy()
        if gradient.size:
            worst = max(worst, float(np.abs(gradient - expected).max()) / max(1.0, float(np.abs(gradient).max())))
    policy.optimizer.zero_grad(set_to_none=True)
    cast(FSDPModule, policy.model).reshard()
    return float(sum_over_workers(torch.tensor(worst)))


def descend(
    policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch, where: str
) -> tuple[UpdateState, dict[str, float]]:
    """Take all gradient steps on a batch, as `gradient_epochs.descend` does.

    The state stays as it is. Raises DivergedError naming `where` and a metric that is not finite.
    """
    flat, batch = FlatState(policy), CompiledBatch(policy, state, prepared)
    sizes = iter(prepared.sizes[:, 0].tolist())
    sums = np.zeros(5)
    norms = 0.0
    steps = 0
    # Without a decision to train on, a step would only follow the optimiser's momentum.
    epochs = [
        [(batch.decision_numbers(part), size) for part in epoch if (size := next(sizes))]
        for epoch in prepared.minibatch_plan
    ]
    target = policy.hyper.target_kl
    for minibatches in [list(itertools.chain(*epochs))] if target is None else epochs:
        before = sums.copy()
        norms += _take_steps(policy.hyper, flat, batch, minibatches, sums)
        flat.step, steps = flat.step + len(minibatches), steps + len(minibatches)
        if target is not None and _sum_over_all(sums - before)[2] / max(len(minibatches), 1) > target:
            break
    flat.write_back()
    policy_loss, entropy, kl, clipped, value_loss = (_sum_over_all(sums) / max(steps, 1)).tolist()
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "kl": kl}
    metrics |= {"clip_fraction": clipped, "grad_norm": norms / max(steps, 1)}
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise DivergedError(f"{where}: {name} is not finite")
    return state, metrics


def _take_steps(
    hyper: HyperParameters,
    flat: FlatState,
    batch: CompiledBatch,
    minibatches: list[tuple[np.ndarray, float]],
    sums: np.ndarray,
) -> float:
    """Take a step of both networks on each minibatch.

    A minibatch is (its decisions, their number over all workers). Adds the metrics to `sums`, and returns the sum of
    the norms of the actor's gradients.

    The networks share no weight, and each is clipped by its own norm, so a worker that is alone takes all steps of
    one network after another, and both at once if it has two threads; the numbers are the same.
    """
    adam = hyper.max_grad_norm, *hyper.adam_betas, hyper.adam_eps
    states = [
        (
            flat.weights[part],
            flat.first_moments[part],
            flat.second_moments[part],
            AdamSettings(flat.rates[part], flat.decays[part], *adam),
        )
        for part in batch.parts
    ]

    def step(k: int, number: int, gradient: np.ndarray) -> float:
        weights, first, second, settings = states[k]
        norm: float = adam_step(weights, gradient, first, second, settings, number)
        return norm

    def descend_alone(k: int, network_sums: np.ndarray) -> float:
        weights, norms = states[k][0], 0.0
        gradient = np.empty_like(weights)
        for number, (minibatch, size) in enumerate(minibatches, flat.step + 1):
            batch.part_gradient(k, weights, minibatch, size, gradient, network_sums)
            norms += step(k, number, gradient)
        return norms

    if rank_and_world_size()[1] == 1:
        critic_sums = np.zeros_like(sums)
        second = _second_thread().submit(descend_alone, 1, critic_sums) if torch.get_num_threads() > 1 else None
        norms = descend_alone(0, sums)
        descend_alone(1, critic_sums) if second is None else second.result()
        sums += critic_sums
        return norms
    norms = 0.0
    for number, (minibatch, size) in enumerate(minibatches, flat.step + 1):
        gradient = batch.gradient(flat.weights, minibatch, size, sums)
        norms += step(0, number, gradient[batch.parts[0]])
        step(1, number, gradient[batch.parts[1]])
    return norms


@cache
def _second_thread() -> ThreadPoolExecutor:
    """Return the thread on which the critic's steps are taken while the actor's are."""
    return ThreadPoolExecutor(1, thread_name_prefix="critic")


def _encode_rows(network: Network, observations: Tensor) -> NetworkInputs:
    """Return the rows that the decisions (N,) read, from their observations (N, D)."""
    if (categories := categories_of(network)) is not None:
        return categories.inputs(_to_array(observations))
    rows = _to_array(observations, np.float32)
    if not layout_of(network).norm:
        return of_vectors(rows)
    normalized = np.empty_like(rows)
    standardize(rows, normalized)
    return of_vectors(normalized)


def _encode_critic_rows(model: ActorCritic, prepared: PreparedBatch) -> tuple[NetworkInputs, np.ndarray]:
    """Return the critic's input row of each decision, and the number of the output that is its value.

    The numbers are (N,) int64. A central critic reads the state of all agents once, and has an output for each.
    """
    batch, agents, (rows, steps) = prepared.batch, prepared.share.agents, prepared.mask.shape
    assert model.critic is not None
    if batch.states is None:
        return _encode_rows(model.critic, batch.observations.flatten(0, 1)), np.zeros(rows * steps, np.int64)
    inputs, row = _encode_rows(model.critic, batch.states.flatten(0, 1)), np.arange(rows)[:, None]
    places = row // agents * steps + np.arange(steps)
    return inputs._replace(numbers=inputs.numbers[places.ravel()]), (row % agents).repeat(steps, 1).ravel()


def _sum_over_all(sums: np.ndarray) -> np.ndarray:
    return sums if rank_and_world_size()[1] == 1 else sum_over_workers(torch.from_numpy(sums)).numpy()


def _to_array(values: Tensor, dtype: type | None = None) -> np.ndarray:
    return np.ascontiguousarray(values.numpy(), dtype)
