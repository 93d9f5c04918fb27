"""The interface of a family of policies, and the choice of one.

The modules `actor_critic_policies` and `language_policies` have it.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.training.learner.families.results import Outputs, PolicyModels
from marl_ray.training.learner.minibatches import BatchShare, Selection
from marl_ray.trajectories import Trajectories


class PolicyFamily(Protocol):
    """The functions of a family's module. `model` is a trained or a reference module of it."""

    def set_up(
        self, model: Any, mesh: DeviceMesh, mixed_precision: bool, reference: bool, engine_has_weights: bool
    ) -> PolicyModels:
        """Take over `model`, which has the same weights on every worker.

        With `engine_has_weights` the rollout copy may be without weights.
        """

    def begin_pass(self, model: Any, last: bool) -> None:
        """Say before each of the several passes of a gradient step whether it is the last.

        Workers then exchange no more than the step and the model's settings ask for.
        """

    def end_passes(self, model: Any) -> None:
        """Say after the last of the several passes of a gradient step that the weights change now."""

    def actor(self, model: Any) -> nn.Module:
        """Return the part of the model that chooses actions."""

    def critics(self, model: Any) -> list[nn.Module]:
        """Return the parts of the model that estimate values and cost values."""

    def joint_workers(self, model: Any) -> int:
        """Return the number of neighbouring workers that compute each pass together."""

    def holds_weights(self, rollout: Any) -> bool:
        """Return True if the rollout copy has the weights, and can estimate values."""

    def refresh_rollout(self, models: PolicyModels, mixed_precision: bool, where: str) -> None:
        """Copy the trained weights into the rollout copy.

        Every worker takes part. Errors may name `where`.
        """

    def adopt_actor(self, models: PolicyModels, parameters: Mapping[str, Tensor]) -> None:
        """Give the rollout copy's and the trained actor these weights, which are equal on all workers.

        Trust regions need it, which language models do not have.
        """

    def pad_batch(self, batch: Trajectories, agents: int) -> Trajectories:
        """Return the batch, with one empty copy (`agents` rows) added if it has none."""

    def copy_bounds(self, batch: Trajectories, agents: int) -> tuple[int, ...]:
        """Return the number of each worker's first copy among all copies, then the count of all, (workers + 1,).

        Every worker takes part.
        """

    def pass_order(self, model: Any, batch: Trajectories, agents: int) -> Tensor | None:
        """Return (copies,) numbers such that a pass over copies with similar numbers costs less.

        The result is None where all passes cost the same.
        """

    def encode_inputs(self, model: Any, batch: Trajectories) -> Any:
        """Encode the inputs once per batch, for `score_decisions`."""

    def score_decisions(
        self,
        model: Any,
        inputs: Any,
        batch: Trajectories,
        mask: Tensor,
        share: BatchShare,
        selection: Selection,
        learn_entropy: bool = False,
    ) -> Outputs:
        """Score a part of the batch's decisions in one forward pass; the outputs are valid where `mask` (R, T') is True.

        Without `learn_entropy` the entropy may have no gradients.
        """

    def score_by_reference(
        self, models: PolicyModels, batch: Trajectories, share: BatchShare, selection: Selection
    ) -> Tensor:
        """Return the log-probabilities (R, T') under the reference policy, without gradients."""

    def log_ratio(self, rollout: Any, batch: Trajectories) -> Tensor:
        """Return the log ratio (copies, T) of the agents' recorded actions, on CPU.

        The ratio is the actions' log-probability now, minus that when they were sampled. Sequential updates need it,
        which language models do not have.
        """


def policy_family(model: Any) -> PolicyFamily:
    """Return the family of `model`, an ActorCritic or a TokenPolicy."""
    if isinstance(model, ActorCritic):
        from marl_ray.training.learner.families import actor_critic_policies

        return actor_critic_policies
    from marl_ray.training.learner.families import language_policies  # loads transformers

    return language_policies
