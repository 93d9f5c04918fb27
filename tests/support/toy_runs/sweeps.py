"""Folders of sweeps without any training: records and rows as a sweep's driver and trials write them."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from toys.envs import Countdown

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.evaluation.statistics import iqm
from marl_ray.tuning.folder import ROWS_FILE, Folder, trial_folder
from marl_ray.tuning.records import SweepRecords, TrialRecord, identity_of, ranked_trials
from marl_ray.tuning.records_file import RecordsFile

TOTAL = 50_000
"""Environment steps of a trial."""
RUN = {"env": {"id": "toys.envs:countdown"}, "train": {"total_steps": TOTAL}}
SPACE = {
    "algorithm": {"choice": ["ippo", "mappo", "grpo", "rloo"]},
    "train.group_size": {"choice": [4, 8], "when": {"algorithm": ["grpo", "rloo"]}},
    "hyper.lr": {"loguniform": [1e-4, 1e-2]},
    "hyper.entropy_coef": {"uniform": [0.0, 0.05]},
}
NAN = "seed 1: policy 'shared', iteration 7, epoch 2: the gradient is not finite"
LOST = "its process was lost again and again"
REFUSED = "resources.workers=8 on cuda needs 8 GPUs, but this cluster can never have more than 4"


def write_rows(folder: Folder, rows: list[dict[str, float]]) -> None:
    folder.write(ROWS_FILE, "".join(json.dumps(row) + "\n" for row in rows).encode())


class ToySweep:
    """A sweep whose trials are added by hand."""

    def __init__(self, storage: Path, name: str = "toy", **keys: Any):
        data = {"name": name, "run": RUN, "space": SPACE, "search": "random", "budget": {"trials": 40}, "seeds": 5}
        self.config = parse_config(SweepConfig, data | {"storage": str(storage)} | keys)
        self.records = SweepRecords(name, self.config.resolve(), identity_of(self.config), seconds=754.0)
        self.folder = Folder(str(storage), name)
        self.noise = np.random.default_rng(0)

    def add(self, values: dict[str, Any], status: str = "finished", error: str = "", **keys: Any) -> TrialRecord:
        """A trial without rows."""
        state = status if status in ("running", "waiting") else "ended"
        record = TrialRecord(
            len(self.records.trials), values, state, "" if state == status else status, error, cpus=2.0
        )
        if status != "refused":
            name = f"{self.config.name}-{record.number:04d}-seed"
            configs = [self.config.run_config(values, f"{name}-{seed}", seed) for seed in self.config.seeds]
            record.configs = [config.as_given() for config in configs]
            record.seconds = 93.0
        for key, value in keys.items():
            setattr(record, key, value)
        self.records.trials.append(record)
        return record

    def train(self, record: TrialRecord, level: float, steps: int = TOTAL, every: int = 500) -> TrialRecord:
        """Rows of a trial that climbs to about this level."""
        seeds, at = self.config.seeds, np.arange(every, steps + 1, every)
        rise = 1 - np.exp(-at / 12_000)
        curves = level * rise * (1 + self.noise.normal(0, 0.12, (len(seeds), 1)))
        curves += self.noise.normal(0, 0.03, curves.shape)
        rows: list[dict[str, float]] = []
        for k, step in enumerate(at):
            row: dict[str, float] = {
                "iteration": k + 1,
                "steps": int(step),
                "played": int(step * len(seeds)),
                "exploits": 0,
            }
            for metric in self.config.metric:
                sign = 1 if metric.name.endswith("return") else 0.3
                row |= {f"seed-{s}/{metric.name}": float(sign * curves[n, k]) for n, s in enumerate(seeds)}
            rows.append(row)
        write_rows(trial_folder(self.config.storage, self.config.name, record.number), rows)
        record.steps, record.played = int(at[-1]), int(at[-1]) * len(seeds)
        record.objectives = [
            iqm(np.array([np.mean([row[f"seed-{s}/{m.name}"] for row in rows[-m.window :]]) for s in seeds]))
            for m in self.config.metric
        ]
        return record

    def end(self, status: str = "finished", error: str = "", model: str = "models:/toy/1") -> Folder:
        """Choose the winner and write the records."""
        self.records.status, self.records.error = status, error
        ranking = ranked_trials(self.records, self.config.metric)
        if ranking:
            self.records.winner, self.records.winner_seed = ranking[0].number, self.config.seeds[0]
            self.records.winner_model = model
        RecordsFile(self.folder, self.records).save_all()
        return self.folder


def finished_sweep(storage: Path, trials: int = 14, name: str = "toy", **keys: Any) -> ToySweep:
    """A sweep that shows all there is: finished, stopped, diverged, raised, lost and refused trials."""
    sweep = ToySweep(storage, name, scheduler={"kind": "asha", "grace": 10_000, "reduction": 3}, **keys)
    rng = np.random.default_rng(1)
    for k in range(trials):
        values: dict[str, Any] = {"algorithm": ["ippo", "mappo", "grpo", "rloo"][k % 4]}
        if values["algorithm"] in ("grpo", "rloo"):
            values["train.group_size"] = [4, 8][k // 4 % 2]
        values |= {"hyper.lr": float(10 ** rng.uniform(-4, -2)), "hyper.entropy_coef": float(rng.uniform(0, 0.05))}
        level = 2 - 0.8 * abs(np.log10(values["hyper.lr"]) + 2.6) + 0.2 * (k % 4)
        status, steps = ("finished", TOTAL) if k % 3 == 0 else ("stopped", 10_000)
        record = sweep.train(sweep.add(values, status), level, steps)
        assert record.objectives is not None
        record.scores = {10_000: record.objectives[0] if status == "stopped" else level * 0.6 + 5}
    plain = {"algorithm": "ippo", "hyper.lr": 0.009, "hyper.entropy_coef": 0.01}
    diverged = sweep.train(sweep.add(plain, "failed", NAN), 0.9, 6_000)
    diverged.objectives = None
    sweep.add(plain | {"hyper.lr": 0.001}, "failed", "ValueError: <b>agent_0</b> took action 7 of 5")
    sweep.add(plain | {"hyper.lr": 0.002}, "lost", LOST)
    sweep.add(plain | {"hyper.lr": 0.003}, "refused", REFUSED)
    return sweep


class Doomed(Countdown):
    """Kills its process at every first step."""

    def step(self, actions: dict[str, int]) -> Any:
        os._exit(1)


def doomed(**kwargs: Any) -> Doomed:
    """Make the environment of `env.id: toy_runs.sweeps:doomed`."""
    return Doomed(**kwargs)


class Slow(Countdown):
    """Takes `seconds` for a step."""

    def __init__(self, seconds: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.seconds = seconds

    def step(self, actions: dict[str, int]) -> Any:
        time.sleep(self.seconds)
        return super().step(actions)


def slow(**kwargs: Any) -> Slow:
    """Make the environment of `env.id: toy_runs.sweeps:slow`."""
    return Slow(**kwargs)
