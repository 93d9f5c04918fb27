"""Assemble the team of a run.

Its models and learners follow from the config and the environment's spaces; the team writes the run's bundle.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pettingzoo import ParallelEnv
from torch.distributed.device_mesh import DeviceMesh

from marl_ray import __version__
from marl_ray.config import RunConfig, config_hash
from marl_ray.envs.registry import is_text
from marl_ray.errors import MarlRayError
from marl_ray.policies.agreement import all_gather_values, run_on_all_workers
from marl_ray.policies.bundles.manifest import Lineage, Origin
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.learner.trained_policy import LearnerSettings
from marl_ray.training.team.families.team_family import team_family
from marl_ray.training.team.members import Team, TrainedTensor

if TYPE_CHECKING:
    from marl_ray.training.team.members import EngineOf, PolicyModel

BundleWriter = Callable[..., None]
"""Writes a bundle as the folder of its first argument; a `TrainedTensor` is the second."""


def team_agents(config: RunConfig, env: ParallelEnv) -> dict[str, list[str]]:
    """Map each policy to the agents that it plays, in the environment's order.

    Raises MarlRayError if an agent has no policy, a policy no agent, agents of one policy differ in their spaces, or the
    environment is for the other family of policies.
    """
    if config.has_language_models != is_text(env):
        kinds = ("a text environment", "language models", "actor-critics")
        given_kind, needed, given_family = kinds if is_text(env) else (f"no {kinds[0][2:]}", kinds[2], kinds[1])
        raise MarlRayError(
            f"env.id: {config.env.id} is {given_kind}, for {needed}; team: the policies are {given_family}"
        )
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
                        f"({kind(first)} and {kind(agent)}); expected policies of their own, such as "
                        f"team: {{{first}: {{agents: [{first}]}}, {agent}: {{agents: [{agent}]}}}}"
                    )
    return agents


def build_models(config: RunConfig, env: ParallelEnv, agents: dict[str, list[str]]) -> "Mapping[str, PolicyModel]":
    """Make the team's ActorCritics or TokenPolicies, equal on every worker.

    The policies have the weights of `team.NAME.bundle` if the config names one.
    """
    return team_family(config).build_models(config, env, agents)


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
    models = run_on_all_workers(lambda: build_models(config, env, agents))
    _check_same_weights(models)
    learners = {
        name: Learner(model, mesh, _learner_settings(config, name, mixed_precision))
        for name, model in models.items()
        if not config.team[name].frozen
    }
    return team_family(config).assemble(config, agents, models, learners, mesh, engine_of)


def _check_same_weights(models: "Mapping[str, PolicyModel]") -> None:
    """Raise MarlRayError, on all workers, if they do not read a model's weights alike.

    Workers on which the weights wait in their files would exchange what the others do not, and of another model's
    files each worker would read some parts.
    """

    def digests() -> dict[str, dict[str, str] | None]:
        stored = {name: getattr(model, "unread", None) for name, model in models.items()}
        return {name: None if weights is None else weights.digests() for name, weights in stored.items()}

    parts = all_gather_values(run_on_all_workers(digests))
    for name in models:
        where, first = f"team.{name}.model.path", parts[0][name]
        for rank, part in enumerate(parts):
            worker_digests = part[name]
            if worker_digests == first:
                continue
            if first is None or worker_digests is None:
                reader, other = (0, rank) if worker_digests is None else (rank, 0)
                raise MarlRayError(
                    f"{where}: worker {reader} reads its shards from the files, and worker {other} could not open them for "
                    "that; expected the same files on every worker"
                )
            weight = min(
                key for key in first.keys() | worker_digests.keys() if first.get(key) != worker_digests.get(key)
            )
            raise MarlRayError(
                f"{where}: the files of workers 0 and {rank} differ, such as in {weight}; expected the same on every worker"
            )


def _learner_settings(config: RunConfig, name: str, mixed_precision: bool) -> LearnerSettings:
    """Return the part of the run's config that the learner of the policy `name` reads."""
    family = team_family(config)
    return LearnerSettings(
        algorithm=config.algorithm_of(name),
        hyper=config.hyper_of(name),
        mixed_precision=mixed_precision,
        constraints=config.constraints,
        horizon=family.horizon(config, name),
        has_whole_episodes=config.has_whole_episodes,
        micro_batch=config.train.micro_batch,
        is_off_policy=config.data is not None or config.train.overlap,
        engine_has_weights=family.engine_has_weights(config, name),
        has_other_engine=family.has_other_engine(config, name),
    )


def bundle_writer(
    config: RunConfig,
    env: ParallelEnv,
    team: Team,
    steps: int,
    metrics: dict[str, float],
    origin: Mapping[str, object] | None = None,
) -> BundleWriter:
    """Copy the team's weights, and return a function that writes the bundle, whatever the team does meanwhile.

    The function writes a folder that does not exist yet. `origin` is that of its lineage. Weights that no worker has
    whole are read while they are written: see `Team.weights_sender`.
    """
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
    save = team.weights_saver(config, env, lineage)

    def write(folder: Path, trained: TrainedTensor = _return_none) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            save(temporary, trained).rename(folder)

    return write


def _return_none(policy: str, weight: str) -> None:
    """Return None: a `TrainedTensor` of a team whose weights this worker has whole."""
    return
