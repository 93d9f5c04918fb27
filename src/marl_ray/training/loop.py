"""What every training worker runs: collect, update, report, checkpoint. No Ray in here; the edge passes callbacks in."""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from marl_ray.config import RunConfig
from marl_ray.envs import make_env
from marl_ray.rollout.collector import Collector, Episode
from marl_ray.training import checkpoint
from marl_ray.training.collectives import gather, world
from marl_ray.training.team import Team, build_team, export_bundle

BUNDLE = "bundle"
"""Folder of a checkpoint that holds the bundle, where the checkpoint was the best so far."""

Metrics = dict[str, float]


class Clock:
    """Seconds spent in named phases since the last reading."""

    def __init__(self) -> None:
        self.started, self.phases = time.perf_counter(), {"rollout": 0.0, "update": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.phases[name] += time.perf_counter() - before

    def read(self, steps: int) -> Metrics:
        """Steps per second and each phase's share of the time; starts over."""
        now = time.perf_counter()
        whole = now - self.started
        shares = {f"time/{name}": seconds / whole for name, seconds in self.phases.items()}
        self.started, self.phases = now, dict.fromkeys(self.phases, 0.0)
        return {"steps_per_second": steps / whole, **shares, "time/other": max(0.0, 1 - sum(shares.values()))}


def run_worker(
    config: RunConfig,
    device: torch.device,
    resume_from: Path | None,
    emit: Callable[[Metrics], None],
    report: Callable[[Path, Metrics], None],
    run_id: str | None = None,
) -> Metrics:
    """Train to the end on this worker; the process group is up.

    `emit` gets each iteration's metrics, on rank 0 alone. `report` gets a checkpoint folder and its metrics, on every
    worker; the folder is removed when it returns. Returns the last iteration's metrics.
    """
    torch.set_num_threads(config.resources.threads_per_worker)
    rank, workers = world()
    mesh = init_device_mesh(device.type, (workers,))
    mixed = config.resources.mixed_precision
    env = make_env(config.env)
    team = build_team(config, env, mesh, mixed == "bf16" or (mixed == "auto" and device.type == "cuda"))
    state, envs = _fresh_state(run_id), None
    if resume_from is not None:
        state, envs = checkpoint.load(resume_from, team.learners)
    own = config.train.env_copies // workers
    copies = range(rank * own, (rank + 1) * own)
    collector = Collector(lambda: make_env(config.env), copies, config.train.horizon, config.seed, envs)
    recent: deque[tuple[float, float, int]] = deque((tuple(e) for e in state["recent"]), config.evaluation.window)
    clock, metrics = Clock(), state["metrics"]
    for iteration in range(state["iteration"], config.iterations):
        metrics = {"iteration": iteration + 1, "steps": (iteration + 1) * config.batch_steps}
        metrics |= _iterate(config, team, collector, iteration, recent, clock)
        if rank == 0:
            emit(metrics)
        last = iteration + 1 == config.iterations
        if last or (iteration + 1) % config.checkpoint.every == 0:
            score = metrics.get("return", float("-inf"))
            best = score >= state["best_score"]
            state |= {
                "iteration": iteration + 1,
                "recent": list(recent),
                "metrics": metrics,
                "best_score": max(score, state["best_score"]),
            }
            with tempfile.TemporaryDirectory(prefix="marl-ray-checkpoint-") as temporary:
                folder = Path(temporary)
                checkpoint.save(folder, team.learners, state, collector.state())
                if best and rank == 0:
                    export_bundle(folder / BUNDLE, config, env, team, int(metrics["steps"]), metrics)
                report(folder, metrics | {"score": score})
    collector.close()
    env.close()
    return metrics


def _fresh_state(run_id: str | None) -> dict[str, Any]:
    return {"iteration": 0, "recent": [], "best_score": float("-inf"), "metrics": {}, "mlflow_run_id": run_id}


def _iterate(
    config: RunConfig,
    team: Team,
    collector: Collector,
    iteration: int,
    recent: deque[tuple[float, float, int]],
    clock: Clock,
) -> Metrics:
    with clock.phase("rollout"):
        batches, episodes = collector.collect(team.players(), iteration)
    metrics: Metrics = {}
    with clock.phase("update"):
        for name, learner in team.learners.items():
            learner.set_progress(iteration / config.iterations)
            losses = learner.update(batches[name], config.seed, iteration)
            prefix = "" if len(team.learners) == 1 else f"{name}/"
            metrics |= {prefix + key: value for key, value in losses.items()}
    recent.extend((e.ret, e.cost, e.length) for e in _all_episodes(episodes))
    if recent:
        means = [sum(column) / len(recent) for column in zip(*recent, strict=True)]
        metrics |= dict(zip(("return", "episode_cost", "episode_length"), means, strict=True))
    return metrics | clock.read(config.batch_steps)


def _all_episodes(episodes: list[Episode]) -> list[Episode]:
    """Episodes of all workers in the order of their ends, the same for any number of workers."""
    return sorted((e for part in gather(episodes) for e in part), key=lambda e: (e.step, e.copy))
