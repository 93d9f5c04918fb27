"""The team of a run: models and learners from the config and the environment's spaces."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pettingzoo import ParallelEnv
from torch.distributed.device_mesh import DeviceMesh

from marl_ray import __version__
from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config import RunConfig, config_hash, engine_spec
from marl_ray.envs.registry import is_text
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.compiled.network import CompiledNetwork
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.actor_critic.spaces import joint_space
from marl_ray.policies.bundles.actor_critic import Lineage, PolicyParts, load_actor_critics, save_bundle
from marl_ray.policies.bundles.manifest import Origin
from marl_ray.policies.language.sharding.agreement import together
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.training.collectives import gather
from marl_ray.training.learner.policy_learner import Learner
from marl_ray.training.learner.trained_policy import LearnerSettings
from marl_ray.training.tracking.mlflow_run import uri_of

if TYPE_CHECKING:  # the imports take seconds, and actor-critics do not need them
    from marl_ray.policies.engines.base import Engine
    from marl_ray.policies.language.token_policy import TokenPolicy
    from marl_ray.rollout.text.responses import TokenPlayer

    PolicyModel = ActorCritic | TokenPolicy
    EngineOf = Callable[[str, TokenPolicy], Engine]

TrainedTensor = Callable[[str, str], torch.Tensor | None]
"""(policy, weight of its language model) -> the trained weight complete on rank 0, with all workers; None on the others."""
BundleWriter = Callable[..., None]
"""Writes a bundle as the folder of its first argument; a `TrainedTensor` is the second."""


@dataclass(frozen=True)
class Team:
    """Policies by name: the agents each plays, its rollout model, and its learner unless it is frozen."""

    agents: dict[str, list[str]]
    models: "Mapping[str, PolicyModel]"
    learners: dict[str, Learner]
    engines: "Mapping[str, Engine]" = field(default_factory=dict)
    """Policy -> the engine that samples from it; empty for actor-critics."""

    def start(self) -> None:
        """Start the engines, all workers together, with their first weights. If one cannot start on any worker, all workers
        raise its error."""

        def start_own() -> None:
            for engine in self.engines.values():
                engine.start()

        together(start_own)
        together(self._bring_weights)
        self.rest()

    def _bring_weights(self) -> None:
        """Let each engine take the current weights. After an error the others do too, because workers gather weights
        together."""
        errors: list[Exception] = []
        for engine in self.engines.values():
            try:
                engine.ready()
            except Exception as error:
                errors.append(error)
        for first in errors:
            raise first

    def players(self) -> "dict[str, Player] | dict[str, TokenPlayer]":
        """The current models, engines and normalisers, in the form that a collector takes; all workers call it together."""
        if self.engines:
            together(self._bring_weights)
        norms = {
            name: (self.learners[name].state.value_norm, self.learners[name].state.cost_norms)
            if name in self.learners
            else (ValueNorm(), ())
            for name in self.models
        }
        if self.engines:
            from marl_ray.rollout.text.responses import TokenPlayer

            language = cast("Mapping[str, TokenPolicy]", self.models)
            return {
                name: TokenPlayer(model, self.engines[name], self.agents[name], *norms[name])
                for name, model in language.items()
            }
        small = cast(Mapping[str, ActorCritic], self.models)
        return {
            name: Player(model, self.agents[name], *norms[name], *self._compiled(name)) for name, model in small.items()
        }

    def _compiled(self, name: str) -> tuple[CompiledNetwork, ...]:
        """The actor and the critic as compiled code, for a policy that learns by such code; empty for all others."""
        if name not in self.learners or not self.learners[name].compiled:
            return ()
        model = cast(ActorCritic, self.models[name])
        return tuple(CompiledNetwork(network) for network in (model.actor, *model.critics))

    def rest(self) -> None:
        """Let the engines release memory, because the learners update now."""
        for engine in self.engines.values():
            engine.rest()

    def close(self) -> None:
        """End the engines."""
        for engine in self.engines.values():
            engine.close()


def team_agents(config: RunConfig, env: ParallelEnv) -> dict[str, list[str]]:
    """Map each policy to the agents that it plays, in the environment's order.

    Raises MarlRayError if an agent has no policy, a policy no agent, agents of one policy differ in their spaces, or the
    environment is for the other family of policies.
    """
    if config.language != is_text(env):
        kinds = ("a text environment", "language models", "actor-critics")
        given_kind, needed, given = kinds if is_text(env) else (f"no {kinds[0][2:]}", kinds[2], kinds[1])
        raise MarlRayError(f"env.id: {config.env.id} is {given_kind}, for {needed}; team: the policies are {given}")
    try:
        table = config.policy_of(list(env.possible_agents))
    except ValueError as error:
        raise MarlRayError(str(error)) from error
    agents = {name: [agent for agent in env.possible_agents if table[agent] == name] for name in config.team}
    for name, members in agents.items():
        first = members[0]
        for agent in members[1:]:
            for kind in (env.observation_space, env.action_space):
                if kind(agent) != kind(first):
                    raise MarlRayError(
                        f"team.{name}: agents {first!r} and {agent!r} have different {kind.__name__}s "
                        f"({kind(first)} and {kind(agent)}), so they need policies of their own"
                    )
    return agents


def build_models(config: RunConfig, env: ParallelEnv, agents: dict[str, list[str]]) -> "Mapping[str, PolicyModel]":
    """Make the team's ActorCritics or TokenPolicies, equal on every worker, with the weights of `team.NAME.bundle` if
    the config names one."""
    if config.language:
        from marl_ray.training.team.language import build_policies

        return build_policies(config, agents)
    state_space = joint_space([env.observation_space(agent) for members in agents.values() for agent in members])
    models = {}
    for number, (name, members) in enumerate(agents.items()):
        torch.manual_seed(config.seed * 1000 + number)
        spec, frozen = config.spec_of(name), config.team[name].frozen
        models[name] = ActorCritic(
            env.observation_space(members[0]),
            env.action_space(members[0]),
            config.team[name].network,
            "none" if frozen else spec.critic,
            state_space,
            len(members),
            config.signals if spec.costs and not frozen else 0,
        )
        _load_weights(config, name, members, models[name])
    return models


def _load_weights(config: RunConfig, name: str, members: list[str], model: ActorCritic) -> None:
    reference = config.team[name].bundle
    if reference is None:
        return
    bundle = load_actor_critics(reference, uri_of(config))
    source = bundle.agents.get(members[0])
    if source is None:
        raise MarlRayError(f"team.{name}.bundle: {reference!r} has no policy for agent {members[0]!r}")
    try:
        model.actor.load_state_dict(bundle.policies[source].actor.state_dict())
    except RuntimeError as error:
        raise MarlRayError(f"team.{name}.bundle: {reference!r} holds a network of another shape") from error


def build_team(
    config: RunConfig,
    env: ParallelEnv,
    mesh: DeviceMesh,
    mixed_precision: bool,
    engine_of: "EngineOf | None" = None,
) -> Team:
    """Make the models and learners of this worker; every worker takes part.

    `engine_of` makes the engine of a language model from the policy's name and the copy that samples. By default the
    engine is in this process or in one beside it.
    """
    agents = team_agents(config, env)
    models = together(lambda: build_models(config, env, agents))
    _check_read_alike(models)
    learners = {
        name: Learner(model, mesh, _learner_settings(config, name, mixed_precision))
        for name, model in models.items()
        if not config.team[name].frozen
    }
    if not config.language:
        return Team(agents, models, learners)
    from marl_ray.policies.engines.sampler import make_engine
    from marl_ray.policies.language.sampling_copy import empty_copy, plain_copy
    from marl_ray.policies.language.token_policy import TokenPolicy, move
    from marl_ray.training.team.gpu_pass_limit import pass_limits

    device, sampling = torch.device(mesh.device_type), {}
    for name, model in models.items():
        if name in learners:
            sampling[name] = learners[name].policy.rollout_model
        else:
            frozen = cast(TokenPolicy, model)
            move(frozen, device)
            empty = sampled_elsewhere(config, name) and frozen.unread is not None
            sampling[name] = empty_copy(frozen, device, trained=False) if empty else plain_copy(frozen, device)
    for name, rows in pass_limits(learners).items():
        learners[name].limit_passes(rows)
    make = engine_of or (lambda name, model: make_engine(model))
    return Team(agents, sampling, learners, {name: make(name, model) for name, model in sampling.items()})


def _check_read_alike(models: "Mapping[str, PolicyModel]") -> None:
    """Raise MarlRayError, on all workers, if a model's weights wait in their files on some workers only: these would
    exchange what the others do not."""
    parts = gather({name: getattr(model, "unread", None) is not None for name, model in models.items()})
    for name in models:
        apart = [rank for rank, part in enumerate(parts) if part[name] != parts[0][name]]
        if apart:
            reader, other = (0, apart[0]) if parts[0][name] else (apart[0], 0)
            raise MarlRayError(
                f"team.{name}.model.path: worker {reader} reads its shards from the files, and worker {other} could not "
                "open them for that; expected the same files on every worker"
            )


def sampled_elsewhere(config: RunConfig, name: str) -> bool:
    """True if the engine that samples from a policy has the weights itself, so that no worker needs a copy which samples."""
    if not config.language or config.data is not None:
        return False
    from marl_ray.policies.engines.sampler import has_weights

    return has_weights(config.team[name].generation)


def _learner_settings(config: RunConfig, name: str, mixed_precision: bool) -> LearnerSettings:
    """The part of the run's config that the learner of the policy `name` reads."""
    generation = config.team[name].generation
    return LearnerSettings(
        algorithm=config.algorithm_of(name),
        hyper=config.hyper_of(name),
        mixed_precision=mixed_precision,
        constraints=config.constraints,
        horizon=generation.max_tokens if config.language else config.train.horizon,
        by_episode=config.whole_episodes,
        micro_batch=config.train.micro_batch,
        served=config.data is not None or config.train.overlap,
        sampled_elsewhere=sampled_elsewhere(config, name),
        other_engine=config.language and config.data is None and not engine_spec(generation.engine).same_modules,
    )


def bundle_writer(
    config: RunConfig,
    env: ParallelEnv,
    team: Team,
    steps: int,
    metrics: dict[str, float],
    origin: Mapping[str, Any] | None = None,
) -> BundleWriter:
    """Copy the team's weights; returns a function that writes the bundle as a folder that does not exist yet, whatever the
    team does meanwhile. `origin` is that of its lineage. Weights that no worker has whole are read while they are written:
    see `bundle_sender`."""
    lineage = Lineage(
        run=config.name,
        algorithm={name: config.algorithm_of(name) for name in config.team},
        config_hash=config_hash(config),
        code_version=__version__,
        seed=config.seed,
        env=config.env.model_dump(mode="json"),
        steps=steps,
        metrics=metrics,
        origin=None if origin is None else Origin.model_validate(origin),
    )
    agents = {agent: name for name, members in team.agents.items() for agent in members}
    save: Callable[[str, TrainedTensor], Path]
    if config.language:
        save = _language_saver(team, agents, lineage)
    else:
        parts = {
            name: PolicyParts(
                config.team[name].network,
                env.observation_space(members[0]),
                env.action_space(members[0]),
                {key: value.clone() for key, value in cast(ActorCritic, team.models[name]).actor.state_dict().items()},
            )
            for name, members in team.agents.items()
        }

        def save(folder: str, trained: TrainedTensor) -> Path:
            return save_bundle(folder, agents, parts, lineage)

    def write(folder: Path, trained: TrainedTensor = _none) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            save(temporary, trained).rename(folder)

    return write


def bundle_sender(team: Team) -> Callable[[TrainedTensor], None]:
    """The part that all workers but the first have in a bundle: it calls its argument for each weight that the first one
    reads, in the same order."""
    if not team.engines:
        return lambda trained: None
    from marl_ray.policies.language.sampling_copy import StillWeights

    models = {name: cast("TokenPolicy", team.models[name]) for name in team.agents}
    still = {name: StillWeights(model) for name, model in models.items() if model.source is not None}

    def send(trained: TrainedTensor) -> None:
        for name, weights in still.items():
            weights.send(partial(trained, name))

    return send


def _none(policy: str, weight: str) -> None:
    return None


def _language_saver(team: Team, agents: dict[str, str], lineage: Lineage) -> Callable[[str, TrainedTensor], Path]:
    from marl_ray.policies.bundles.language import PartedPolicy, save_token_bundle
    from marl_ray.policies.language.sampling_copy import StillWeights

    models = {name: cast("TokenPolicy", team.models[name]) for name in team.agents}
    parted = {name: StillWeights(model) for name, model in models.items() if model.source is not None}
    copied = {name: _still(team, name) for name in models if name not in parted}

    def save(folder: str, trained: TrainedTensor) -> Path:
        arriving = {
            name: PartedPolicy(weights, weights.merged(partial(trained, name))) for name, weights in parted.items()
        }
        return save_token_bundle(folder, agents, {**copied, **arriving}, lineage)

    return save


def _still(team: Team, name: str) -> "TokenPolicy":
    """A language model that the next update does not change."""
    from marl_ray.policies.language.sampling_copy import still_copy
    from marl_ray.policies.language.token_policy import TokenPolicy

    model = cast(TokenPolicy, team.models[name])
    if name not in team.learners:
        return model
    trained = team.learners[name].policy.model.named_parameters()
    return still_copy(model, {key for key, value in trained if value.requires_grad})
