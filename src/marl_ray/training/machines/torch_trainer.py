"""The worker group of Ray Train in which a run, or a leg of a trial, trains."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_ray.config import RunConfig
from marl_ray.json_types import JsonObject
from marl_ray.ray_seams import (
    naming_callback,
    observing_callback,
    replace_interrupt_handler,
    skip_dataset_processes,
)
from marl_ray.training.machines.ray_variables import give_up_silent_workers, poll_often
from marl_ray.training.machines.worker_watch import WorkerWatch

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.train.torch import TorchTrainer


def torch_trainer(
    worker: Callable[[JsonObject], Any],
    payload: Mapping[str, object],
    config: RunConfig,
    *,
    label: str,
    name: str,
    storage: str,
    use_gpu: bool,
    exchange_s: float,
    notes: Path,
    begun: "Callable[[ActorHandle[object]], None]",
    callbacks: Sequence[Any] = (),
) -> "TorchTrainer":
    """Return a TorchTrainer that calls `worker(payload)` in each of the workers that `config.resources` asks for.

    Ray Train keeps its own files in the folder `name` of `storage`; `label` is what the dashboard calls the workers. In a
    collective a worker waits `exchange_s` seconds for the others. A WorkerWatch ends the waits for workers, and appends
    its lines to the file `notes`. `begun` gets the actor that controls the workers; they end with it.
    """
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    need = config.resources
    poll_often(need.workers)
    give_up_silent_workers()
    trainer = TorchTrainer(
        worker,
        train_loop_config=dict(payload),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo", timeout_s=math.ceil(exchange_s)),
        scaling_config=ScalingConfig(
            num_workers=need.workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": need.cpus_per_worker} | ({"GPU": 1} if use_gpu else {}),
        ),
        run_config=RayRunConfig(
            name=name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=need.max_failures),
            callbacks=[naming_callback(label), observing_callback(WorkerWatch(notes)), *callbacks],
        ),
    )
    replace_interrupt_handler(trainer, begun)
    skip_dataset_processes(trainer)
    return trainer
