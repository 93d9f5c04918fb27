"""The team of a run: models and learners from the config and the environment's spaces."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from pettingzoo import ParallelEnv
from torch.distributed.device_mesh import DeviceMesh

from marl_ray import __version__
from marl_ray.algorithms.value_norm import ValueNorm
from marl_ray.config import RunConfig, config_hash
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic import ActorCritic
from marl_ray.policies.bundle import Lineage, PolicyParts, load_bundle, save_bundle
from marl_ray.policies.spaces import joint_space
from marl_ray.rollout.buffers import Player
from marl_ray.training.learner import Learner
from marl_ray.training.tracking import tracking_uri


@dataclass(frozen=True)
class Team:
    """Policies by name: the agents each plays, its rollout model, and its learner unless it is frozen."""

    agents: dict[str, list[str]]
    models: dict[str, ActorCritic]
    learners: dict[str, Learner]

    def players(self) -> dict[str, Player]:
        """What the collector needs of every policy, as of now."""
        return {
            name: Player(
                model,
                self.agents[name],
                self.learners[name].value_norm if name in self.learners else ValueNorm(),
                self.learners[name].cost_norms if name in self.learners else (),
            )
            for name, model in self.models.items()
        }


def team_agents(config: RunConfig, env: ParallelEnv) -> dict[str, list[str]]:
    """Policy -> the agents it plays, in the environment's order.

    Raises MarlRayError if an agent has no policy, a policy no agent, or agents of one policy differ in their spaces.
    """
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


def build_models(config: RunConfig, env: ParallelEnv, agents: dict[str, list[str]]) -> dict[str, ActorCritic]:
    """Freshly initialised models, equal on every worker, with the weights of `team.NAME.bundle` where given."""
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
    bundle = load_bundle(reference, tracking_uri(config))
    source = bundle.agents.get(members[0])
    if source is None:
        raise MarlRayError(f"team.{name}.bundle: {reference!r} has no policy for agent {members[0]!r}")
    try:
        model.actor.load_state_dict(bundle.policies[source].actor.state_dict())
    except RuntimeError as error:
        raise MarlRayError(f"team.{name}.bundle: {reference!r} holds a network of another shape") from error


def build_team(config: RunConfig, env: ParallelEnv, mesh: DeviceMesh, mixed_precision: bool) -> Team:
    """Models and learners on this worker; every worker takes part."""
    agents = team_agents(config, env)
    models = build_models(config, env, agents)
    learners = {
        name: Learner(
            model,
            config.algorithm_of(name),
            config.hyper_of(name),
            mesh,
            mixed_precision,
            config.constraints,
            config.train.horizon,
            config.whole_episodes,
            config.train.micro_batch,
        )
        for name, model in models.items()
        if not config.team[name].frozen
    }
    return Team(agents, models, learners)


def export_bundle(
    folder: Path, config: RunConfig, env: ParallelEnv, team: Team, steps: int, metrics: dict[str, float]
) -> None:
    """Write the team's bundle so that `folder` itself is the bundle."""
    parts = {
        name: PolicyParts(
            config.team[name].network,
            env.observation_space(members[0]),
            env.action_space(members[0]),
            team.models[name].actor.state_dict(),
        )
        for name, members in team.agents.items()
    }
    lineage = Lineage(
        run=config.name,
        algorithm={name: config.algorithm_of(name) for name in config.team},
        config_hash=config_hash(config),
        code_version=__version__,
        seed=config.seed,
        env=config.env.model_dump(mode="json"),
        steps=steps,
        metrics=metrics,
    )
    agents = {agent: name for name, members in team.agents.items() for agent in members}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        save_bundle(temporary, agents, parts, lineage).rename(folder)
