"""All sinks of a run: MLflow, and those of `tracking.also`."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.stored_files.tail import Tail
from marl_ray.stored_files.temporary_files import remove_temporary
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.journal.delivery import MARKS_FOLDER, Delivery, read_mark
from marl_ray.training.journal.mlflow_sink import MlflowSink
from marl_ray.training.run_folder.metrics_file import METRICS_FILE
from marl_ray.training.tracking.sinks import BundleSink, Sink, open_sink

MLFLOW = "mlflow"
"""Name of the sink that every run has."""
FINISHED_STATUS = "FINISHED"
"""Status with which a sink is closed that has every row of a finished run."""
OPEN_S = 120.0
"""Seconds within which a sink of a run that begins must open; those of W&B are 90."""
SAY_AFTER_S = 10.0
"""Seconds after which a line says that a sink has not opened yet."""
END_S = 30.0
"""Seconds that a run waits at its end for all sinks together."""
REGISTERED_S = 10.0
"""Seconds, within END_S, that the other sinks wait for the name of the bundle in MLflow's registry."""


@dataclass(frozen=True)
class BestBundle:
    """The bundle of a finished run."""

    place: str
    """Folder, or URI on remote storage."""
    score: float | None
    """Its score on episodes that chose nothing."""


class Deliveries:
    """The sinks of a run, each on its own thread: none delays another, or the run."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        filesystem: fs.FileSystem,
        folder: str,
        say: Callable[[str], None],
        opened: Mapping[str, Sink],
        tags: Mapping[str, str] | None = None,
        names: list[str] | None = None,
        owns: Callable[[], bool] = lambda: True,
        is_new_run: bool = False,
    ):
        """Deliver to MLflow's run `run_id` and to `tracking.also`, or to `names` of these alone.

        MLflow's run gets `tags`. `opened` are the sinks that are open already; the others are opened on their
        threads. `say` prints a line. Sinks are called while `owns` says that the run has no other owner. For a new
        run, see `check_open`.
        """
        self.say = say
        self.model = ""
        """Name of the bundle in MLflow's registry, when it is registered."""
        self.registered = threading.Event()
        self.deliveries: list[Delivery] = []
        remove_temporary(filesystem, f"{folder}/{MARKS_FOLDER}")
        for name in sink_names(config) if names is None else names:
            make: Callable[[], Sink] = partial(open_sink, config, run_id, name)
            if name == MLFLOW:
                make = partial(MlflowSink, config, run_id, filesystem, folder, tags)
            self.deliveries.append(
                Delivery(name, make, filesystem, folder, say, opened.get(name), owns=owns, is_new_run=is_new_run)
            )

    def check_open(self, wait_s: float) -> None:
        """Wait until all sinks of a run that begins are open.

        Raises MarlRayError for one that cannot be opened, or is not open after `wait_s` seconds: most likely a
        mistake in the config.
        """
        deadline = time.monotonic() + wait_s
        for delivery in self.deliveries:
            remaining_s = max(0.0, deadline - time.monotonic())
            if not delivery.opened_or_failed.wait(min(SAY_AFTER_S, remaining_s)) and remaining_s > SAY_AFTER_S:
                self.say(f"waiting for {delivery.name} to open, for {wait_s:g} s at most")
                delivery.opened_or_failed.wait(max(0.0, deadline - time.monotonic()))
            if delivery.sink is None:
                delivery.stopped.set()
                self.deliveries.remove(delivery)
                failure = f"tracking.also: {delivery.name} cannot be used: it has not opened within {wait_s:g} s"
                raise MarlRayError(delivery.failure or failure)

    def watch(self) -> None:
        """Print a line about each sink that does not return from a call."""
        for delivery in self.deliveries:
            delivery.watch()

    def close(self, status: str, bundle: BestBundle | None = None, wait_s: float = END_S, model: str = "") -> str:
        """Deliver the rest and close the sinks, in `wait_s` seconds; print what is not delivered.

        A finished run has a `bundle`, which is registered unless its name in the registry, `model`, is known. Returns
        that name; empty where there is none.
        """
        self.model = model
        if bundle is None or model or MLFLOW not in (delivery.name for delivery in self.deliveries):
            self.registered.set()
        for delivery in self.deliveries:
            delivery.end(status, (lambda sink: None) if bundle is None else partial(self._store_bundle, bundle))
        deadline = time.monotonic() + wait_s
        for delivery in self.deliveries:
            delivery.thread.join(max(0.0, deadline - time.monotonic()))
        for delivery in self.deliveries:
            delivery.leave()
        self.deliveries = []
        return self.model

    def abandon(self) -> None:
        """Make no more calls of any sink: they are another owner's."""
        for delivery in self.deliveries:
            delivery.stopped.set()
        self.deliveries = []

    def _store_bundle(self, bundle: BestBundle, sink: Sink) -> None:
        from marl_ray.policies.bundles.loading import load_bundle

        if not isinstance(sink, MlflowSink | BundleSink):
            return
        with local_copy(bundle.place) as folder:
            digest = load_bundle(folder).digest
            if isinstance(sink, MlflowSink):
                self.model = sink.register(folder, digest, bundle.score)
                self.registered.set()
            else:
                self.registered.wait(REGISTERED_S)
                sink.keep_bundle(folder, self.model, digest)


def sink_names(config: RunConfig) -> list[str]:
    """Return the names of a run's sinks."""
    return [MLFLOW, *config.tracking.also]


def find_incomplete_sinks(config: RunConfig, filesystem: fs.FileSystem, folder: str) -> list[str]:
    """Return the sinks that have not got all of a finished run. Raises OSError."""
    with contextlib.closing(Tail(filesystem, f"{folder}/{METRICS_FILE}")) as tail:
        rows = tail.count()
    marks = {name: read_mark(filesystem, folder, name) for name in sink_names(config)}
    return [name for name, mark in marks.items() if mark.ended != FINISHED_STATUS or mark.rows < rows]


@contextlib.contextmanager
def local_copy(place: str) -> Iterator[Path]:
    """Yield a folder of this machine with the content of `place`, a folder or a URI."""
    if "://" not in place:
        yield Path(place)
        return
    filesystem, path = fs.FileSystem.from_uri(place)
    with temporary_folder("bundle") as temporary:
        fs.copy_files(path, str(temporary), source_filesystem=filesystem, destination_filesystem=fs.LocalFileSystem())
        yield temporary
