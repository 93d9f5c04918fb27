"""Teams of language models; `TeamFamily` documents the functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from pettingzoo import ParallelEnv
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from marl_ray.closing import Unfinished
from marl_ray.config import RunConfig, engine_spec
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.language import Models, StreamedPolicy, TokenBundle, save_token_bundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.policies.engines.choice import has_weights, make_engine
from marl_ray.policies.language.sampling_copy import WeightSnapshot, empty_copy, plain_copy, snapshot_copy
from marl_ray.policies.language.token_policy import (
    TokenPolicy,
    adopt_weights,
    build_token_policy,
    move_to_device,
    start_from_weights,
)
from marl_ray.rollout.text.responses import TokenPlayer
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.team.gpu_pass_limit import measure_pass_limits
from marl_ray.training.team.members import Team, TrainedTensor, WeightsSaver
from marl_ray.training.tracking.mlflow_run import uri_of

if TYPE_CHECKING:
    from marl_ray.training.team.members import EngineOf, PolicyModel


@dataclass(frozen=True)
class LanguageTeam(Team):
    """Language models, from which engines sample."""

    @override
    def players(self) -> dict[str, TokenPlayer]:
        self.bring_weights()
        return {
            name: TokenPlayer(model, self.engines[name], self.agents[name], *self.norms(name))
            for name, model in self._policies().items()
        }

    @override
    def weights_saver(self, config: RunConfig, env: ParallelEnv, lineage: Lineage) -> WeightsSaver:
        agents = {agent: name for name, members in self.agents.items() for agent in members}
        parted = self._parted_weights()
        copied = {name: self._copy_unchanging(name) for name in self.agents if name not in parted}

        def save(folder: str, trained: TrainedTensor) -> Path:
            arriving = {
                name: StreamedPolicy(weights, weights.read_merged(partial(trained, name)))
                for name, weights in parted.items()
            }
            return save_token_bundle(folder, agents, {**copied, **arriving}, lineage)

        return save

    @override
    def weights_sender(self) -> Callable[[TrainedTensor], None]:
        parted = self._parted_weights()

        def send(trained: TrainedTensor) -> None:
            for name, weights in parted.items():
                weights.send(partial(trained, name))

        return send

    def _policies(self) -> Mapping[str, TokenPolicy]:
        return cast(Mapping[str, TokenPolicy], self.models)

    def _parted_weights(self) -> dict[str, WeightSnapshot]:
        """Return the present weights of the models that no worker has whole."""
        models = self._policies()
        return {name: WeightSnapshot(models[name]) for name in self.agents if models[name].source is not None}

    def _copy_unchanging(self, name: str) -> TokenPolicy:
        """Return a model that the next update does not change."""
        model = self._policies()[name]
        if name not in self.learners:
            return model
        trained = self.learners[name].policy.model.named_parameters()
        return snapshot_copy(model, {key for key, value in trained if value.requires_grad})


def build_models(config: RunConfig, env: ParallelEnv, agents: Mapping[str, list[str]]) -> dict[str, TokenPolicy]:
    """Build the policies on CPU, with the critics that their algorithms need.

    The weights of `model.path`, or of a bundle in their place, stay in their files until the policy is sharded or
    copied. Raises MarlRayError naming the policy whose bundle or model does not fit.
    """
    policies = {}
    for number, (name, members) in enumerate(agents.items()):
        spec, settings = config.spec_of(name), config.team[name]
        assert settings.model is not None
        policies[name] = build_token_policy(
            settings.model,
            settings.generation,
            config.seed * 1000 + number,
            not settings.frozen and spec.critic != "none",
            config.cost_signals if spec.needs_costs and not settings.frozen else 0,
            uri_of(config),
            unread=True,
        )
        weights = bundle_weights(config, name, members[0])
        if weights is not None:
            models, policy_name = weights
            try:
                if policies[name].unread is None:
                    adopt_weights(policies[name], models[policy_name])
                else:
                    start_from_weights(policies[name], models.open_weights(policy_name))
                policies[name].base = f"{settings.bundle}/{policy_name}"
            except MarlRayError as error:
                raise MarlRayError(f"team.{name}.{error}") from error
    return policies


def bundle_weights(config: RunConfig, name: str, agent: str) -> tuple[Models, str] | None:
    """Return the policies of `team.NAME.bundle`, and the name of the one that plays `agent`.

    The weights of these policies are still unread. The result is None if no bundle is given. Raises MarlRayError if the
    bundle holds actor-critics, or has no policy for the agent.
    """
    reference = config.team[name].bundle
    if reference is None:
        return None
    bundle = load_bundle(reference, uri_of(config))
    if not isinstance(bundle, TokenBundle):
        raise MarlRayError(f"team.{name}.bundle: {reference!r} holds actor-critics, expected language models")
    if agent not in bundle.agents:
        raise MarlRayError(f"team.{name}.bundle: {reference!r} has no policy for agent {agent!r}")
    return bundle.policies, bundle.agents[agent]


def horizon(config: RunConfig, name: str) -> int:
    """Return the greatest number of steps, which are tokens of a response."""
    return config.team[name].generation.max_tokens


def engine_has_weights(config: RunConfig, name: str) -> bool:
    """Return False where the run plays nothing, because no engine is started then."""
    return config.data is None and has_weights(config.team[name].generation)


def has_other_engine(config: RunConfig, name: str) -> bool:
    """Return False where the run plays nothing, because nothing is sampled then."""
    return config.data is None and not engine_spec(config.team[name].generation.engine).same_modules


def assemble(
    config: RunConfig,
    agents: dict[str, list[str]],
    models: "Mapping[str, PolicyModel]",
    learners: dict[str, Learner],
    mesh: DeviceMesh,
    engine_of: "EngineOf | None",
) -> LanguageTeam:
    """Assemble a team whose copies of the models sample.

    The GPU's memory limits the passes of the learners.
    """
    device, sampling = torch.device(mesh.device_type), {}
    for name, model in models.items():
        if name in learners:
            sampling[name] = learners[name].policy.rollout_model
        else:
            frozen = cast(TokenPolicy, model)
            move_to_device(frozen, device)
            empty = engine_has_weights(config, name) and frozen.unread is not None
            sampling[name] = empty_copy(frozen, device, trained=False) if empty else plain_copy(frozen, device)
    for name, rows in measure_pass_limits(learners).items():
        learners[name].limit_passes(rows)
    make = engine_of or (lambda name, model: make_engine(model))
    with Unfinished() as unfinished:
        engines = {name: unfinished.keep(make(name, model)) for name, model in sampling.items()}
        unfinished.pop_all()
    return LanguageTeam(agents, sampling, learners, engines)
