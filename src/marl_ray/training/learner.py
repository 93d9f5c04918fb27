"""The learner of one policy: FSDP2 weights, optimiser, value normaliser, and the update of one batch."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from marl_ray.algorithms import ALGORITHMS
from marl_ray.algorithms.base import Evaluated
from marl_ray.algorithms.value_norm import ValueNorm
from marl_ray.config import AlgorithmConfig
from marl_ray.policies.actor_critic import ActorCritic, Prepared
from marl_ray.rollout.random import time_permutation
from marl_ray.training.collectives import total, world
from marl_ray.trajectories import Trajectories


class Learner:
    """Trains one policy; holds a plain copy of it for the rollout, refreshed after every update."""

    def __init__(
        self,
        model: ActorCritic,
        algorithm: str,
        hyper: AlgorithmConfig,
        mesh: DeviceMesh,
        mixed_precision: bool,
    ):
        """`model` has the same weights on every worker and becomes the rollout copy (on CPU)."""
        self.rollout_model, self.hyper, self.algorithm = model, hyper, ALGORITHMS[algorithm]
        self.value_norm = ValueNorm()
        self.mixed_precision = mixed_precision
        self.device = torch.device(mesh.device_type)
        self.model = copy.deepcopy(model).to(self.device)
        model.requires_grad_(False)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed_precision else MixedPrecisionPolicy()
        # The whole policy is one group: one gather and one reduction per gradient step. Its networks are small, so the
        # gathered weights stay until the backward pass.
        fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.optimizer = torch.optim.Adam(
            [
                {"params": list(self.model.actor.parameters()), "lr": hyper.lr},
                {"params": list(self.model.critic.parameters()), "lr": hyper.critic_lr or hyper.lr},
            ],
            eps=hyper.adam_eps,
            fused=True,  # a step without it spends most of its time in DTensor's dispatch of every small operation
        )

    def refresh_rollout_model(self) -> None:
        """Copy the sharded weights into the rollout copy; every worker takes part."""
        sharded = cast(FSDPModule, self.model)
        if not self.mixed_precision:
            sharded.unshard()  # one gather for all parameters; mixed precision would round them
        with torch.no_grad():
            for plain, parameter in zip(self.rollout_model.parameters(), self.model.parameters(), strict=True):
                plain.copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
        sharded.reshard()

    def set_progress(self, share: float) -> None:
        """Learning rates for a run of which `share` (0 to 1) is done."""
        scale = max(0.0, 1.0 - share) if self.hyper.lr_decay else 1.0
        rates = (self.hyper.lr, self.hyper.critic_lr or self.hyper.lr)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale

    def update(self, batch: Trajectories, seed: int, iteration: int) -> dict[str, float]:
        """All epochs on one batch; every worker calls it with its own part. Metrics are means over the global batch."""
        batch = batch.to(self.device)
        raw, targets = self.algorithm.advantages(batch, self.hyper)
        advantages, moments = _normalize(raw, targets, batch.mask)
        self.value_norm = self.value_norm.updated(moments["return_mean"], moments["return_square"])
        returns, old_values = self.value_norm.normalize(targets), self.value_norm.normalize(batch.values)
        inputs = self._prepare(batch)
        per_step = total(batch.mask.sum(0).float())
        steps = batch.mask.shape[1]
        sums = torch.zeros(7, device=self.device)
        for epoch in range(self.hyper.epochs):
            order = torch.from_numpy(time_permutation(seed, iteration, epoch, steps)).to(self.device)
            epoch_kl = torch.zeros(2, device=self.device)
            for index in order.tensor_split(self.hyper.minibatches):
                count = per_step[index].sum().clamp(min=1)
                part = self._step(batch, inputs, advantages, returns, old_values, index, count)
                sums += part
                epoch_kl += part[[3, 6]]
            if self.hyper.target_kl is not None and _mean_kl(epoch_kl) > self.hyper.target_kl:
                break
        self.refresh_rollout_model()
        return self._metrics(sums, moments)

    def _prepare(self, batch: Trajectories) -> tuple[Prepared, Prepared]:
        observations = batch.observations.flatten(0, 1)
        actor = Prepared.of(self.model.actor, observations)
        if not self.model.central:
            # Both networks of a local critic read the same rows, whose encoding depends on no weights.
            return actor, actor
        assert batch.states is not None
        return actor, Prepared.of(self.model.critic, batch.states.flatten(0, 1))

    def _step(
        self,
        batch: Trajectories,
        inputs: tuple[Prepared, Prepared],
        advantages: Tensor,
        returns: Tensor,
        old_values: Tensor,
        index: Tensor,
        count: Tensor,
    ) -> Tensor:
        """One gradient step on the time indices `index`; `count` decisions over all workers. Returns sums for metrics."""
        rows, steps = batch.mask.shape
        agents = rows // len(batch.states) if batch.states is not None else 1
        if len(index) == steps:  # the order of a sum's terms does not matter, so nothing need be moved
            index, (actor_in, critic_in) = torch.arange(steps, device=self.device), inputs
        else:
            actor_in = self._cut(inputs[0], rows, index, steps)
            critic_in = self._cut(inputs[1], rows // agents, index, steps)
        outputs, values = self.model.evaluate(actor_in, critic_in)
        if self.model.central:  # (copies * steps, agents) to (copies * agents, steps)
            values = values.reshape(rows // agents, len(index), agents).transpose(1, 2)
        distribution = self.model.distribution
        mask = batch.mask[:, index].flatten()
        evaluated = Evaluated(
            log_probs=distribution.log_prob(outputs, batch.actions[:, index].flatten(0, 1)),
            values=values.reshape(-1),
            old_log_probs=batch.log_probs[:, index].flatten(),
            old_values=old_values[:, index].flatten(),
            advantages=advantages[:, index].flatten(),
            returns=returns[:, index].flatten(),
        )
        losses = self.algorithm.losses(evaluated, self.hyper)
        entropy = distribution.entropy(outputs)
        parts = torch.stack([(term * mask).sum() for term in (losses.policy, losses.value, entropy)])
        policy, value, entropy_sum = parts.unbind()
        # FSDP2 averages gradients over workers; each worker's sum over the global count, times the workers, is the mean.
        loss = (policy + value - self.hyper.entropy_coef * entropy_sum) * (world()[1] / count)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norms = clip_gradients((self.model.actor, self.model.critic), self.hyper.max_grad_norm)
        self.optimizer.step()
        diagnostics = torch.stack([(losses.kl * mask).sum(), (losses.clipped * mask).sum()])
        # Norms are global already: weighting them by this worker's share of decisions makes the sum over workers exact.
        own = mask.sum().float()
        return torch.cat([parts.detach(), diagnostics.detach(), norms[:1] * own, own[None]])

    def _cut(self, inputs: Prepared, sequences: int, index: Tensor, steps: int) -> Prepared:
        """The time indices `index` of (sequences * steps) rows."""
        rows = torch.arange(sequences, device=self.device)[:, None] * steps + index[None]
        return inputs.rows(rows.flatten())

    def _metrics(self, sums: Tensor, moments: Mapping[str, float]) -> dict[str, float]:
        sums = total(sums)
        names = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "actor_grad_norm")
        means = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
        variance = moments["return_square"] - moments["return_mean"] ** 2
        explained = 1 - moments["residual_square"] / variance if variance > 1e-8 else 0.0
        return dict(zip(names, means, strict=True)) | {"explained_variance": explained}

    def state(self) -> dict[str, Any]:
        """Plain data beside the weights and the optimiser."""
        return {"value_norm": vars(self.value_norm)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the weights were loaded before."""
        self.value_norm = ValueNorm(**state["value_norm"])
        self.refresh_rollout_model()


def clip_gradients(modules: Sequence[nn.Module], max_norm: float) -> Tensor:
    """Scale each module's sharded gradients to at most `max_norm`, each by its own global norm; returns the norms.

    One reduction for all modules, where `torch.nn.utils.clip_grad_norm_` would need one for each.
    """
    shards = [[_local(p.grad) for p in module.parameters() if p.grad is not None] for module in modules]
    squares = torch.stack([torch.stack([g.float().square().sum() for g in group]).sum() for group in shards])
    norms = total(squares).sqrt()
    for group, norm in zip(shards, norms, strict=True):
        torch._foreach_mul_(group, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norms


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _normalize(advantages: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Advantages with mean 0 and (population) standard deviation 1 over the decisions of the global batch; and the
    batch's moments."""
    own = [torch.where(mask, x, 0.0).double() for x in (advantages, advantages**2, returns, returns**2)]
    sums = total(torch.stack([*(x.sum() for x in own), mask.sum().double()]))
    mean, square, return_mean, return_square = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
    std = max(square - mean**2, 0.0) ** 0.5
    normalized = torch.where(mask, (advantages - mean) / (std + 1e-8), 0.0)
    # The residual of the old values against the returns is the advantage itself.
    return normalized, {
        "return_mean": return_mean,
        "return_square": return_square,
        "residual_square": square - mean**2,
    }


def _mean_kl(epoch_kl: Tensor) -> float:
    kl, count = total(epoch_kl).tolist()
    return kl / max(count, 1.0)
