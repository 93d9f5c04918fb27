"""The worker group that runs and trials train in."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from marl_ray.config import RunConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.training.machines.torch_trainer import torch_trainer
from marl_ray.training.machines.worker_watch import MAX_FAILED_STARTS

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer


class Fields:
    """Stands for those of Ray's objects that a callback reads."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


def trainer_of_three(folder: Path) -> "TorchTrainer":
    resources = {"workers": 3, "cpus_per_worker": 0.5, "max_failures": 2}
    keys = {
        "name": "toy",
        "env": {"id": "gymnasium.CartPole-v1"},
        "algorithm": "ppo",
        "train": {"total_steps": 8, "env_copies": 3},
    }
    config = parse_config(RunConfig, keys | {"resources": resources, "storage": str(folder)})
    begun: list[object] = []
    return torch_trainer(
        lambda payload: None,
        {"own": 1},
        config,
        label="toy",
        name="toy",
        storage=str(folder),
        use_gpu=False,
        exchange_s=299.5,
        notes=folder / "notes",
        begun=begun.append,
    )


def test_a_worker_group_has_what_the_run_asks_for_and_waits_no_longer_than_it_is_told(tmp_path):
    trainer = trainer_of_three(tmp_path)
    assert trainer.scaling_config.num_workers == 3
    assert trainer.scaling_config.resources_per_worker == {"CPU": 0.5}
    assert trainer.run_config.failure_config.max_failures == 2
    assert trainer.backend_config.timeout_s == 300 and trainer.backend_config.backend == "gloo"  # type: ignore[attr-defined]  # Ray's


def test_workers_that_die_while_they_start_are_started_five_times_and_each_time_is_said(tmp_path):
    """Ray Train itself starts them again without end."""
    callbacks = trainer_of_three(tmp_path).run_config.callbacks or []
    context = Fields(num_workers=3, resources_per_worker={"CPU": 0.5})
    failed = Fields(training_failed_error=Fields(controller_failure=WorkerGroupStartupFailedError("no room")))

    def start() -> None:
        for callback in callbacks:
            if isinstance(callback, WorkerGroupCallback):
                callback.before_worker_group_start(context)
            if isinstance(callback, ControllerCallback):
                callback.after_controller_state_update(Fields(), failed)

    for _ in range(MAX_FAILED_STARTS):
        start()
    with pytest.raises(
        MarlRayError, match=r"^its workers could not be started 5 times: WorkerGroupStartupFailedError: no room$"
    ):
        start()
    for callback in callbacks:
        if isinstance(callback, WorkerGroupCallback):
            callback.after_worker_group_start(Fields(get_workers=list))  # ends the wait
    lines = (tmp_path / "notes").read_text().splitlines()
    assert lines[:2] == [
        f"its workers could not be started ({number} of 5 times): WorkerGroupStartupFailedError: no room"
        for number in (1, 2)
    ]
    assert len(lines) == MAX_FAILED_STARTS
