"""What every training worker runs: collect, update, report, checkpoint. No Ray in here; the edge passes callbacks in."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pettingzoo import ParallelEnv
from torch.distributed.device_mesh import init_device_mesh

from marl_ray.config import RunConfig
from marl_ray.envs import make_env
from marl_ray.envs.batch import make_batch
from marl_ray.rollout.collector import Collector, Plan
from marl_ray.rollout.random import team_order
from marl_ray.training import checkpoint
from marl_ray.training.batches import CostStats
from marl_ray.training.collectives import gather, world
from marl_ray.training.recent import Played, Recent
from marl_ray.training.team import Team, build_team, export_bundle
from marl_ray.training.warm_start import warm_start
from marl_ray.trajectories import Trajectories

BUNDLE = "bundle"
"""Folder of a checkpoint that holds the bundle, where the checkpoint was the best so far."""

UNKNOWN = -1e12
"""Score of weights that were not evaluated: below that of all that were."""

Metrics = dict[str, float]


class Clock:
    """Seconds spent in named phases since the last reading."""

    def __init__(self, *phases: str) -> None:
        self.started, self.phases = time.perf_counter(), dict.fromkeys(phases, 0.0)

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


class Run:
    """A run on this worker, an iteration at a time; the process group is up, and every worker makes the same calls."""

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        resume_from: Path | None,
        emit: Callable[[Metrics], None],
        run_id: str | None = None,
        own_hyper: bool = False,
    ):
        """`emit` gets each epoch's metrics of a warm start. `own_hyper`: the checkpoint is of a run with other
        hyper-parameters; its weights and optimiser state are taken, and this config's hyper-parameters count."""
        torch.set_num_threads(config.resources.threads_per_worker)
        self.config = config
        self.rank, workers = world()
        mesh = init_device_mesh(device.type, (workers,))
        mixed = config.resources.mixed_precision
        self.env = make_env(config.env, config.constraints)
        self.team = build_team(config, self.env, mesh, mixed == "bf16" or (mixed == "auto" and device.type == "cuda"))
        self.state, envs = _fresh_state(run_id, list(self.team.models)), None
        if resume_from is not None:
            self.state, envs = checkpoint.load(resume_from, self.team.learners, own_hyper)
        elif config.warm_start is not None and config.language:
            from marl_ray.training.fine_tuning import fine_tune

            fine_tune(config, self.env, self.team, emit)
        elif config.warm_start is not None:
            warm_start(config, self.env, self.team, emit)
        self.collector = build_collector(config, self.env, self.team.agents, self.rank, workers, envs)
        self.recent = Recent(config, self.state["recent"])
        self.clock = Clock("rollout", "update", *(("evaluation",) if config.evaluation.every else ()))
        self.iteration, self.steps = self.state["iteration"], self.state["steps"]
        self.costs = {name: CostStats(**stats) for name, stats in self.state["costs"].items()}
        self.metrics: Metrics = self.state["metrics"]
        """Of the last iteration."""
        self.evaluated: float | None = None
        """Score on held-out tasks, if the weights as they are were evaluated."""
        self.transcripts: list[dict[str, Any]] = []
        """A few episodes of the last iteration as text, of all workers, where language models play."""

    @property
    def done(self) -> bool:
        return bool(self.steps >= self.config.train.total_steps)

    @property
    def save_due(self) -> bool:
        return self.done or self.iteration % self.config.checkpoint.every == 0 or self.evaluated is not None

    def step(self) -> Metrics:
        """One iteration: collect and update; its metrics."""
        before, self.evaluated = self.steps, None
        with self.clock.phase("rollout"):
            batch = self.collector.collect(self.team.players(), self.iteration)
        episodes, played = _together(batch)
        spoken = self._spoken(batch) if self.config.language else {}
        self.steps += played
        self.costs = _cost_stats(self.config, episodes, self.costs)
        with self.clock.phase("update"):
            losses = _update(self.config, self.team, batch.trajectories, self.iteration, before, self.costs)
        self.recent.add(episodes)
        self.iteration += 1
        held_out = self.evaluate() if self.done or _due(self.iteration, self.config.evaluation.every) else {}
        progress = {"iteration": self.iteration, "steps": self.steps}
        speed = self.clock.read(played)
        if spoken:
            # Both are read in an update; a rate per step of the environment says little where responses differ in length.
            tokens = spoken["tokens"] + spoken["prompt_tokens"]
            speed["tokens_per_second"] = tokens * speed["steps_per_second"] / max(played, 1)
        self.metrics = progress | losses | self.recent.metrics() | spoken | held_out | speed
        return self.metrics

    def evaluate(self) -> Metrics:
        """Play the held-out tasks, if there are to be any; every worker takes part."""
        self.evaluated = None
        if not self.config.evaluation.every:
            return {}
        from marl_ray.training.held_out import evaluate_held_out

        with self.clock.phase("evaluation"):
            found, self.evaluated = evaluate_held_out(self.config, self.collector, self.team.players())
        return found

    def _spoken(self, batch: Any) -> Metrics:
        """Metrics of the responses of all workers; keeps the transcripts."""
        from marl_ray.training.language import response_metrics

        metrics, self.transcripts = response_metrics(batch)
        return metrics

    def score(self) -> float:
        """What the best checkpoint is chosen by: held-out tasks where they are played, else the recent episodes."""
        found = self.evaluated if self.config.evaluation.every else self.recent.score()
        return UNKNOWN if found is None else max(found, UNKNOWN)

    def save(self, folder: Path) -> float:
        """Write a checkpoint, with a bundle where the score is the best so far; the score."""
        score = self.score()
        best = score >= self.state["best_score"]
        self.state |= {
            "iteration": self.iteration,
            "steps": self.steps,
            "costs": {name: vars(stats) for name, stats in self.costs.items()},
            "recent": self.recent.state(),
            "metrics": self.metrics,
            "best_score": max(score, self.state["best_score"]),
        }
        checkpoint.save(folder, self.team.learners, self.state, self.collector.state())
        if best and self.rank == 0:
            export_bundle(folder / BUNDLE, self.config, self.env, self.team, self.steps, self.metrics)
        return score

    def close(self) -> None:
        self.collector.close()
        self.env.close()


def run_worker(
    config: RunConfig,
    device: torch.device,
    resume_from: Path | None,
    emit: Callable[[Metrics], None],
    report: Callable[[Path, Metrics], None],
    run_id: str | None = None,
    show: Callable[[int, list[dict[str, Any]]], None] = lambda iteration, transcripts: None,
) -> Metrics:
    """Train to the end on this worker; the process group is up.

    `emit` gets each iteration's metrics, and before them each epoch's of a warm start, on rank 0 alone. `report` gets a
    checkpoint folder and its metrics, on every worker; the folder is removed when it returns. `show` gets transcripts of
    the iterations that have a checkpoint, on rank 0 alone. Returns the last iteration's metrics.
    """
    run = Run(config, device, resume_from, emit, run_id)

    def save(metrics: Metrics) -> None:
        with tempfile.TemporaryDirectory(prefix="marl-ray-checkpoint-") as folder:
            report(Path(folder), metrics | {"score": run.save(Path(folder))})

    if run.done and run.iteration == 0:  # nothing but a warm start was asked for
        run.metrics = {"steps": 0} | run.evaluate()
        if run.rank == 0:
            emit(run.metrics)
        save({"iteration": 0} | run.metrics)
    while not run.done:
        metrics = run.step()
        if run.rank == 0:
            emit(metrics)
        if run.save_due:
            if run.rank == 0 and run.transcripts:
                show(run.iteration, run.transcripts)
            save(metrics)
    run.close()
    return run.metrics


def build_collector(
    config: RunConfig, env: ParallelEnv, agents: dict[str, list[str]], rank: int, workers: int, state: Any = None
) -> Any:
    """The collector (Collector or TextCollector) of one worker's share of the environment copies."""
    own = config.train.env_copies // workers
    copies = range(rank * own, (rank + 1) * own)
    refills = {
        name: config.hyper_of(name).dynamic_sampling for name, policy in config.team.items() if not policy.frozen
    }
    plan = Plan(
        config.train.horizon,
        config.whole_episodes,
        config.train.group_size,
        config.greedy,
        max(refills.values()),
        tuple(name for name, count in refills.items() if count),
    )
    if config.language:
        from marl_ray.training.language import build_text_collector

        return build_text_collector(config, agents, copies, plan, state)
    envs = make_batch(config.env, own, list(agents.values()), config.signals, config.constraints)
    return Collector(env, envs, agents, copies, plan, config.seed, config.signals, state)


def _fresh_state(run_id: str | None, policies: Sequence[str]) -> dict[str, Any]:
    return {
        "iteration": 0,
        "steps": 0,
        "costs": {name: vars(CostStats(None, 0)) for name in policies},
        "recent": [],
        "best_score": float("-inf"),
        "metrics": {},
        "mlflow_run_id": run_id,
    }


def _due(iteration: int, every: int) -> bool:
    return every > 0 and iteration % every == 0


def _update(
    config: RunConfig,
    team: Team,
    batches: dict[str, Trajectories],
    iteration: int,
    steps: int,
    costs: Mapping[str, CostStats],
) -> Metrics:
    """Update every policy; where an algorithm is sequential, one after another with the factor of those before."""
    metrics: Metrics = {}
    names = list(team.learners)
    sequential = any(config.spec_of(name).order == "sequential" for name in names)
    if sequential:
        names = [names[i] for i in team_order(config.seed, iteration, len(names))]
    factor: torch.Tensor | None = None
    means = next(iter(costs.values())).means
    for name in names:
        learner, batch = team.learners[name], batches[name]
        learner.set_progress(steps / max(config.train.total_steps, 1))
        own = factor if config.spec_of(name).order == "sequential" else None
        where = f"policy {name!r}, iteration {iteration + 1}, step {steps}"
        stats = replace(costs[name], means=means)
        losses = learner.update(batch, config.seed, iteration, stats, own, where)
        prefix = "" if len(team.learners) == 1 else f"{name}/"
        metrics |= {prefix + key: value for key, value in losses.items()}
        if sequential:
            change = learner.log_ratio(batch).clamp(-20, 20).exp()
            after = change if factor is None else factor * change
            means, factor = learner.moved_costs(stats, batch, after, factor).means, after
    return metrics


def _cost_stats(config: RunConfig, episodes: Sequence[Played], before: Mapping[str, CostStats]) -> dict[str, CostStats]:
    """By policy the mean costs and decisions of the episodes that ended in this batch; of the last batch that had any if
    none did. Episodes that were played greedily, as a baseline, tell nothing of the policy that samples."""
    sampled = [e for e in episodes if not (config.greedy and e.copy % config.train.group_size == 0)]
    if not sampled:
        return {name: replace(stats, episodes=0) for name, stats in before.items()}
    count = len(sampled)
    means = tuple(sum(column) / count for column in zip(*(e.costs for e in sampled), strict=True))
    return {name: CostStats(means, count, max(sum(e.decisions[name] for e in sampled) / count, 1.0)) for name in before}


def _together(batch: Any) -> tuple[list[Any], int]:
    """Episodes of all workers in the order of their ends, the same for any number of workers; and all their steps."""
    parts = gather((batch.episodes, batch.steps))
    episodes = sorted((e for part, _ in parts for e in part), key=lambda e: (e.step, e.copy))
    return episodes, sum(steps for _, steps in parts)
