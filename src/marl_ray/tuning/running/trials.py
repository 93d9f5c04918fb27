"""A trial on Ray Tune: one leg of one configuration, with all its seeds.

One worker on a CPU trains inside the trial's own process. More workers, or a GPU, are a Ray Train worker group that
this process drives (it needs no CPU itself). Either way the leg begins from the trial's folder and writes every
checkpoint to it, so a leg whose process is lost continues from its last checkpoint.
"""

import json
import os
import queue as queues
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from marl_ray.config import RunConfig
from marl_ray.config.sweep import MetricConfig
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.errors import MarlRayError, named
from marl_ray.ray_seams import named_workers, poll_often, without_datasets
from marl_ray.training.run_folder.record import work_in
from marl_ray.training.tracking.rows_to_driver import metrics_queue
from marl_ray.tuning.folder import Folder, trial_folder
from marl_ray.tuning.running.seeds_as_one import SeedsAsOne, never_reported, run_leg

REPORT_S = 0.5
"""Least number of seconds between two reports to Tune: each is a round trip to the sweep's driver."""
QUEUE_GET_S = 0.5
GROUP_START_S = 300
"""Seconds that a worker group may take to start."""
STATE = "trial.json"
ERROR = "error.txt"


@dataclass(frozen=True)
class Leg:
    """A part of a trial, from a checkpoint (or the beginning) to the next decision point."""

    sweep: str
    storage: str
    number: int
    leg: int
    """Number of the leg within its trial, from 1."""
    configs: list[dict[str, Any]]
    """The run config of each seed."""
    metrics: list[dict[str, Any]]
    until: int | None
    """Environment steps at which the leg ends; None for the end of training."""
    nested: bool
    """True if the leg trains on a worker group of its own."""
    use_gpu: bool
    cpus: float
    """CPUs per worker."""
    tracking_uri: str
    """Address of the MLflow server in which bundles are looked up."""
    folder: str = ""
    """Working folder of the sweep's driver; relative paths in the configs count from it."""

    @property
    def name(self) -> str:
        return f"{self.number:04d}-{self.leg}"


@dataclass
class TrialState:
    """Progress of a trial, stored as `trial.json`."""

    checkpoints: list[str] = field(default_factory=list)
    """Folders of the checkpoints, the newest last."""
    attempts: int = 0
    """Number of processes that have worked on the trial; each names its folder by it."""
    steps: int = 0
    """Environment steps that every seed had played at the newest checkpoint."""
    played: int = 0
    """Environment steps that this trial has played, all seeds together."""
    seconds: float = 0.0
    """Wall time in seconds."""
    exploits: list[dict[str, Any]] = field(default_factory=list)
    """One mapping per takeover of another trial, with `at`, `donor` and `values`."""
    foreign: bool = False
    """True if the newest checkpoint was written with other hyper-parameters."""


def read_state(folder: Folder) -> TrialState:
    data = folder.read_json(STATE)
    return TrialState(**data) if data else TrialState()


def write_state(folder: Folder, state: TrialState) -> None:
    folder.write_json(STATE, asdict(state))


def trial(config: dict[str, Any]) -> None:
    """The function that Tune runs. Errors become results; Tune retries only crashed processes."""
    import ray.tune

    leg = Leg(**config["leg"])
    sender = _Sender(ray.tune.report)
    try:
        result = run(leg, sender.add)
    except Exception as error:  # whatever a part of the trial raises, the other trials continue
        result = {"status": "failed", "error": named(error) + _traceback_file(leg, error)}
    sender.flush({"leg_result": result | _counts(leg)})


def named_trial(sweep: str) -> Callable[[dict[str, Any]], None]:
    """`trial` under the sweep's name, which the Ray dashboard shows. A process serves one trial after another, so a
    trial's own name would soon be wrong."""

    def named(config: dict[str, Any]) -> None:
        trial(config)

    named.__name__ = f"{sweep}-trial"
    return named


def run(leg: Leg, emit: Callable[[dict[str, float]], None]) -> dict[str, Any]:
    """Run a leg and return its result."""
    os.environ[TRACKING_URI] = leg.tracking_uri
    work_in(leg.folder)
    folder = trial_folder(leg.storage, leg.sweep, leg.number)
    configs = [RunConfig.model_validate(data) for data in leg.configs]
    writer = _TrialWriter(folder, configs[0].checkpoint.newest, [config.seed for config in configs], emit)
    ended = (_nested if leg.nested else _in_process)(leg, configs, writer)
    objectives, done = ended["objectives"], ended["done"]
    if objectives is None and done:
        metric = next(m["name"] for m in leg.metrics if not any(m["name"] in row for row in writer.rows))
        raise never_reported(metric, {key for row in writer.rows for key in row})
    return {"status": "finished" if done else "waiting", "error": "", "objectives": objectives}


class _TrialWriter:
    """Writes the rows, checkpoints, bundles and times of a trial's process to the trial's folder."""

    def __init__(self, folder: Folder, keep: int, seeds: list[int], emit: Callable[[dict[str, float]], None]):
        self.folder, self.keep, self.seeds, self.emit = folder, keep, seeds, emit
        self.state = read_state(folder)
        self.state.attempts += 1
        write_state(folder, self.state)
        self.place = f"attempt-{self.state.attempts}"
        """Folder that this process alone writes to: a predecessor may still be writing to its own."""
        self.rows = folder.read_rows()
        self.origin: int | None = None
        self.before, self.since = self.state.seconds, time.monotonic()

    @property
    def start(self) -> str | None:
        return self.state.checkpoints[-1] if self.state.checkpoints else None

    def begun(self, played: int) -> None:
        if self.origin is None:
            self.origin = played - self.state.played

    def row(self, row: dict[str, float]) -> None:
        """Add a row; it replaces rows from its iteration on, which a restart has played again."""
        exploits = len(self.state.exploits)
        row = row | {"played": row["played"] - (self.origin or 0), "exploits": exploits}
        while self.rows and self.rows[-1]["iteration"] >= row["iteration"] and self.rows[-1]["exploits"] == exploits:
            self.rows.pop()
        self.rows.append(row)
        self.emit(row)

    def kept(self, name: str, steps: int, played: int) -> None:
        """Record a checkpoint that lies in the folder under `name`."""
        for seed in self.seeds:  # the newest bundle of a seed is its best; keep it beyond its checkpoint
            if self.folder.exists(f"{name}/seed-{seed}/bundle"):
                self.folder.copy_from(self.folder, f"{name}/seed-{seed}/bundle", f"bundles/seed-{seed}")
        checkpoints = [*self.state.checkpoints, name]
        self.state.checkpoints, self.state.foreign = checkpoints[-self.keep :], False
        self.state.steps, self.state.played = steps, played - (self.origin or 0)
        self.state.seconds = self.before + time.monotonic() - self.since
        self.folder.write_rows(self.rows)
        write_state(self.folder, self.state)
        for old in checkpoints[: -self.keep]:
            self.folder.remove(old)


def _in_process(leg: Leg, configs: list[RunConfig], writer: _TrialWriter) -> dict[str, Any]:
    """Run the leg in this process."""
    from marl_ray.training.single_process import process_group

    def keep(local: Path) -> None:
        name = f"{writer.place}/checkpoint-{seeds.iteration:06d}"
        writer.folder.upload(local, name)
        writer.kept(name, seeds.steps, seeds.played)

    metrics = [MetricConfig.model_validate(metric) for metric in leg.metrics]
    with process_group(), writer.folder.local(writer.start) as start:
        seeds = SeedsAsOne(configs, metrics, torch.device("cpu"), start, writer.state.foreign)
        writer.begun(seeds.played)
        run_leg(seeds, leg.until, writer.row, keep, writer.state.foreign)
        seeds.close()
        return {"objectives": seeds.objectives(), "done": seeds.done}


def _nested(leg: Leg, configs: list[RunConfig], writer: _TrialWriter) -> dict[str, Any]:
    """Run the leg on a worker group of its own. Raises MarlRayError with the cause of a failure."""
    from ray.train import FailureConfig, ScalingConfig, TrainingFailedError
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Empty

    from marl_ray.training.driver import cause

    # Other trials may occupy the workers' resources for longer than Ray Train waits by itself.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_S))
    poll_often()
    need = configs[0].resources
    name = f"{leg.sweep}-{leg.number:04d}"
    queue = metrics_queue(name)
    payload = asdict(leg) | {"queue": queue, "start": writer.start, "foreign": writer.state.foreign}
    trainer = TorchTrainer(
        worker,
        train_loop_config=payload,
        torch_config=TorchConfig(backend="nccl" if leg.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=need.workers,
            use_gpu=leg.use_gpu,
            resources_per_worker={"CPU": need.cpus_per_worker} | ({"GPU": 1} if leg.use_gpu else {}),
        ),
        run_config=RayRunConfig(
            name=writer.place,
            storage_path=writer.folder.uri,
            failure_config=FailureConfig(max_failures=need.max_failures),
            callbacks=[named_workers(name)],
        ),
    )
    without_datasets(trainer)
    ended: list[Any] = []

    def fit() -> None:
        try:
            result: Any = trainer.fit()
            ended.append(result.return_value)
        except BaseException as error:
            ended.append(error)

    # Reports to Tune must come from this thread, while the workers train.
    thread = threading.Thread(target=fit, name="train", daemon=True)
    thread.start()
    try:
        while True:
            over = not thread.is_alive()
            try:
                message = queue.get(timeout=QUEUE_GET_S)
            except (Empty, queues.Empty):
                if over:
                    break
                continue
            _take_message(writer, message)
    finally:
        queue.shutdown(force=True)
    result = ended[0]
    if isinstance(result, TrainingFailedError):
        raise MarlRayError(cause(result)) from result
    if isinstance(result, BaseException):
        raise result
    if "failed" in result:
        raise MarlRayError(result["failed"])
    return dict(result)


def _take_message(writer: _TrialWriter, message: dict[str, Any]) -> None:
    if "begun" in message:
        writer.begun(message["begun"])
    elif "kept" in message:
        writer.kept(f"{writer.place}/{message['kept']}", message["steps"], message["played"])
    else:
        writer.row(message)


def worker(payload: dict[Any, Any]) -> Any:
    """The function that Ray Train starts in every worker of a nested trial."""
    import ray.train
    import ray.train.torch

    from marl_ray.training.collectives import gather, world

    leg = Leg(**{key: payload[key] for key in Leg.__dataclass_fields__})
    os.environ[TRACKING_URI] = leg.tracking_uri
    work_in(leg.folder)
    queue, (rank, _) = payload["queue"], world()
    folder = trial_folder(leg.storage, leg.sweep, leg.number)
    configs = [RunConfig.model_validate(data) for data in leg.configs]
    metrics = [MetricConfig.model_validate(metric) for metric in leg.metrics]

    def send(message: dict[str, Any]) -> None:
        if rank == 0:
            queue.put(message)

    def keep(local: Path) -> None:
        name = f"checkpoint-{seeds.iteration:06d}-{time.time_ns()}"  # rank 0's name is used by all workers
        ray.train.report(
            {"iteration": seeds.iteration},
            checkpoint=ray.train.Checkpoint.from_directory(local),
            checkpoint_dir_name=name,
        )
        gather(None)  # wait until every worker has written its part
        send({"kept": name, "steps": seeds.steps, "played": seeds.played})

    latest = ray.train.get_checkpoint()  # the checkpoint of this leg, if a worker has died
    foreign = payload["foreign"] and latest is None
    try:
        with latest.as_directory() if latest else folder.local(payload["start"]) as start:
            seeds = SeedsAsOne(configs, metrics, ray.train.torch.get_device(), Path(start) if start else None, foreign)
        send({"begun": seeds.played})
        run_leg(seeds, leg.until, send, keep, foreign)
        seeds.close()
    except MarlRayError as error:  # all workers raise it together, and would raise it again after every restart
        return {"failed": str(error)}
    return {"objectives": seeds.objectives(), "done": seeds.done}


def _traceback_file(leg: Leg, error: Exception) -> str:
    """Write the traceback to the trial's folder and return where it is, in words; empty for the product's own errors,
    which say all there is to say."""
    if isinstance(error, MarlRayError) and error.__cause__ is None:
        return ""
    try:
        trial_folder(leg.storage, leg.sweep, leg.number).write(
            ERROR, "".join(traceback.format_exception(error)).encode()
        )
    except (OSError, MarlRayError):
        return ""
    return f" (traceback in trials/{leg.number:04d}/{ERROR})"


class _Sender:
    """Collects rows and reports several at once to Tune."""

    def __init__(self, report: Callable[[dict[str, Any]], None]):
        self.report, self.sent = report, time.monotonic()
        self.rows: list[dict[str, float]] = []

    def add(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        if time.monotonic() - self.sent > REPORT_S:
            self.flush()

    def flush(self, more: dict[str, Any] | None = None) -> None:
        if self.rows or more:
            last = self.rows[-1] if self.rows else {}
            # Values travel as text: Tune flattens nested results, and its loggers take a list for numbers.
            packed = {key: json.dumps(value) for key, value in ({"rows": self.rows} | (more or {})).items()}
            self.report(last | packed)
            self.rows, self.sent = [], time.monotonic()


def _counts(leg: Leg) -> dict[str, Any]:
    """Progress of the trial as its folder records it; empty if it cannot be read."""
    try:
        state = read_state(trial_folder(leg.storage, leg.sweep, leg.number))
    except (OSError, ValueError, MarlRayError):
        return {}
    return {"steps": state.steps, "played": state.played, "seconds": state.seconds}
