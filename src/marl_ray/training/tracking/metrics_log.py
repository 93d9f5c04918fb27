"""Show the rows that workers send, store their metrics, and log them to MLflow and the other sinks."""

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from marl_ray.config import RunConfig
from marl_ray.errors import one_line
from marl_ray.training.tracking.mlflow_run import Tracker
from marl_ray.training.tracking.other_sinks import Sink
from marl_ray.training.tracking.progress_bar import ProgressBar
from marl_ray.training.tracking.rows_to_driver import FAILURE, PHASE, PROBLEM, STARTS_AFTER, TRANSCRIPTS

QUEUE_GET_S = 1.0
DRAIN_S = 30.0
"""Seconds that the driver waits, after the workers have ended, for the last metrics to be logged."""


class Console(Protocol):
    """Takes what is shown to people."""

    def phase(self, text: str) -> None:
        """Show that a part of the run begins."""

    def say(self, text: str) -> None:
        """Print a line, and keep it."""

    def write(self, *texts: str) -> None:
        """Keep texts without printing them."""


class MetricsLog:
    """Reads the queue on a thread of its own until it is closed. A second thread serves the trackers: one that does not
    answer delays neither the file of metrics nor the progress bar."""

    def __init__(
        self, config: RunConfig, queue: Any, tracker: Tracker, stored: Sink, sinks: Mapping[str, Sink], console: Console
    ):
        self.config, self.queue, self.tracker, self.console = config, queue, tracker, console
        self.stored, self.sinks = stored, sinks
        self.first: Mapping[str, Sink] = {"metrics.jsonl": stored}
        """The sinks that get rows before the trackers do."""
        self.unlogged: dict[str, list[dict[str, Any]]] = {name: [] for name in (*self.first, *sinks)}
        self.problems: dict[str, str] = {}
        self.failure: str | None = None
        """The cause for which the last group of workers has ended, until the next group begins."""
        self.waiting: SimpleQueue[list[dict[str, Any]] | None] = SimpleQueue()
        self.done = threading.Event()
        self.threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("metrics", self._drain), ("trackers", self._track))
        ]
        for thread in self.threads:
            thread.start()

    def close(self, wait_s: float = DRAIN_S) -> None:
        """Log the rows that have arrived, and print which could not be logged; a second call does nothing."""
        if self.done.is_set():
            return
        self.done.set()
        deadline = time.monotonic() + wait_s
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for thread, sinks in zip(self.threads, (self.first, self.sinks), strict=True):
            if not thread.is_alive() and any(self.unlogged[name] for name in sinks):
                self._log(sinks)
        with contextlib.suppress(Empty):
            while True:  # rows that wait while the trackers' thread is busy with earlier ones
                waiting = [row for row in self.waiting.get_nowait() or () if TRANSCRIPTS not in row]
                for name in self.sinks:
                    self.unlogged[name] += waiting
        for name, rows in self.unlogged.items():
            if rows:
                what = f"metrics of {len(rows)} iterations are not in {name}"
                problem = self.problems.get(name, f"it did not take them within {wait_s:g} s")
                self.console.say(f"{what}: {problem}")

    def _drain(self) -> None:
        from ray.exceptions import RayError
        from ray.util.queue import Empty as NoRows

        try:
            with ProgressBar(self.config, self.console.write) as progress:
                while True:
                    try:
                        rows = [self.queue.get(timeout=QUEUE_GET_S)]
                        rows += self.queue.get_nowait_batch(self.queue.qsize())
                    except NoRows:
                        if self.done.is_set():
                            return
                        continue
                    except RayError:
                        return  # the cluster is going down, and the run's error gives the reason
                    self._take(rows, progress)
        finally:
            self.waiting.put(None)

    def _take(self, rows: Sequence[dict[str, Any]], progress: ProgressBar) -> None:
        """Show rows, store them, and hand them to the trackers' thread."""
        for row in rows:
            if PHASE in row:
                self.console.phase(row[PHASE])
            elif PROBLEM in row:
                self.console.write(row[PROBLEM])
            elif FAILURE in row:
                self.failure = row[FAILURE]
            elif STARTS_AFTER in row and self.failure is not None:
                last = row[STARTS_AFTER]
                begin = "the beginning" if last is None else f"the checkpoint of iteration {last:,}"
                self.console.say(f"its workers start again from {begin}: {self.failure}")
                self.failure = None
        metrics = [row for row in rows if not {FAILURE, PHASE, PROBLEM, TRANSCRIPTS} & row.keys()]
        self._log(self.first, metrics)
        self.waiting.put([row for row in rows if not {FAILURE, PHASE, PROBLEM, STARTS_AFTER} & row.keys()])
        shown = [row for row in metrics if STARTS_AFTER not in row]
        if not shown:
            return
        if "iteration" in shown[-1]:
            progress.show(shown[-1])
            return
        line = _warm_start_line(shown[-1])
        self.console.write(line)
        if self.config.tracking.progress:
            print(f"{self.config.name}: {line}", flush=True)

    def _track(self) -> None:
        while (rows := self.waiting.get()) is not None:
            for row in rows:
                if TRANSCRIPTS in row:
                    self._keep(row)
            self._log(self.sinks, [row for row in rows if TRANSCRIPTS not in row])

    def _log(self, sinks: Mapping[str, Sink], rows: Sequence[dict[str, Any]] = ()) -> None:
        for name, sink in sinks.items():
            self.unlogged[name] += rows
            if not self.unlogged[name]:
                continue
            try:
                sink.log(self.unlogged[name])
                self.unlogged[name].clear()
            except Exception as error:  # an unreachable tracker must not end a training run; the rows wait for it
                self.problems[name] = one_line(error)

    def _keep(self, row: Mapping[str, Any]) -> None:
        """Store the transcripts as files of the MLflow run."""
        with tempfile.TemporaryDirectory(prefix="marl-ray-") as temporary:
            path = Path(temporary) / f"{row['iteration']:.0f}.jsonl"
            path.write_text("".join(json.dumps(transcript) + "\n" for transcript in row[TRANSCRIPTS]))
            try:
                self.tracker.artifact(path, TRANSCRIPTS)
            except Exception as error:  # transcripts are for people; nothing depends on them
                self.console.say(f"transcripts of iteration {row['iteration']:.0f}: {one_line(error)}")


def _warm_start_line(row: Mapping[str, float]) -> str:
    """One epoch of a warm start as a line."""
    parts = (f"{key} {value:.4g}" for key, value in row.items() if key != "steps" and not key.startswith("system/"))
    return "  ".join(parts)
