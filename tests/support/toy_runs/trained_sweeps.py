"""Sweeps of a toy environment that really train: their config, their rows and their runs in MLflow."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlflow

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.records import TrialRecord
from marl_ray.tuning.running.driver import SweepResult, check_sweep, run_sweep

TOY: dict[str, Any] = {
    "env": {"id": "toys.envs:countdown"},
    "train": {"total_steps": 192, "env_copies": 4, "horizon": 8},
    "checkpoint": {"every": 2},
    "hyper": {"lr": 0.01, "epochs": 2, "minibatches": 2},
}


def sweep_config(storage: Path, **keys: Any) -> SweepConfig:
    data = {"name": "toy-sweep", "run": TOY, "seeds": 2, "storage": str(storage)} | keys
    return parse_config(SweepConfig, data)


def train_sweep(storage: Path, **keys: Any) -> SweepResult:
    config = sweep_config(storage, **keys)
    check_sweep(config)
    return run_sweep(config)


def rows_of(outcome: SweepResult, number: int) -> list[dict[str, float]]:
    path = Path(outcome.folder, "trials", f"{number:04d}", "rows.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


class FinishedSweep(NamedTuple):
    """A sweep that has ended, and the storage in which it lies alone."""

    storage: Path
    result: SweepResult

    @property
    def trials(self) -> list[TrialRecord]:
        return self.result.records.trials

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(tracking_uri=f"sqlite:///{self.storage}/mlflow.db")

    def trial_runs(self) -> list[Any]:
        """The trials' runs in MLflow, which are children of the sweep's."""
        parent = self.result.records.mlflow_run_id
        return list(self.client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{parent}'"))
