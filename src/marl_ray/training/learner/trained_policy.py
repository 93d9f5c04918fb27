"""A policy while it is trained, and the state that an update replaces.

An update reads the policy's weights, optimiser and settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from marl_ray.algorithms import algorithm_of
from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.algorithms.constraints.multipliers import Multiplier, with_settings_of
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.kl import adaptive_coefficient
from marl_ray.config import ConstraintConfig, HyperParameters
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.training.learner.families.policy_family import PolicyFamily, policy_family
from marl_ray.training.learner.families.results import PolicyModels
from marl_ray.training.learner.optimizers import optimizer_of

ENGINE_CAP = 2.0
"""The `importance_cap` of a run whose engine samples with fewer digits than the learner computes with (the bound of
verl and TRL)."""


@dataclass(frozen=True)
class LearnerSettings:
    """The settings that one policy learns by, as its learner takes them from the run's config."""

    algorithm: str
    """A built-in name, or `package.module:NAME`."""
    hyper: HyperParameters
    mixed_precision: bool = False
    """The learner computes in bfloat16, and keeps its weights in float32."""
    constraints: tuple[ConstraintConfig, ...] = ()
    horizon: int = 1
    """The greatest length of a sequence."""
    has_whole_episodes: bool = False
    """Rows are whole episodes, so minibatches are sets of rows; otherwise minibatches are sets of time indices."""
    micro_batch: int | None = None
    """Environment copies (responses, for a language model) that share a forward and backward pass; None: all."""
    is_off_policy: bool = False
    """Other policies, or older weights, wrote the batches. Ratios are then to the probabilities that these recorded."""
    engine_has_weights: bool = False
    """The engine that samples has the weights itself, so the worker needs no copy that samples."""
    has_other_engine: bool = False
    """The engine that samples computes the model by its own code, so its log-probabilities are
    compared with the learner's."""


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """One policy with its optimiser, and the settings that it learns by.

    No step of an update assigns a field. The steps move the weights and the optimiser's moments in place, as torch does,
    and return everything else that changes (see UpdateState).
    """

    settings: LearnerSettings
    algorithm: Algorithm
    """The algorithm that the settings name."""
    family: PolicyFamily
    models: PolicyModels
    optimizer: torch.optim.Optimizer
    device: torch.device
    has_equal_copies: bool
    """The copy that plays and the copy that learns compute equal log-probabilities. In bfloat16 they differ by more than
    GSPO's clip is wide. A trust region learns on the very copy that plays."""

    @classmethod
    def set_up(cls, model: object, mesh: DeviceMesh, settings: LearnerSettings) -> "TrainedPolicy":
        """Take over `model`, an ActorCritic or a TokenPolicy with the same weights on every worker, and shard it."""
        algorithm, family, hyper = algorithm_of(settings.algorithm), policy_family(model), settings.hyper
        spec = algorithm.spec
        models = family.set_up(
            model, mesh, settings.mixed_precision, _needs_reference(algorithm, hyper), settings.engine_has_weights
        )
        # A trust region moves the actor without an optimiser.
        actor = [family.actor(models.trained)] if spec.constraint != "trust_region" else []
        critics = family.critics(models.trained)
        in_float32 = all(parameter.dtype == torch.float32 for parameter in models.rollout.parameters())
        return cls(
            settings=settings,
            algorithm=algorithm,
            family=family,
            models=models,
            optimizer=optimizer_of(hyper, [(actor, hyper.lr), (critics, hyper.critic_lr or hyper.lr)]),
            device=torch.device(mesh.device_type),
            has_equal_copies=spec.constraint == "trust_region" or (in_float32 and not settings.mixed_precision),
        )

    @property
    def hyper(self) -> HyperParameters:
        """The hyper-parameters that the policy learns by."""
        return self.settings.hyper

    @property
    def budgets(self) -> tuple[float, ...]:
        """The mean cost of an episode that each constraint allows.

        The tuple is empty where the algorithm has no constraints.
        """
        constraints = self.settings.constraints if self.algorithm.spec.needs_costs else ()
        return tuple(constraint.budget for constraint in constraints)

    @property
    def model(self) -> Any:
        """The module that is trained, sharded over the workers."""
        return self.models.trained

    @property
    def rollout_model(self) -> Any:
        """The plain copy that plays."""
        return self.models.rollout

    @property
    def actor(self) -> nn.Module:
        """The part of the trained module that chooses actions or tokens."""
        return self.family.actor(self.model)

    @property
    def critics(self) -> list[nn.Module]:
        """The trained critics, of the reward and then of each cost.

        The list is empty for an algorithm without critics.
        """
        return self.family.critics(self.model)

    @property
    def needs_reference(self) -> bool:
        """True if an update compares the policy with a frozen reference policy."""
        return _needs_reference(self.algorithm, self.hyper)

    @property
    def must_recompute(self) -> bool:
        """True if the learner evaluates old log-probabilities and values itself, and does not take the recorded ones."""
        if self.settings.is_off_policy:
            return self.algorithm.spec.pairs  # the rows of pairs have no recorded log-probabilities
        apart = self.settings.has_other_engine or not self.has_equal_copies
        return self.algorithm.spec.recompute or self.importance_cap is not None or apart

    @property
    def importance_cap(self) -> float | None:
        """The bound of the weights of truncated importance sampling; None if decisions are not weighted."""
        if self.hyper.importance_cap is None and self.settings.has_other_engine and not self.has_equal_copies:
            return ENGINE_CAP
        return self.hyper.importance_cap

    @property
    def must_estimate_values(self) -> bool:
        """True if the learner estimates the values of a batch, because the rollout copy has no weights for it."""
        return not self.family.holds_weights(self.rollout_model) and bool(self.critics)

    @property
    def pass_size(self) -> int | None:
        """Maximum number of copies per pass, half of `micro_batch` where a copy is a pair of responses.

        None stands for all copies.
        """
        size = self.settings.micro_batch
        return max(1, size // 2) if self.algorithm.spec.pairs and size is not None else size

    @property
    def joint(self) -> int:
        """Number of neighbouring workers that compute each pass together."""
        return self.family.joint_workers(self.model)

    def refresh_rollout_model(self, where: str = "training") -> None:
        """Copy the sharded weights into the rollout copy.

        Every worker takes part. Errors may name `where`.
        """
        self.family.refresh_rollout(self.models, self.settings.mixed_precision, where)


def _needs_reference(algorithm: Algorithm, hyper: HyperParameters) -> bool:
    return hyper.kl_coef > 0 or algorithm.spec.pairs


@dataclass(frozen=True)
class UpdateState:
    """Everything besides the weights and the optimiser that an update changes and the next update reads.

    All of it is equal on all workers.
    """

    value_norm: ValueNorm
    cost_norms: tuple[ValueNorm, ...]
    """The value normaliser of each constraint's cost critic."""
    multipliers: tuple[Multiplier, ...]
    """One for each constraint; empty where the algorithm has none."""
    entropy_coef: float
    """Weight of the entropy in the loss."""
    kl_coef: float
    """Weight of the divergence from the reference policy, in the loss or in the rewards."""

    @classmethod
    def initial(cls, policy: TrainedPolicy) -> "UpdateState":
        """Return the state before the first update."""
        start, hyper = policy.algorithm.multiplier, policy.hyper
        multipliers = tuple(start(hyper, budget) for budget in policy.budgets) if start else ()
        return cls(
            ValueNorm(), tuple(ValueNorm() for _ in policy.budgets), multipliers, hyper.entropy_coef, hyper.kl_coef
        )

    def steer(self, hyper: HyperParameters, metrics: Mapping[str, float], sequences: int) -> "UpdateState":
        """Move the coefficients that have a target, after a batch of `sequences` rows over all workers."""
        kl_coef, entropy_coef = self.kl_coef, self.entropy_coef
        if hyper.kl_target is not None and "reference_kl" in metrics:
            kl_coef = adaptive_coefficient(
                kl_coef, metrics["reference_kl"], hyper.kl_target, hyper.kl_horizon, sequences
            )
        if hyper.entropy_target is not None:
            step = hyper.entropy_step if metrics["entropy"] < hyper.entropy_target else -hyper.entropy_step
            entropy_coef = max(0.0, entropy_coef + step)
        return replace(self, kl_coef=kl_coef, entropy_coef=entropy_coef)

    def to_plain(self) -> JsonObject:
        """Return the state as plain data, for a checkpoint."""
        return {
            "value_norm": vars(self.value_norm),
            "cost_norms": [vars(norm) for norm in self.cost_norms],
            "multipliers": [vars(multiplier) for multiplier in self.multipliers],
            "entropy_coef": self.entropy_coef,
            "kl_coef": self.kl_coef,
        }

    def from_plain(self, plain: JsonMapping) -> "UpdateState":
        """Make the state from what `to_plain()` returned.

        The types of the multipliers are those of this state.
        """
        pairs = zip(self.multipliers, plain["multipliers"], strict=True)
        return UpdateState(
            ValueNorm(**plain["value_norm"]),
            tuple(ValueNorm(**norm) for norm in plain["cost_norms"]),
            tuple(type(multiplier)(**saved) for multiplier, saved in pairs),
            plain["entropy_coef"],
            plain["kl_coef"],
        )

    def with_hyper_of(self, policy: TrainedPolicy) -> "UpdateState":
        """Replace the hyper-parameters in this state by the policy's own, and keep what updates have moved.

        Updates move the value of a multiplier, and a coefficient that has a target.
        """
        initial, hyper = UpdateState.initial(policy), policy.hyper
        pairs = zip(self.multipliers, initial.multipliers, strict=True)
        return replace(
            self,
            multipliers=tuple(with_settings_of(moved, setting) for moved, setting in pairs),
            entropy_coef=hyper.entropy_coef if hyper.entropy_target is None else self.entropy_coef,
            kl_coef=hyper.kl_coef if hyper.kl_target is None else self.kl_coef,
        )
