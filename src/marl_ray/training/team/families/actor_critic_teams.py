"""Teams of actor-critics; `TeamFamily` documents the functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from marl_ray.config import RunConfig
from marl_ray.errors import FieldError
from marl_ray.policies.actor_critic.compiled.network import CompiledNetwork
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.actor_critic.spaces import joint_space
from marl_ray.policies.bundles.actor_critic import PolicyParts, ServedPolicy, save_bundle
from marl_ray.policies.bundles.loading import load_actor_critics
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.team.members import Team, TrainedTensor, WeightsSaver
from marl_ray.training.tracking.mlflow_run import uri_of

if TYPE_CHECKING:  # the imports take seconds, and actor-critics do not need them
    from marl_ray.training.team.members import EngineOf, PolicyModel


@dataclass(frozen=True)
class ActorCriticTeam(Team):
    """Small policies, which workers evaluate themselves."""

    @override
    def players(self) -> dict[str, Player]:
        models = cast(Mapping[str, ActorCritic], self.models)
        return {
            name: Player(model, self.agents[name], *self.norms(name), *self._compiled_policy(name))
            for name, model in models.items()
        }

    def _compiled_policy(self, name: str) -> tuple[CompiledNetwork, ...]:
        """Return actor and critics as compiled code for a policy that learns by such code; () for all others."""
        if name not in self.learners or not self.learners[name].is_compiled:
            return ()
        model = cast(ActorCritic, self.models[name])
        return tuple(CompiledNetwork(network) for network in (model.actor, *model.critics))

    @override
    def weights_saver(self, config: RunConfig, env: ParallelEnv, lineage: Lineage) -> WeightsSaver:
        agents = {agent: name for name, members in self.agents.items() for agent in members}
        parts = {
            name: PolicyParts(
                config.team[name].network,
                env.observation_space(members[0]),
                env.action_space(members[0]),
                {key: value.clone() for key, value in cast(ActorCritic, self.models[name]).actor.state_dict().items()},
            )
            for name, members in self.agents.items()
        }

        def save(folder: str, trained: TrainedTensor) -> Path:
            return save_bundle(folder, agents, parts, lineage)

        return save


def build_models(config: RunConfig, env: ParallelEnv, agents: Mapping[str, list[str]]) -> dict[str, ActorCritic]:
    """Build complete models with random weights that follow from the run's seed."""
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
            config.cost_signals if spec.needs_costs and not frozen else 0,
        )
        _load_weights(config, name, members, models[name], env)
    return models


def _load_weights(config: RunConfig, name: str, members: list[str], model: ActorCritic, env: ParallelEnv) -> None:
    """Give the actor the weights of `team.NAME.bundle`, if there is one. Raises FieldError if they do not fit."""
    reference = config.team[name].bundle
    if reference is None:
        return
    bundle = load_actor_critics(reference, uri_of(config))
    source = bundle.agents.get(members[0])
    if source is None:
        raise FieldError(f"team.{name}.bundle", f"the bundle has no policy for agent {members[0]!r}")
    try:
        model.actor.load_state_dict(bundle.policies[source].actor.state_dict())
    except RuntimeError as error:
        raise FieldError(f"team.{name}.bundle", explain_mismatch(env, members[0], bundle.policies[source])) from error


def explain_mismatch(env: ParallelEnv, agent: str, trained: ServedPolicy) -> str:
    """Return why a policy of a bundle, whose weights do not fit, cannot play an agent of the environment."""
    observations = env.observation_space(agent), trained.observation_space
    actions = env.action_space(agent), trained.action_space
    for name, (played, known) in (("observations", observations), ("actions", actions)):
        if played.shape != known.shape:
            return f"{agent}'s {name} have shape {list(played.shape or ())}, the bundle's {list(known.shape or ())}"
        boxes = isinstance(played, spaces.Box) and isinstance(known, spaces.Box)
        if played != known and not boxes:  # the bounds of boxes change no weight's shape
            return " ".join(f"{agent}'s {name} are {played}, the bundle's {known}".split())
    return f"{agent}'s network has other layers than the bundle's; expected the bundle's `network`"


def horizon(config: RunConfig, name: str) -> int:
    """Return the greatest number of steps, which are steps of the environment."""
    return config.train.horizon


def engine_has_weights(config: RunConfig, name: str) -> bool:
    """Return False, because every worker samples by its own copy."""
    return False


def has_other_engine(config: RunConfig, name: str) -> bool:
    """Return False, because no engine samples from actor-critics."""
    return False


def assemble(
    config: RunConfig,
    agents: dict[str, list[str]],
    models: "Mapping[str, PolicyModel]",
    learners: dict[str, Learner],
    mesh: DeviceMesh,
    engine_of: "EngineOf | None",
) -> ActorCriticTeam:
    """Assemble a team whose models play as the learners refresh them."""
    return ActorCriticTeam(agents, models, learners)
