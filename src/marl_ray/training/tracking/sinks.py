"""The sinks besides MLflow, with the same methods: TensorBoard, Weights & Biases, and users' own."""

import math
import netrc
import os
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from typing_extensions import override

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, install_hint, one_line
from marl_ray.extensions import TRACKER

TENSORBOARD = "tensorboard"
"""Folder of a run's event files, in the run's folder."""
MAX_TAG = 64
"""Maximum number of characters of a tag of W&B."""
EVENTS_S = 1
"""Maximum seconds until an event of a sweep's trial is on the disk. tensorboardX's default is 120."""
EVENTS_OF_FILE = 10_000
"""Events after which a new file begins on an object store, which takes whole files alone."""
POSITION_KEYS = ("steps", "timestamp")
"""Keys of a row that say where its metrics belong."""


class Sink(Protocol):
    """Takes rows of metrics, each with its `steps` and the `timestamp` at which it was written, until the run ends.

    Rows come in the order of the run, on a thread of this sink alone, which makes all its calls. A sink that fails, or takes
    long, gets the rows that it has not taken later, or when the run's command is run again. So it gets each row once, unless
    the process is killed between `log` and the note that its rows were taken, or `log` raises after it has written some.
    A sink can do more if it also has the methods of `ResumableSink` or `BundleSink`.
    """

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Write the rows, without values that are not finite.

        Return when the rows will not be lost with the process. Raises if they could not be written; the caller then
        gives them again.
        """

    def end(self, status: str) -> None:
        """Close the sink; `status` is FINISHED, FAILED or KILLED."""


@runtime_checkable
class IdentifiedSink(Sink, Protocol):
    """A sink that writes to a run of its tracker, and begins another where the tracker does not know that run any more."""

    run_id: str
    """Id of the run. A new run gets all rows again."""


@runtime_checkable
class ResumableSink(Sink, Protocol):
    """A sink that knows which rows it has, and so gets no row twice even after its process was killed."""

    def last_iteration(self) -> int | None:
        """Return the `iteration` of the last row that the sink has; None where it has none or cannot tell."""


@runtime_checkable
class BundleSink(Sink, Protocol):
    """A sink that stores the best bundle of a finished run."""

    def keep_bundle(self, folder: Path, model: str, digest: str) -> None:
        """Store the bundle in `folder` with its digest.

        `model` is the bundle's name in MLflow's registry, empty where MLflow has not registered it.
        """


class SinkFactory(Protocol):
    """Makes a sink: a class, or a function."""

    def __call__(self, config: RunConfig, run_id: str) -> Sink:
        """Open the sink of a run.

        `run_id` is the id of the MLflow run, so that a resumed run is the same run in every sink.
        """


@runtime_checkable
class CheckedSinkFactory(SinkFactory, Protocol):
    """Makes a sink, and can tell before anything starts whether the tracker can work."""

    def check(self, config: RunConfig) -> None:
        """Raise MarlRayError if the tracker cannot work."""


def check_sinks(config: RunConfig) -> None:
    """Raise MarlRayError if a tracker of `tracking.also` is none or cannot work."""
    for name in config.tracking.also:
        factory = _load_tracker(name)
        if isinstance(factory, CheckedSinkFactory):
            try:
                factory.check(config)
            except MarlRayError as error:
                raise MarlRayError(f"tracking.also: {error}") from error


def open_sink(config: RunConfig, run_id: str, name: str) -> Sink:
    """Return the sink of this name; `run_id` as in `SinkFactory`. Raises MarlRayError if it cannot be opened."""
    try:
        return _load_tracker(name)(config, run_id)
    except Exception as error:  # each library has its own error types
        raise MarlRayError(f"tracking.also: {name} cannot be used: {one_line(error)}") from error


def _load_tracker(name: str) -> SinkFactory:
    """Return the tracker of this name. Raises MarlRayError if there is none."""
    try:
        make: SinkFactory = TRACKER.load(name)
    except MarlRayError as error:
        raise MarlRayError(f"tracking.also: {error}") from error
    if not callable(make):
        raise MarlRayError(f"tracking.also: {name!r} is not callable, expected what returns a sink")
    return make


class TensorBoard(Sink):
    """Event files under the run's folder."""

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raise MarlRayError for storage that event files cannot be written to."""
        if "://" in config.storage and not config.storage.startswith("s3://"):
            raise MarlRayError(f"tensorboard writes to a local folder or s3://, not to {config.storage!r}")

    def __init__(self, config: RunConfig, run_id: str):
        from tensorboardX.event_file_writer import directory_check

        self.remote = "://" in config.storage
        root = config.storage.rstrip("/") if self.remote else str(Path(config.storage).resolve())
        self.folder = f"{root}/{config.name}/{TENSORBOARD}"
        self.writer: Any = None
        self.written = 0
        directory_check(self.folder)

    @override
    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            for row in rows:
                if self.writer is None:
                    self._open(row)
                for key, value in finite_metrics(row):
                    at = row.get("timestamp", time.time())
                    self.writer.write_event(Event(wall_time=at, step=int(row["steps"]), summary=scalar(key, value)))
                    self.written += 1
            if self.writer is not None:
                self.writer.flush()
        except Exception:
            self.writer = None  # a new file replaces what this one has of the rows
            raise
        if self.remote and self.written > EVENTS_OF_FILE:
            self.end("")

    def _open(self, row: Mapping[str, float]) -> None:
        """Begin a file whose events replace those of other files from this row on.

        The others are, for example, those of a process that was killed before it could note what it had written.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # tensorboardX names a file by the second, and would write over one of the same second.
        self.writer, self.written = EventsWriter(f"{self.folder}/events", f".{time.time_ns()}"), 0
        if "iteration" in row:  # epochs of a warm start all have step 0
            start = SessionLog(status=SessionLog.START)
            self.writer.write_event(Event(wall_time=time.time(), step=int(row["steps"]), session_log=start))

    @override
    def end(self, status: str) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class WeightsAndBiases(ResumableSink, BundleSink):
    """A run in W&B, of the project `tracking.experiment` and in the group of that name.

    Its tags are its algorithms and its environment; the key comes from the environment or wandb's own files.
    """

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raise MarlRayError without the package, or without a key for its server."""
        if find_spec("wandb") is None:
            raise MarlRayError(f"wandb is not installed; {install_hint('wandb')}")
        is_offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
        if not (is_offline or os.environ.get("WANDB_API_KEY") or _logged_in()):
            raise MarlRayError("wandb expects WANDB_API_KEY, `wandb login`, or WANDB_MODE=offline")

    def __init__(self, config: RunConfig, run_id: str):
        import wandb

        self.name = config.name
        tags = dict.fromkeys([*map(config.algorithm_of, config.team), config.env.id])
        folder = None if "://" in config.storage else Path(config.storage).resolve() / config.name
        self.run = wandb.init(
            project=config.tracking.experiment,
            group=config.tracking.experiment,
            tags=[tag[-MAX_TAG:] for tag in tags],
            name=config.name,
            id=run_id,
            resume="allow",
            dir=folder,
            config=config.resolve(),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # wandb's own step counts calls and may only rise.
        self.run.define_metric("*", step_metric="steps")

    @override
    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        for row in rows:
            self.run.log(dict(finite_metrics(row)) | {"steps": int(row["steps"])})

    @override
    def last_iteration(self) -> int | None:
        summary: Any = self.run.summary  # without a server no run is resumed
        value = summary.get("iteration") if self.run.resumed else None
        return None if value is None else int(value)

    @override
    def keep_bundle(self, folder: Path, model: str, digest: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"{self.name}-bundle", type="bundle", metadata={"model": model, "digest": digest})
        artifact.add_dir(str(folder))
        self.run.log_artifact(artifact, aliases=["best"])  # wandb has copied the files when this returns

    @override
    def end(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "FINISHED" else 1)


def _logged_in() -> bool:
    """Return True if `wandb login` has left a key for the server."""
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        return netrc.netrc().authenticators(urlsplit(server).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def finite_metrics(row: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    """Return the finite metrics of a row by name, without its `steps` and its `timestamp`."""
    return ((key, float(value)) for key, value in row.items() if key not in POSITION_KEYS and math.isfinite(value))
