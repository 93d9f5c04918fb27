"""The whole product on one machine: train two teams as Ray Jobs, serve both, A/B them over HTTP, show the result."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from marl_ray.config import RunConfig, load_config
from marl_ray.errors import MarlRayError

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
ARMS = {"ippo": CONFIGS / "multigrid_ippo.yaml", "mappo": CONFIGS / "multigrid_mappo.yaml"}
"""Arm -> run config; the first arm is the control."""
EXPERIMENT = "gridworld"
JOB_S = 600.0
DEPLOY_S = 120.0


def run_demo(folder: Path, episodes: int, keep: bool) -> None:
    """Train, serve, play, print the table, shut down. Everything written lies under `folder`/TIME."""
    from marl_ray.cluster.local import local_ray
    from marl_ray.envs import warm_up

    missing = [str(path) for path in ARMS.values() if not path.is_file()]
    if missing:
        raise MarlRayError(f"demo: {', '.join(missing)} is missing; run the demo from a checkout of marl-ray")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    folder = (folder / time.strftime("%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    with _step(console, "compiling the gridworld (first time only)"):
        warm_up(load_config(RunConfig, ARMS["mappo"]).env)
    with _step(console, "starting a local Ray"):
        stack = contextlib.ExitStack()
        ray = stack.enter_context(local_ray(num_cpus=max(2, os.cpu_count() or 2), object_store_bytes=256 << 20))
    with stack:
        for arm, path in ARMS.items():
            with _step(console, f"training {arm} as a Ray Job"):
                _train(path, folder, ray.dashboard_url)
        with _step(console, "deploying both behind the router"):
            url = _deploy(folder, ray.dashboard_url)
        with _step(console, f"playing {episodes} episodes through HTTP"):
            played = asyncio.run(_play(url, episodes))
            report = httpx.get(f"{url}/v1/experiments/{EXPERIMENT}", timeout=30).raise_for_status().json()
        curve = _plot(folder)
        console.print(_table(report, played))
        console.print(f"verdict    {_verdict(report)}")
        models = ", ".join(f"{name} is {arm['bundle']}" for name, arm in report["arms"].items())
        console.print(f"models     {models}", soft_wrap=True)
        console.print(f"curves     {curve}", soft_wrap=True)
        console.print(f"runs       mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db", soft_wrap=True)
        console.print(f"outcomes   sqlite:///{folder}/experiments.db", soft_wrap=True)
        if keep:
            console.print(f"gateway    {url}  (GET /v1/experiments/{EXPERIMENT}, /metrics)")
            console.print(f"dashboard  {ray.dashboard_url}  (token: {ray.token})", soft_wrap=True)
            console.print("serving until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        with _step(console, "shutting down"):
            stack.close()


@contextlib.contextmanager
def _step(console: Console, title: str) -> Iterator[None]:
    console.print(f"[bold]{title}[/bold] ...")
    start = time.perf_counter()
    yield
    console.print(f"  done in {time.perf_counter() - start:.1f} s")


def _train(config: Path, folder: Path, dashboard_url: str) -> None:
    from marl_ray.cluster.jobs import submit

    status = submit("train", config, [f"storage={folder}"], address=dashboard_url, timeout_s=JOB_S)
    if status:
        raise MarlRayError(f"demo: training {config.stem} failed with status {status}")


def _deploy(folder: Path, dashboard_url: str) -> str:
    from marl_ray.cluster.local import free_port
    from marl_ray.serving.deploy import deploy

    arms = {arm: {"bundle": f"models:/{load_config(RunConfig, path).name}/1"} for arm, path in ARMS.items()}
    deployed = deploy(
        {
            "http_options": {"host": "127.0.0.1", "port": free_port()},
            "applications": [
                {
                    "name": "gateway",
                    "route_prefix": "/",
                    "import_path": "marl_ray.serving.app:build",
                    "args": {
                        "experiments": [{"name": EXPERIMENT, "arms": arms, "margin": 0.02}],
                        "database": f"sqlite:///{folder}/experiments.db",
                        "tracking_uri": f"sqlite:///{folder}/mlflow.db",
                    },
                }
            ],
        },
        dashboard_url,
        DEPLOY_S,
    )
    return deployed.urls["gateway"]


async def _play(url: str, episodes: int) -> Sequence[Any]:
    from marl_ray.envs import make_env
    from marl_ray.serving.client import play_episodes

    env = load_config(RunConfig, ARMS["mappo"]).env
    return await play_episodes(url, lambda: make_env(env), episodes, experiment=EXPERIMENT)


def _plot(folder: Path) -> Path:
    from marl_ray.training.curves import plot_returns
    from marl_ray.training.tracking import Tracker

    curves = {}
    for arm, path in ARMS.items():
        config = load_config(RunConfig, path, [f"storage={folder}"])
        record = json.loads((folder / config.name / "run.json").read_text())
        curves[arm] = Tracker(config, record["mlflow_run_id"]).history("return")
    return plot_returns(curves, folder / "learning_curves.png", "MultiGrid-Empty-8x8-v0, two agents")


def _table(report: dict[str, Any], played: Sequence[Any]) -> Table:
    table = Table(title=f"experiment {report['name']}, {len(played)} episodes over HTTP")
    for column in ("arm", "return [95 % CI]", "p50 ms", "p99 ms", "exposures", "against control", "verdict"):
        table.add_column(column, justify="left" if column in ("arm", "verdict") else "right", no_wrap=True)
    for name, arm in report["arms"].items():
        latencies = [ms * 1000 for episode in played if episode.arm == name for ms in episode.latencies]
        p50, p99 = np.percentile(latencies, [50, 99]) if latencies else (float("nan"), float("nan"))
        table.add_row(
            name,
            _with_bounds(arm["mean"], arm["interval"]),
            f"{p50:.1f}",
            f"{p99:.1f}",
            str(arm["exposures"]),
            "control" if "verdict" not in arm else _with_bounds(arm["difference"], arm["difference_interval"]),
            arm.get("verdict", ""),
        )
    return table


def _with_bounds(mean: float | None, bounds: Sequence[float] | None) -> str:
    if mean is None:
        return "-"
    return f"{mean:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


_WORDS: dict[str, Callable[[str, str], str]] = {
    "better": lambda arm, control: f"{arm} is better than {control}",
    "worse": lambda arm, control: f"{arm} is worse than {control}",
    "non_inferior": lambda arm, control: f"{arm} is no worse than {control} by more than the margin",
    "undecided": lambda arm, control: f"{arm} against {control} is undecided",
}


def _verdict(report: dict[str, Any]) -> str:
    control = report["control"]
    return "; ".join(_WORDS[arm["verdict"]](name, control) for name, arm in report["arms"].items() if "verdict" in arm)
