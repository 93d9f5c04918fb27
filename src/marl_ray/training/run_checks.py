"""The checks of a run that need no cluster: variables, folder, tracking, environment, models and data."""

import traceback
from typing import TYPE_CHECKING

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, describe_error, one_line
from marl_ray.policies.bundles.mlflow_client import mlflow_client
from marl_ray.training.checkpoints.index import checkpoints_in, find_newest
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.machines.ray_variables import check_variables
from marl_ray.training.run_folder.record import (
    RunRecord,
    check_folder,
    filesystem_of,
    record_of,
)
from marl_ray.training.run_folder.tracebacks import write_traceback
from marl_ray.training.tracking.mlflow_run import uri_of
from marl_ray.training.tracking.sinks import check_sinks

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv


TRACKING_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
"""Schemes of tracking URIs that MLflow has by itself; for others its plug-ins are asked, which takes seconds to load."""


def check_run(config: RunConfig) -> dict[str, list[str]]:
    """Check a run before any cluster starts, and return each policy's agents.

    The check builds the environment once, which also compiles its functions and caches them for the workers. It also
    builds the models, language models without their weights. Raises MarlRayError that names the key, the file or the
    argument.
    """
    _check_length(config, record_of(config))
    return check_trial(config)


def check_trial(config: RunConfig) -> dict[str, list[str]]:
    """Check a run of a sweep as `check_run` does, except for the record, which such a run does not have.

    Raises MarlRayError that names what does not fit, or the traceback of another error of the environment.
    """
    check_variables()
    _check_tracking(uri_of(config))
    check_sinks(config)
    check_folder(config)
    try:
        return _check_environment(config)
    except MarlRayError:
        raise
    except (Exception, SystemExit) as error:  # a user's environment may raise anything
        where = write_traceback(config, "driver", traceback.format_exc())
        more = f"; its traceback is in {where}" if where else ""
        raise MarlRayError(f"run {config.name!r} failed before it began: {describe_error(error)}{more}") from error


def _check_tracking(uri: str) -> None:
    """Refuse a tracking URI that MLflow does not understand. A server is not asked, which may come later."""
    if uri.partition(":")[0].partition("+")[0] in TRACKING_SCHEMES:
        return
    try:
        mlflow_client(uri)
    except Exception as error:  # MLflow's, or that of a plug-in
        raise MarlRayError(f"tracking.uri: {uri!r} cannot be used: {one_line(error)}") from error


def _check_length(config: RunConfig, record: RunRecord) -> None:
    """Refuse a run that was made shorter than its checkpoint: nothing of it would be trained."""
    latest = find_newest(StoredFolder(*filesystem_of(config)))
    if latest is None:
        return
    played, now = latest.manifest.steps, config.train.total_steps
    before = record["config"]["train"]["total_steps"]
    if now < before and now <= played:
        raise MarlRayError(
            f"train.total_steps={now}: run {config.name!r} has played {played:,} steps already; expected more than that, or "
            f"{before}, with which it began"
        )


def _check_environment(config: RunConfig) -> dict[str, list[str]]:
    """Check what needs the environment, and return each policy's agents."""
    from marl_ray.envs.copies import warm_up
    from marl_ray.envs.registry import check_costs, make_env
    from marl_ray.training.loop.families.run_family import run_family
    from marl_ray.training.team.assembly import team_agents

    warm_up(config.env, config.constraints, branches=config.branch_turns > 0)
    env = make_env(config.env, config.constraints)
    try:
        agents = team_agents(config, env)
        run_family(config).check(config, env, agents)
        if any(config.spec_of(name).needs_costs for name in config.team):
            check_costs(env, len(config.constraints))
        _check_origin(config, env, agents)
        return agents
    finally:
        env.close()


def _check_origin(config: RunConfig, env: "ParallelEnv | AECEnv", agents: dict[str, list[str]]) -> None:
    """Check the checkpoint of `resume_from`, which a run reads until it has a checkpoint of its own."""
    from marl_ray.training.checkpoints.origin import check_source, source_of, state_layouts

    checkpoints = checkpoints_in(StoredFolder(*filesystem_of(config)))
    if config.resume_from is not None and not checkpoints:
        check_source(config, str(source_of(config)), state_layouts(config, env, agents))
