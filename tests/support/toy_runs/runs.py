"""Training in this process, without Ray; a module of its own so that other processes can import it."""

from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from marl_ray.config import SPECS, RunConfig, parse_config
from marl_ray.envs.registry import make_env
from marl_ray.json_types import JsonObject
from marl_ray.rollout.protocol import CollectedBatch
from marl_ray.stored_files.json_files import write_json
from marl_ray.training.journal.deliveries import FINISHED_STATUS
from marl_ray.training.journal.delivery import MARKS_FOLDER, Mark
from marl_ray.training.journal.writer import Journal
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.loop.collection import build_collector
from marl_ray.training.run_folder.record import filesystem_of, record_of, write_record
from marl_ray.training.run_folder.run_log import RunLog
from marl_ray.training.single_process import train_alone
from marl_ray.training.team.assembly import build_team
from marl_ray.training.team.members import Team

PLAYING = [name for name, spec in SPECS.items() if not spec.pairs]
"""Algorithms that learn from play."""


def config(*overrides: str) -> RunConfig:
    base = {
        "name": "toy",
        "env": {"id": "toys.envs:countdown"},
        "train": {"total_steps": 192, "env_copies": 4, "horizon": 8},
        "checkpoint": {"every": 2},
        "evaluation": {"episodes": 4},
        "hyper": {"lr": 0.01, "epochs": 2, "minibatches": 2},
    }
    return parse_config(RunConfig, base, overrides)


def of_two(folder: str, algorithms: list[str]) -> dict[str, list[Metrics]]:
    """Train with every algorithm as one of two workers and return rows of metrics by algorithm."""
    return {name: train_alone(short(name, BRIEF, "resources.workers=2"), Path(folder, name)) for name in algorithms}


def train_rows(folder: str, *overrides: str) -> list[Metrics]:
    """Rows of metrics of a run, as one or as one of several workers without Ray.

    Every checkpoint is under `folder`.
    """
    return train_alone(config(*overrides), Path(folder))


def short(algorithm: str, *overrides: str) -> RunConfig:
    """Four iterations of the toy, with everything that the algorithm needs."""
    needed = ["train.group_size=2"] if SPECS[algorithm].needs_whole_episodes else []
    needed += ["hyper.highest_return=6"] if "highest_return" in SPECS[algorithm].read_keys else []
    needed += ["constraints=[{budget: 4}]"] if SPECS[algorithm].needs_costs else []
    return config(f"algorithm={algorithm}", "train.total_steps=96", *needed, *overrides)


def team_of(run: RunConfig, mixed_precision: bool = False) -> Team:
    """The models and learners of a run's only worker, on the CPU; a process group is up."""
    return build_team(run, make_env(run.env, run.constraints), init_device_mesh("cpu", (1,)), mixed_precision)


def batch_of(run: RunConfig, team: Team) -> CollectedBatch:
    """The first batch that a run's only worker plays."""
    return build_collector(run, make_env(run.env, run.constraints), team.agents, 0, 1).collect(team.players(), 0)


BRIEF = "train.total_steps=64"
"""Two iterations of the toy."""
TWO_POLICIES = "team={first: {agents: [a]}, second: {agents: [b]}}"
"""One policy per agent of the toy."""


def mlflow_database(storage: Path) -> None:
    """Make the MLflow database of a run in another process, which would need a second and a half for its migrations."""
    import mlflow

    storage.mkdir(exist_ok=True)
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{storage}/mlflow.db").search_experiments()


def mark_delivered(run: RunConfig, rows: int) -> None:
    """Leave the mark of an MLflow that has all of a finished run with this many rows."""
    filesystem, folder = filesystem_of(run)
    filesystem.create_dir(f"{folder}/{MARKS_FOLDER}")
    write_json(filesystem, f"{folder}/{MARKS_FOLDER}/mlflow.json", asdict(Mark(rows, "0123", FINISHED_STATUS)))


def timeless(rows: list[Metrics]) -> list[Metrics]:
    """Rows without the speeds of this machine."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "steps_per", "tokens_per"))} for row in rows]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights in the bundle of a checkpoint."""
    (path,) = (checkpoint / "bundle").glob("*.safetensors")
    return load_file(path)


def store_run(storage: Path, name: str, *overrides: str, score: float = 1.0, finished: bool = True) -> RunConfig:
    """A run as its driver leaves it, of three evaluations that end with a score."""
    run_config = config(f"name={name}", f"storage={storage}", *overrides)
    record = record_of(run_config)
    record["mlflow_run_id"] = "0123"
    if finished:
        result: JsonObject = {
            "name": name,
            "model": f"models:/{name}/1",
            "bundle": f"{storage}/{name}/bundle",
            "curve": None,
            "tracking_uri": "sqlite:///mlflow.db",
            "run_id": "0123",
            "best_return": score,
            "metrics": {},
            "summary": [],
        }
        record["finished"] = {"total_steps": 192, "result": result, "score": None}
    write_record(run_config, record)
    filesystem, folder = filesystem_of(run_config)
    rows = [
        {"iteration": n, "steps": 96 * n, "eval/return": score * n / 2, "eval/return_low": score * n / 2 - 0.5}
        | {"eval/return_high": score * n / 2 + 0.5}
        for n in range(3)
    ]
    journal = Journal(filesystem, folder)
    for row in rows:
        journal.write_row(row)
    if finished:
        mark_delivered(run_config, len(rows))
    with RunLog(run_config) as log:
        log.open()
        log.write("training")
    return run_config
