"""The loop of one training worker: iterations, rows and checkpoints until the run is done."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from marl_ray.config import RunConfig
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.callbacks import SILENT_CALLBACKS, Metrics, RunCallbacks
from marl_ray.training.loop.run import Run
from marl_ray.training.loop.start import START_ANEW, RunStart

if TYPE_CHECKING:  # the import takes seconds, and actor-critics do not need it
    from marl_ray.training.team.members import EngineOf


@dataclass(frozen=True)
class CheckpointKeeping:
    """The way in which a run keeps its checkpoints."""

    place_of: Callable[[int], StoredFolder]
    """Iteration -> the folder of its checkpoint."""
    before_checkpoint: Callable[[], None] = lambda: None
    """Called on every worker before a checkpoint is begun."""
    published: Callable[[], None] = lambda: None
    """Called on rank 0, beside the training, when a checkpoint is complete; it raises nothing."""


def run_worker(
    config: RunConfig,
    device: torch.device,
    start: RunStart = START_ANEW,
    callbacks: RunCallbacks = SILENT_CALLBACKS,
    keeping: CheckpointKeeping | None = None,
    engine_of: "EngineOf | None" = None,
) -> Metrics:
    """Train to the end on this worker.

    The process group is up, and every worker makes the same call. If `keeping` is None, no checkpoint is written.
    `engine_of` makes the language models' engines (see `build_team`). Returns the metrics of the last iteration.
    """
    run = build_run(config, device, start, callbacks, engine_of)
    try:
        _train(run, start, callbacks, keeping)
    except Exception:
        run.abandon()  # what is being written is complete before the group ends
        raise
    run.close()
    return run.state.metrics


def _train(run: Run, start: RunStart, callbacks: RunCallbacks, keeping: CheckpointKeeping | None) -> None:
    """Run all iterations that are left, and what comes before the first."""
    if not start.is_continuation:
        _begin(run, start, callbacks, keeping)
    elif run.done and run.state.best_score == -math.inf:  # all bundles are lost
        if run.config.has_evaluations:
            run.evaluation.evaluate()
        _save(run, keeping)
    if not run.done:
        callbacks.phase(f"training from step {run.state.steps:,} to {run.config.train.total_steps:,}")
    while not run.done:
        metrics = run.step()
        if dist.get_rank() == 0:
            if run.save_due and run.transcripts:
                callbacks.transcripts(run.state.iteration, run.transcripts)
            callbacks.row(metrics)
        if run.save_due:
            _save(run, keeping)


def _begin(run: Run, start: RunStart, callbacks: RunCallbacks, keeping: CheckpointKeeping | None) -> None:
    """Do what comes before the first iteration.

    The run imitates if it is to, the weights that training starts from are evaluated, and they are saved where the run
    needs them.
    """
    if not start.checkpoints:
        run.imitate(callbacks)
    if run.config.has_evaluations or run.evaluation.benchmarks:
        callbacks.phase("evaluating before training")
    metrics = run.begin()
    if dist.get_rank() == 0 and metrics:
        callbacks.row(metrics)
    # A run that is done here asked for a warm start alone. A run that begins from another's checkpoint keeps what it
    # begins with, so that it needs the other no more.
    if run.done or start.origin is not None or (run.save_due and metrics):
        _save(run, keeping)


def _save(run: Run, keeping: CheckpointKeeping | None) -> None:
    if keeping is None:
        run.save(None)
        return
    run_on_all_workers(keeping.before_checkpoint)
    run.save(keeping.place_of(run.state.iteration), keeping.published)
