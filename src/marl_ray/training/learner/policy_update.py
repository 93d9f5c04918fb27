"""The learner of one policy.

It updates the policy by one batch at a time, and keeps the state between updates.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from marl_ray.algorithms.advantages.batch_gae import cost_advantages
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.training.collectives import rank_and_world_size, sum_over_workers
from marl_ray.training.costs import CostStats
from marl_ray.training.learner import gradient_epochs, trust_region_step
from marl_ray.training.learner.compiled.eligible import reason_for_torch
from marl_ray.training.learner.minibatches import BatchShare, minibatches
from marl_ray.training.learner.preparation.estimates import trained_decisions
from marl_ray.training.learner.preparation.prepare import prepare_batch
from marl_ray.training.learner.prepared_batch import PreparedBatch
from marl_ray.training.learner.trained_policy import LearnerSettings, TrainedPolicy, UpdateState
from marl_ray.trajectories import Trajectories


class Learner:
    """Trains one policy, and holds a plain copy of it for the rollout, which it refreshes after every update.

    An update prepares the batch, takes a trust-region step if the algorithm has one, and takes the gradient steps. Each
    of these parts is a function that returns what changes besides the weights; `update` alone assigns it.
    """

    policy: TrainedPolicy
    state: UpdateState
    trust_region: float
    """The bound of a trust region's step (nats) at this point of the run."""
    compiled_refusal: str
    """The reason why compiled code takes no gradient steps although there is some; empty if it may."""

    def __init__(self, model: object, mesh: DeviceMesh, settings: LearnerSettings):
        """Take over `model`, an ActorCritic or a TokenPolicy with the same weights on every worker of `mesh`."""
        self.policy = TrainedPolicy.set_up(model, mesh, settings)
        self.state = UpdateState.initial(self.policy)
        self.trust_region = settings.hyper.trust_region
        self.configured_groups = self._group_settings()
        self.compiled_refusal, self._has_compared = "", False

    @property
    def reason_for_torch(self) -> str:
        """The reason why torch takes the gradient steps of the policy as it is now.

        The text is empty where compiled code does.
        """
        return reason_for_torch(self.policy) or self.compiled_refusal

    @property
    def is_compiled(self) -> bool:
        """True if the gradient steps, and the networks that play, are compiled code."""
        return not self.reason_for_torch

    def limit_passes(self, rows: int) -> None:
        """Let no pass have more than `rows` sequences from now on; the size of passes changes no result."""
        settings = self.policy.settings
        limited = replace(settings, micro_batch=min(rows, settings.micro_batch or rows))
        self.policy = replace(self.policy, settings=limited)

    def note_returns(self, mean: float, mean_square: float) -> None:
        """Move the critic's normaliser by returns that no batch had, as a warm start has them."""
        self.state = replace(self.state, value_norm=self.state.value_norm.add_batch(mean, mean_square))

    def set_progress(self, share: float, batches: int) -> None:
        """Set the learning rates and the trust region for the next batch.

        `share` (0 to 1) of the run's steps and `batches` batches are done.
        """
        hyper = self.policy.hyper
        scale = max(0.0, 1.0 - share) if hyper.lr_decay else 1.0
        scale *= min(1.0, (batches + 1) / max(hyper.lr_warmup, 1))
        self.trust_region = hyper.trust_region * scale
        for group in self.policy.optimizer.param_groups:
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
        """Train on one batch for all epochs, and return metrics.

        Every worker calls it with its own part; metrics are means over all parts. `factor` (copies, T) is the ratio by
        which the policies that were updated before this one have changed the probability of the joint action. Raises
        DivergedError naming `where` and the tensor if a number is not finite.
        """
        policy = self.policy
        hyper, spec = policy.hyper, policy.algorithm.spec
        batch = batch.to(policy.device)
        agents = 2 if spec.pairs else batch.agents  # a pair of responses stays together, as the agents of a copy do
        bounds = policy.family.copy_bounds(batch, agents)
        share = BatchShare(agents, batch.mask.shape[1], rank_and_world_size()[0], bounds, policy.joint)
        batch = policy.family.pad_batch(batch, agents)
        minibatch_plan = [
            minibatches(seed, iteration, epoch, hyper.minibatches, share, policy.settings.has_whole_episodes)
            for epoch in range(hyper.epochs)
        ]
        # Rewards become advantages, and the outputs of the old weights are kept.
        encode = not (self.is_compiled and self._has_compared)  # compiled code encodes the batch itself
        prepared, self.state, metrics = prepare_batch(
            policy, self.state, batch, share, minibatch_plan, costs, factor, where, encode
        )
        if spec.constraint == "trust_region":  # the actor's only step; the gradient steps then train the critics alone
            weights, step_metrics = trust_region_step.constrained_weights(policy, prepared, self.trust_region)
            policy.family.adopt_actor(policy.models, weights)
            metrics |= step_metrics
        # Advantages become losses, and losses become gradients and steps.
        self.state, epoch_metrics = self._descend(prepared, where)
        metrics |= epoch_metrics
        policy.refresh_rollout_model(where)  # the next batch is played with the new weights
        self.state = self.state.steer(hyper, metrics, prepared.sequences)
        return metrics | {f"multiplier_{k}": m.multiplier for k, m in enumerate(self.state.multipliers)}

    def _descend(self, prepared: PreparedBatch, where: str) -> tuple[UpdateState, dict[str, float]]:
        """Take the gradient steps by compiled code where there is some.

        Before its first step it is compared with torch; if it differs, torch takes all steps of the run, and
        `compiled_refusal` says so.
        """
        if not self.is_compiled:
            return gradient_epochs.descend(self.policy, self.state, prepared, where)
        from marl_ray.training.learner.compiled import epochs  # loads numba

        if not self._has_compared and prepared.sizes[0, 0]:
            self._has_compared = True
            difference = epochs.largest_difference(self.policy, self.state, prepared)
            if not difference <= epochs.TOLERANCE:
                self.compiled_refusal = f"compiled gradients differ from torch's by {difference:.1e}"
                return gradient_epochs.descend(self.policy, self.state, prepared, where)
        return epochs.descend(self.policy, self.state, prepared, where)

    def log_ratio(self, batch: Trajectories) -> Tensor:
        """Return the change by the update of the log-probabilities of the recorded actions.

        The change is (copies, T), on CPU; for actor-critics alone.
        """
        return self.policy.family.log_ratio(self.policy.rollout_model, batch)

    def estimate_moved_costs(
        self, costs: CostStats, batch: Trajectories, after: Tensor, before: Tensor | None
    ) -> CostStats:
        """Estimate what an episode costs after this update.

        `after` and `before` (copies, T) are the ratios by which the updates so far, with and without this one, have
        changed the probability of the joint action. Sequential constrained updates share one budget: the part that one
        policy's step uses is not free for the next. The joint action is that of all agents, and the cost is the team's.
        So each step of a copy counts once, with the mean of the cost advantages of the agents that decide there.
        """
        policy = self.policy
        if not policy.budgets or costs.means is None:
            return costs
        raw, _ = cost_advantages(batch, policy.hyper)
        mask = trained_decisions(batch, policy.hyper)
        deciding, per_agent = (x.unflatten(0, (-1, batch.agents)) for x in (mask[..., None], raw))
        team = (per_agent * deciding).sum(1) / deciding.sum(1).clamp(min=1)
        change = (after - (1.0 if before is None else before))[..., None] * team
        sums = sum_over_workers(torch.cat([change.sum((0, 1)), mask.sum()[None].float()]))
        shift = (sums[:-1] / sums[-1].clamp(min=1) * costs.decisions).tolist()
        return replace(costs, means=tuple(mean + moved for mean, moved in zip(costs.means, shift, strict=True)))

    def _group_settings(self) -> list[dict[str, object]]:
        """Return the settings of each group of the optimiser."""
        groups = self.policy.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def to_plain(self) -> JsonObject:
        """Return everything besides tensors that changes, as plain data for a checkpoint."""
        return self.state.to_plain() | {"groups": self._group_settings(), "compiled_refusal": self.compiled_refusal}

    def load_state(self, plain: JsonMapping, where: str = "training") -> None:
        """Continue from `to_plain()`, after the tensors were loaded.

        Every worker takes part. Errors may name `where`.
        """
        self.state = self.state.from_plain(plain)
        # Another comparison could end otherwise, and then the run would not equal one that never stopped. A policy that
        # has no compiled code, as one of a branch, keeps its own reason.
        if plain["compiled_refusal"] and self.is_compiled:
            self.compiled_refusal, self._has_compared = plain["compiled_refusal"], True
        for group, saved in zip(self.policy.optimizer.param_groups, plain["groups"], strict=True):
            group |= {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
        self.policy.refresh_rollout_model(where)

    def apply_hyper(self) -> None:
        """Put this learner's hyper-parameters over those that came with a loaded state."""
        for group, hyper_group in zip(self.policy.optimizer.param_groups, self.configured_groups, strict=True):
            group |= hyper_group
        self.state = self.state.with_hyper_of(self.policy)
