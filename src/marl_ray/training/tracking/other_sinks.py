"""The sinks of a run's metrics besides MLflow, with the same methods: TensorBoard, Weights & Biases, users' own."""

import contextlib
import math
import netrc
import os
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, one_line
from marl_ray.extensions import TRACKER

TENSORBOARD = "tensorboard"
"""Folder of a run's event files, in the run's folder."""
TAG = 64
"""Most characters of a tag of W&B."""
EVENTS_S = 1
"""Most seconds until an event is on the disk. tensorboardX's default is 120, and its `flush` skips queued events."""


class Sink(Protocol):
    """Takes rows of metrics, each with its `steps`, until the run ends.

    It may have a function `keep_bundle(folder, model, digest)`, which stores the best bundle when a run is finished.
    """

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Write the rows, without values that are not finite. Raises if they could not be written; the caller then
        gives them again."""

    def end(self, status: str) -> None:
        """Close the sink; `status` is FINISHED, FAILED or KILLED."""


class TrackerType(Protocol):
    """Makes a sink: a class, or a function. It may have a function `check(config)`, which raises MarlRayError before
    anything starts if the tracker cannot work."""

    def __call__(self, config: RunConfig, run_id: str) -> Sink:
        """Open the sink of a run. `run_id` is the id of the MLflow run, so that a resumed run is the same run in every
        sink."""


def check_sinks(config: RunConfig) -> None:
    """Raise MarlRayError if a tracker of `tracking.also` is none or cannot work."""
    for name in config.tracking.also:
        check = getattr(_tracker(name), "check", None)
        if check is not None:
            try:
                check(config)
            except MarlRayError as error:
                raise MarlRayError(f"tracking.also: {error}") from error


def open_sinks(config: RunConfig, run_id: str) -> dict[str, Sink]:
    """The sinks that the config asks for, by name; `run_id` as in `TrackerType`.

    Raises MarlRayError if one cannot be opened.
    """
    made: dict[str, Sink] = {}
    for name in config.tracking.also:
        try:
            made[name] = _tracker(name)(config, run_id)
        except Exception as error:  # each library has its own error types
            for sink in made.values():
                with contextlib.suppress(Exception):
                    sink.end("FAILED")
            raise MarlRayError(f"tracking.also: {name} cannot be used: {one_line(error)}") from error
    return made


def _tracker(name: str) -> TrackerType:
    try:
        make: TrackerType = TRACKER.load(name)
    except MarlRayError as error:
        raise MarlRayError(f"tracking.also: {error}") from error
    if not callable(make):
        raise MarlRayError(f"tracking.also: {name!r} is not callable, expected what returns a sink")
    return make


class TensorBoard:
    """Event files under the run's folder."""

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raise MarlRayError for storage that event files cannot be written to."""
        if "://" in config.storage and not config.storage.startswith("s3://"):
            raise MarlRayError(f"tensorboard writes to a local folder or s3://, not to {config.storage!r}")

    def __init__(self, config: RunConfig, run_id: str):
        from tensorboardX import SummaryWriter

        remote = "://" in config.storage
        root = config.storage.rstrip("/") if remote else str(Path(config.storage).resolve())
        # tensorboardX names a file by the second, so a run that is resumed within a second would write over its first
        # file.
        suffix = f".{time.time_ns()}"
        self.writer = SummaryWriter(f"{root}/{config.name}/{TENSORBOARD}", flush_secs=EVENTS_S, filename_suffix=suffix)

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        for row in rows:
            for key, value in numbers(row):
                self.writer.add_scalar(key, value, int(row["steps"]))

    def end(self, status: str) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of the project `tracking.experiment`, in the group of that name, with its algorithms and its environment as
    tags; the key comes from the environment or wandb's own files."""

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raise MarlRayError without the package, or without a key for its server."""
        if find_spec("wandb") is None:
            raise MarlRayError("wandb is not installed; pip install 'marl-ray[wandb]'")
        away = os.environ.get("WANDB_MODE") in ("offline", "disabled")
        if not (away or os.environ.get("WANDB_API_KEY") or _logged_in()):
            raise MarlRayError("wandb expects WANDB_API_KEY, `wandb login`, or WANDB_MODE=offline")

    def __init__(self, config: RunConfig, run_id: str):
        import wandb

        self.name = config.name
        tags = dict.fromkeys([*map(config.algorithm_of, config.team), config.env.id])
        folder = None if "://" in config.storage else Path(config.storage).resolve() / config.name
        self.run = wandb.init(
            project=config.tracking.experiment,
            group=config.tracking.experiment,
            tags=[tag[-TAG:] for tag in tags],
            name=config.name,
            id=run_id,
            resume="allow",
            dir=folder,
            config=config.resolved(),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # wandb's own step may only rise, but a restarted run plays and reports some steps again.
        self.run.define_metric("*", step_metric="steps")

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        for row in rows:
            self.run.log(dict(numbers(row)) | {"steps": int(row["steps"])})

    def keep_bundle(self, folder: Path, model: str, digest: str) -> None:
        """Store a bundle as an artifact with the alias `best`; wandb copies its files before this returns."""
        import wandb

        artifact = wandb.Artifact(f"{self.name}-bundle", type="bundle", metadata={"model": model, "digest": digest})
        artifact.add_dir(str(folder))
        self.run.log_artifact(artifact, aliases=["best"])

    def end(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "FINISHED" else 1)


def _logged_in() -> bool:
    """True if `wandb login` has left a key for the server."""
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        return netrc.netrc().authenticators(urlsplit(server).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def numbers(row: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    """The finite metrics of a row by name, without `steps`."""
    return ((key, float(value)) for key, value in row.items() if key != "steps" and math.isfinite(value))
