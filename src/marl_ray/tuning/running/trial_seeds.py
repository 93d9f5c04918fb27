"""Several seeds of one configuration, trained side by side in one process (or worker group) and judged as one.

The seeds take turns, an iteration each, in the same order on every worker. So a scheduler sees their interquartile mean
at equal progress, and never just the lucky seed. Nothing here needs Ray.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from marl_ray.closing import close_all
from marl_ray.config import RunConfig
from marl_ray.config.sweep import MetricConfig
from marl_ray.errors import MarlRayError, one_line
from marl_ray.evaluation.statistics import iqm
from marl_ray.json_types import JsonObject
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.checkpoints.loading import NONE_READABLE, UnreadableCheckpointError
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.errors import DivergedError
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.loop.run import Run
from marl_ray.training.loop.run_evaluation import UNKNOWN_SCORE
from marl_ray.training.loop.start import RunStart
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.running.trial_files import is_takeover

OBJECTIVES_FILE = "objectives.json"
"""The file of a checkpoint with each seed's last row and recent values of the metrics, whose means the objectives are."""
LATER_METRICS = ("return", "episode_", "within_budget", "score", "env/", "eval/", "best/", "benchmark/")
"""Prefixes of metrics that are missing until training episodes are released, or until the next evaluation."""
EVALUATED_METRICS = ("eval/", "best/", "benchmark/")
"""Prefixes of metrics that rows hold for every seed, beside the metrics that judge the sweep."""
BEST_METRICS = "best/"
"""Beginning of the metrics that a run reports only where an evaluation is better than all before."""


class TrialSeeds:
    """The runs of all seeds. The process group is up, and every worker makes the same calls."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        metrics: Sequence[MetricConfig],
        device: torch.device,
        resume_from: Path | None,
        own_hyper: bool = False,
        pass_sizes: Mapping[str, int] | None = None,
    ):
        """Begin the runs of all seeds, or continue those that `save` wrote to a folder.

        `resume_from` is such a folder; with `own_hyper` it may be of another configuration. `pass_sizes` are those of
        `RunStart`. Raises UnreadableCheckpointError, which names the file, for a checkpoint that is damaged.
        """
        self.metrics = metrics
        self.runs: dict[int, Run] = {}
        saved_state = (
            {} if resume_from is None else run_on_all_workers(lambda: _read_objectives(resume_from / OBJECTIVES_FILE))
        )
        with ExitStack() as unfinished:
            unfinished.callback(self.abandon)  # the first seeds, where a later one cannot be built
            for config in configs:
                places = [] if resume_from is None else [local_stored_folder(resume_from / f"seed-{config.seed}")]
                start = RunStart(places, own_hyper=own_hyper, pass_sizes=pass_sizes or {})
                self.runs[config.seed] = build_run(config, device, start)
            unfinished.pop_all()
        self.iteration: int = saved_state.get("iteration", 0)
        values = saved_state.get("recent", {})
        self.recent = {
            seed: [
                deque(old, metric.window)
                for metric, old in zip(metrics, values.get(str(seed), [()] * len(metrics)), strict=True)
            ]
            for seed in self.runs
        }
        rows = saved_state.get("rows", {})
        self.rows: dict[int, Metrics] = {seed: rows.get(str(seed), {}) for seed in self.runs}
        """Seed -> the metrics of its last iteration, and the score that the weights had then, if it was known."""
        self.checkpoint_every = configs[0].checkpoint.every
        self.has_begun = resume_from is not None
        """True if `begin` was called, here or before `save` wrote the folder that the runs continue from."""
        self.reported: set[str] = set()
        """Names of all metrics reported so far."""

    @property
    def done(self) -> bool:
        """True if the runs of all seeds have played all their steps."""
        return all(run.done for run in self.runs.values())

    @property
    def steps(self) -> int:
        """Environment steps that every seed has played."""
        return int(min(run.state.steps for run in self.runs.values()))

    @property
    def played(self) -> int:
        """Environment steps of all seeds."""
        return int(sum(run.state.steps for run in self.runs.values()))

    def objectives(self) -> list[float] | None:
        """Return each smoothed metric's interquartile mean over the seeds; None while one has not been reported."""
        if not all(values for queues in self.recent.values() for values in queues):
            return None
        columns = zip(*self.recent.values(), strict=True)
        return [iqm(np.array([np.mean(values) for values in column])) for column in columns]

    @property
    def save_due(self) -> bool:
        """True if a checkpoint of the seeds is due."""
        return (
            self.done
            or self.iteration % self.checkpoint_every == 0
            or any(run.evaluation.save_due for run in self.runs.values())
        )

    def begin(self) -> Metrics:
        """Imitate if the runs are to, and evaluate the seeds' first policies.

        Returns the row of step 0, which is empty without evaluations.
        """
        self.has_begun = True
        for run in self.runs.values():
            run.imitate()
        for seed, run in self.runs.items():
            self._run_seed(seed, run.begin)
        if not all(self.rows.values()):
            return {}
        for seed in self.runs:
            self._note_best(seed)
        return self._row()

    def step(self, until: int | None = None) -> Metrics:
        """Run one iteration of every seed that has not ended, and return the metrics.

        The metrics are the interquartile mean of each metric, and each seed's own values of the metrics that judge it.
        A seed that has reached `until` environment steps is evaluated, because the scheduler judges it there.
        """
        for seed, run in self.runs.items():
            if run.done:
                continue
            self._run_seed(seed, partial(run.step, until))
            self._note_values(seed)
        self.iteration += 1
        return self._row()

    def _run_seed(self, seed: int, action: Callable[[], Metrics]) -> None:
        """Run an action of one seed, which returns its metrics, and keep them with the score as the seed's row."""
        try:
            metrics = action()
        except DivergedError as error:
            raise DivergedError(f"seed {seed}: {error}") from error
        score = self.runs[seed].evaluation.score()
        self.rows[seed] = metrics | ({"score": score} if metrics and score > UNKNOWN_SCORE else {})
        self.reported |= set(self.rows[seed])

    def _row(self) -> Metrics:
        """Combine the seeds' last rows in one, as `step` says."""
        shared = set.intersection(*(set(row) for row in self.rows.values()))
        combined: Metrics = {key: iqm(np.array([row[key] for row in self.rows.values()])) for key in sorted(shared)}
        combined |= {"iteration": self.iteration, "steps": self.steps, "played": self.played}
        names = {metric.name for metric in self.metrics}
        for seed, row in self.rows.items():
            shown = {key: value for key, value in row.items() if key in names or key.startswith(EVALUATED_METRICS)}
            combined |= {f"seed-{seed}/{key}": value for key, value in shown.items()}
        objectives = self.objectives()
        if objectives is not None:
            combined |= {f"objective/{m.name}": value for m, value in zip(self.metrics, objectives, strict=True)}
        return combined

    def _note_best(self, seed: int) -> None:
        """Note the values of the first weights, which stay the best ones if no later evaluation is better."""
        row = self.rows[seed]
        for metric, values in zip(self.metrics, self.recent[seed], strict=True):
            if metric.name.startswith(BEST_METRICS) and metric.name in row:
                _note_value(seed, metric, row, values)

    def _note_values(self, seed: int) -> None:
        row = self.rows[seed]
        for metric, values in zip(self.metrics, self.recent[seed], strict=True):
            if metric.name in row:
                _note_value(seed, metric, row, values)
            elif not metric.name.startswith(LATER_METRICS):
                raise never_reported_error(metric.name, self.reported)

    def save(self, folder: Path) -> None:
        """Write a checkpoint of every seed to `seed-SEED`, and the rows and recent values to OBJECTIVES_FILE."""
        for seed, run in self.runs.items():
            run.save(local_stored_folder(folder / f"seed-{seed}"))
        for run in self.runs.values():
            run.saver.wait()
        recent = {seed: [list(values) for values in queues] for seed, queues in self.recent.items()}
        state = {"iteration": self.iteration, "recent": recent, "rows": self.rows}
        if dist.get_rank() == 0:
            (folder / OBJECTIVES_FILE).write_text(json.dumps(state))

    def close(self) -> None:
        """Close the runs of all seeds, all also where one raises an error; every worker calls it."""
        close_all(run.close for run in self.runs.values())

    def abandon(self) -> None:
        """Close the runs of all seeds after an error; raise nothing."""
        for run in self.runs.values():
            run.abandon()

    @contextmanager
    def close_after(self) -> Iterator[None]:
        """Close the runs after the block. An error of the block is raised, whatever closing raises."""
        try:
            yield
        except Exception:
            self.abandon()
            raise
        self.close()


def _note_value(seed: int, metric: MetricConfig, row: Metrics, values: deque[float]) -> None:
    """Add the row's value of a metric to the seed's. Raises DivergedError if it is not finite."""
    value = row[metric.name]
    if not math.isfinite(value):
        raise DivergedError(f"seed {seed}: metric {metric.name!r} is {value} at step {row['steps']:,}")
    values.append(value)


def _read_objectives(path: Path) -> JsonObject:
    try:
        state: JsonObject = json.loads(path.read_text())
        return {key: state[key] for key in ("iteration", "recent", "rows")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UnreadableCheckpointError(f"{path} is damaged: {one_line(error)}") from None


class LoadedSeeds(NamedTuple):
    """The runs of all seeds, and where they come from."""

    seeds: TrialSeeds
    start: str | None
    """Name of the checkpoint; None for new runs."""
    damages: list[str]
    """A line for each newer checkpoint, which is damaged."""


def load_seeds(
    folder: Folder,
    names: Sequence[str],
    configs: Sequence[RunConfig],
    metrics: Sequence[MetricConfig],
    device: torch.device,
    pass_sizes: Mapping[str, int] | None = None,
) -> LoadedSeeds:
    """Begin the runs of all seeds from the first whole checkpoint of a trial, or anew without one.

    `names` are the trial's checkpoints. Every worker calls it with the same. `pass_sizes` are those of `RunStart`.
    Raises UnreadableCheckpointError, which names what is wrong with each, if all are damaged.
    """
    damages: list[str] = []
    for name in names:
        try:
            with folder.local(name) as start:
                seeds = TrialSeeds(configs, metrics, device, start, is_takeover(name), pass_sizes)
                return LoadedSeeds(seeds, name, damages)
        except (UnreadableCheckpointError, FileNotFoundError) as error:
            damages.append(one_line(error).removeprefix(NONE_READABLE))
    if damages:
        raise UnreadableCheckpointError(NONE_READABLE + "; ".join(damages))
    return LoadedSeeds(TrialSeeds(configs, metrics, device, None, pass_sizes=pass_sizes), None, [])


def run_leg(
    seeds: TrialSeeds,
    until: int | None,
    emit: Callable[[Metrics], None],
    keep: Callable[[Path], None],
    after_takeover: bool,
) -> None:
    """Train until every seed has `until` environment steps, or to the end if None.

    `emit` gets each row, `keep` each checkpoint's folder; the last checkpoint is made at the leg's end. `after_takeover`
    makes one first, because the weights were taken over from another trial.
    """

    def checkpoint() -> None:
        with temporary_folder("checkpoint") as folder:
            seeds.save(folder)
            keep(folder)

    if after_takeover:
        checkpoint()
    if not seeds.has_begun:
        row = seeds.begin()
        if row:
            emit(row)
            checkpoint()
    while not seeds.done and (until is None or seeds.steps < until):
        emit(seeds.step(until))
        if seeds.save_due or (until is not None and seeds.steps >= until):
            checkpoint()


def never_reported_error(name: str, reported: Iterable[str]) -> MarlRayError:
    """Return the error for a metric that no row contains; all workers raise it."""
    error = MarlRayError(f"metric {name!r} is never reported; a run reports {', '.join(sorted(reported))}")
    error.shared = True
    return error
