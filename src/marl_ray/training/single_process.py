"""Train in this process alone, without Ray.

Tests, benchmarks, and trials that are too small for workers of their own train so.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from marl_ray.config import RunConfig
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.checkpoints.origin import source_of
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.loop.callbacks import Metrics, RunCallbacks
from marl_ray.training.loop.iterations import CheckpointKeeping, run_worker
from marl_ray.training.loop.start import RunStart


@contextmanager
def process_group() -> Iterator[None]:
    """Hold a process group within the block; if there was none, it has this process alone.

    The group meets through a file, because torch's TCP store listens on all network interfaces.
    """
    if dist.is_initialized():
        yield
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with temporary_folder("group") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def train_alone(
    config: RunConfig,
    keep: Path | None = None,
    resume: Path | None = None,
    emit: Callable[[Metrics], None] | None = None,
) -> list[Metrics]:
    """Train to the end on this CPU, and return the rows of metrics.

    Every checkpoint is kept as `keep/ITERATION`; without `keep` no checkpoint is written. A run with `resume_from`
    begins from that checkpoint, which is a local folder.
    """
    rows: list[Metrics] = []

    def add_row(metrics: Metrics) -> None:
        rows.append(metrics)
        if emit is not None:
            emit(metrics)

    keeping = None if keep is None else CheckpointKeeping(lambda iteration: local_stored_folder(keep / str(iteration)))
    origin = None if resume is not None else source_of(config)
    checkpoint = resume if origin is None else Path(origin)
    start = RunStart([] if checkpoint is None else [local_stored_folder(checkpoint)], origin)
    with process_group():
        run_worker(config, torch.device("cpu"), start, RunCallbacks(add_row), keeping)
    return rows
