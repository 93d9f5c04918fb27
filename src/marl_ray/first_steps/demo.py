"""The whole product on one machine, from the training of teams to promotion and rollback.

The demo trains two teams as Ray Jobs, serves one, rolls the other out gradually until the router promotes it, then
rolls out an untrained team, which the router rolls back.
"""

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from marl_ray.cluster.listeners import JobListener
from marl_ray.config import EnvConfig, RunConfig, load_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import FINAL_STATUSES
from marl_ray.first_steps.steps import ENDPOINT, KEYS_FILE, deploy_endpoint, new_folder, plain_console, timed_step
from marl_ray.json_types import JsonObject
from marl_ray.serving.http.keys import new_key

CONFIGS = Path(__file__).parent / "configs"
ARM_CONFIGS = {"ippo": CONFIGS / "multigrid_ippo.yaml", "mappo": CONFIGS / "multigrid_mappo.yaml"}
"""Arm -> run config; the first arm is the control."""
RAMP_SETTINGS: JsonObject = {
    "strategy": "gradual",
    "stages": [0.25, 0.5, 1.0],
    "min_exposures": 20,
    "min_duration_s": 1.0,
    "min_outcomes": 20,
    "margin": 0.05,
    "outcome_window_s": 5.0,
    "missing": 0.0,  # a team that is not done after 5 s has reached nothing
}
EPISODES_PER_LOOK = 20
"""Episodes between two looks at what the router has decided."""
JUDGED_S = 3.0
"""Seconds after the end of an episode's window by which the router has judged it."""
JOB_S = 600.0
"""Maximum seconds for a training job, after which the demo gives up."""


@dataclass(frozen=True)
class PlayedExperiment:
    """An experiment that was played over HTTP."""

    report: JsonObject
    """The document of `experiment status`."""
    audit: list[dict[str, object]]
    """The router's actions: the document of `experiment audit`."""
    episodes: int
    """Number of episodes that were played."""
    latencies_ms: dict[str, tuple[float, float]]
    """Arm -> median and 99th percentile of an action's milliseconds."""


@dataclass(frozen=True)
class DemoResult:
    """The result of the demo, while its gateway serves."""

    experiments: list[PlayedExperiment]
    curves: str
    """Path of the picture of the learning curves."""
    tracking_uri: str
    """MLflow URI of the runs."""
    database: str
    """SQLAlchemy URL of the experiments."""
    url: str
    """URL of the gateway."""
    key: str
    """Admin key of the gateway."""
    dashboard: str
    """URL of Ray's dashboard."""
    token: str
    """Token of the dashboard."""


@contextlib.contextmanager
def demonstrate(folder: Path, episodes: int, listener: JobListener) -> Iterator[DemoResult]:
    """Train, serve and play; the listener gets the logs of the training jobs.

    The gateway serves until the block ends. Everything written lies under `folder`/TIME.
    """
    from marl_ray.cluster.local_ray import local_ray
    from marl_ray.envs.copies import warm_up

    console, folder = plain_console(), new_folder(folder)
    mappo = load_config(RunConfig, ARM_CONFIGS["mappo"])
    with timed_step(console, "compiling the gridworld (first time only)"):
        warm_up(mappo.env)
    with timed_step(console, "starting a local Ray"):
        stack = contextlib.ExitStack()
        ray = stack.enter_context(local_ray(num_cpus=max(2, os.cpu_count() or 2), object_store_bytes=256 << 20))
    with stack:
        for arm, path in ARM_CONFIGS.items():
            with timed_step(console, f"training {arm} as a Ray Job"):
                _train(path, folder, ray.dashboard_url, listener)
        key = os.environ["MARL_RAY_API_KEY"] = new_key(folder / KEYS_FILE, "demo")
        with timed_step(console, "deploying the router: ippo in production, mappo as its candidate"):
            arms = {
                arm: {"bundle": f"models:/{load_config(RunConfig, path).name}/1"} for arm, path in ARM_CONFIGS.items()
            }
            url = deploy_endpoint(folder, ray.dashboard_url, {"arms": arms, **RAMP_SETTINGS})
        with timed_step(console, "rolling mappo out, a quarter of the episodes first"):
            ramp = play(url, ENDPOINT, mappo.env, episodes)
        with timed_step(console, "rolling an untrained team out against the winner"):
            untrained_ramp = play(url, ramp_untrained(mappo, folder, url), mappo.env, episodes)
        yield DemoResult(
            experiments=[ramp, untrained_ramp],
            curves=str(_plot_curves(folder)),
            tracking_uri=f"sqlite:///{folder}/mlflow.db",
            database=f"sqlite:///{folder}/experiments.db",
            url=url,
            key=key,
            dashboard=ray.dashboard_url,
            token=ray.token,
        )
        with timed_step(console, "shutting down"):
            stack.close()


def print_result(result: DemoResult, is_served: bool) -> None:
    """Print the result of the demo for people, and where its gateway is if that is still served."""
    console = plain_console()
    for experiment in result.experiments:
        console.print(table(experiment))
        for line in decision_lines(experiment):
            console.print(line, soft_wrap=True)
    lines = {"curves": result.curves, "runs": f"mlflow ui --backend-store-uri {result.tracking_uri}"}
    lines |= {"outcomes": result.database}
    if is_served:
        lines["gateway"] = f"{result.url}/ui  (also /v1/experiments, /metrics, /openapi.json)"
        lines["admin key"] = result.key
        lines["dashboard"] = f"{result.dashboard}  (token: {result.token})"
    for name, text in lines.items():
        console.print(f"{name:<11}{text}", soft_wrap=True)


def _train(config: Path, folder: Path, dashboard_url: str, listener: JobListener) -> None:
    from marl_ray.cluster.jobs import submit

    overrides = [f"storage={folder}"]
    status = submit("train", config, overrides, address=dashboard_url, listener=listener, timeout_s=JOB_S)
    if status:
        raise MarlRayError(f"demo: training {config.stem} failed with status {status}")


def ramp_untrained(config: RunConfig, folder: Path, url: str) -> str:
    """Start an experiment with a run's team before it has learnt anything, and return its name."""
    from marl_ray.envs.registry import make_env
    from marl_ray.serving.administration.remote_experiments import deploy_bundle
    from marl_ray.training.team.assembly import build_models, bundle_writer, team_agents
    from marl_ray.training.team.families.actor_critic_teams import ActorCriticTeam

    bundle = folder / "untrained"
    with contextlib.closing(make_env(config.env)) as env:
        agents = team_agents(config, env)
        team = ActorCriticTeam(agents, build_models(config, env, agents), {})
        bundle_writer(config, env, team, 0, {})(bundle)
    options = {key: value for key, value in RAMP_SETTINGS.items() if key != "strategy"}
    name: str = deploy_bundle(url, str(bundle), "gradual", ENDPOINT, options, "the demo's bad arm")["name"]
    return name


def play(url: str, name: str, env: EnvConfig, episodes: int) -> PlayedExperiment:
    """Play episodes over HTTP until the router has decided on the experiment, at most `episodes`."""
    from marl_ray.envs.registry import make_env
    from marl_ray.serving.client.play import play_episodes
    from marl_ray.serving.client.requests import request_json

    key, played_episodes = os.environ["MARL_RAY_API_KEY"], list[Any]()
    while len(played_episodes) < episodes:
        count = min(EPISODES_PER_LOOK, episodes - len(played_episodes))
        played_episodes += asyncio.run(
            play_episodes(url, lambda: make_env(env), count, experiment=ENDPOINT, seed=len(played_episodes), key=key)
        )
        if request_json(url, f"/v1/experiments/{name}")["status"] in FINAL_STATUSES:
            break
    else:  # the last episodes are judged when their windows are over
        time.sleep(RAMP_SETTINGS["outcome_window_s"] + JUDGED_S)
        if request_json(url, f"/v1/experiments/{name}")["status"] not in FINAL_STATUSES:
            # Not enough episodes for a proof; production stays, and the endpoint is free for the next.
            request_json(url, f"/v1/experiments/{name}/stop", {"reason": f"undecided after {episodes} episodes"})
    report = request_json(url, f"/v1/experiments/{name}")
    latencies_of_arms: dict[str, list[float]] = {arm: [] for arm in report["arms"]}
    for episode in played_episodes:
        latencies_of_arms[episode.arm] += [1000 * seconds for seconds in episode.latencies]
    return PlayedExperiment(
        report,
        request_json(url, f"/v1/experiments/{name}/audit")["audit"],
        len(played_episodes),
        {arm: (float(np.median(ms)), float(np.percentile(ms, 99))) for arm, ms in latencies_of_arms.items() if ms},
    )


def decision_lines(experiment: PlayedExperiment) -> list[str]:
    """Return the router's actions, from its audit log."""
    return [
        f"  {entry['action']} {entry['arm'] or ''}".rstrip().ljust(24) + f" by {entry['actor']}: {entry['reason']}"
        for entry in experiment.audit
    ]


def _plot_curves(folder: Path) -> Path:
    from marl_ray.stored_files.folder_kinds import RUN_FILE
    from marl_ray.training.tracking.curve_plot import plot_returns
    from marl_ray.training.tracking.mlflow_run import MlflowRun

    curves = {}
    for arm, path in ARM_CONFIGS.items():
        config = load_config(RunConfig, path, [f"storage={folder}"])
        record = json.loads((folder / config.name / RUN_FILE).read_text())
        curves[arm] = MlflowRun(config, record["mlflow_run_id"]).history("eval/return")
    return plot_returns(curves, folder / "learning_curves.png", "MultiGrid-Empty-8x8-v0, two agents")


def table(experiment: PlayedExperiment) -> Table:
    """Return the table of an experiment's report, with the latencies of its actions over HTTP in milliseconds."""
    report = experiment.report
    title = f"experiment {report['name']}: {report['status']}, {experiment.episodes} episodes over HTTP"
    rows = Table(title=title)
    for column in ("arm", "return [95 % CI]", "p50 ms", "p99 ms", "exposures", "against control", "verdict"):
        rows.add_column(column, justify="left" if column in ("arm", "verdict") else "right", no_wrap=True)
    for name, arm in report["arms"].items():
        p50, p99 = experiment.latencies_ms.get(name, (math.nan, math.nan))
        rows.add_row(
            name,
            _interval_text(arm["mean"], arm["interval"]),
            f"{p50:.1f}",
            f"{p99:.1f}",
            str(arm["exposures"]),
            "control" if "verdict" not in arm else _interval_text(arm["difference"], arm["difference_interval"]),
            arm.get("verdict", ""),
        )
    return rows


def _interval_text(mean: float | None, bounds: Sequence[float] | None) -> str:
    if mean is None:
        return "-"
    return f"{mean:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")
