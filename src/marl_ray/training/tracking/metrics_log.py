"""Show the rows of metrics that workers send, and log them to MLflow and the other sinks."""

import json
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_ray.config import RunConfig
from marl_ray.errors import one_line
from marl_ray.training.tracking.mlflow_run import Tracker
from marl_ray.training.tracking.other_sinks import Sink
from marl_ray.training.tracking.progress_bar import ProgressBar

TRANSCRIPTS = "transcripts"
"""Key of rows that hold episodes as text, and the folder of MLflow for these."""
QUEUE_GET_S = 1.0
DRAIN_S = 30.0
"""Seconds that the driver waits, after the workers have ended, for the last metrics to be logged."""


class MetricsLog:
    """Reads the queue on a thread of its own until it is closed."""

    def __init__(self, config: RunConfig, queue: Any, tracker: Tracker, sinks: Mapping[str, Sink]):
        self.config, self.queue, self.tracker, self.sinks = config, queue, tracker, sinks
        self.unlogged: dict[str, list[dict[str, float]]] = {name: [] for name in sinks}
        self.problems: dict[str, str] = {}
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._drain, name="metrics", daemon=True)
        self.thread.start()

    def close(self, wait_s: float = DRAIN_S) -> None:
        """Log the rows that have arrived, and print which could not be logged; a second call does nothing."""
        if self.done.is_set():
            return
        self.done.set()
        self.thread.join(wait_s)
        if not self.thread.is_alive() and any(self.unlogged.values()):
            self._log()
        for name, rows in self.unlogged.items():
            if rows:
                what = f"metrics of {len(rows)} iterations are not in {name}"
                problem = self.problems.get(name, f"it did not take them within {wait_s:g} s")
                print(f"{self.config.name}: {what}: {problem}", file=sys.stderr)

    def _drain(self) -> None:
        from ray.exceptions import RayError
        from ray.util.queue import Empty

        with ProgressBar(self.config) as progress:
            while True:
                try:
                    rows = [self.queue.get(timeout=QUEUE_GET_S)]
                    rows += self.queue.get_nowait_batch(self.queue.qsize())
                except Empty:
                    if self.done.is_set():
                        return
                    continue
                except RayError:
                    return  # the cluster is going down, and the run's error gives the reason
                for shown in [row for row in rows if TRANSCRIPTS in row]:
                    self._keep(shown)
                rows = [row for row in rows if TRANSCRIPTS not in row]
                if not rows:
                    continue
                if "iteration" in rows[-1]:
                    progress.show(rows[-1])
                elif self.config.tracking.progress:
                    print(f"{self.config.name}: {_warm_start_line(rows[-1])}", flush=True)
                self._log(rows)

    def _log(self, rows: Sequence[dict[str, float]] = ()) -> None:
        for name, sink in self.sinks.items():
            self.unlogged[name] += rows
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
                what = f"transcripts of iteration {row['iteration']:.0f}"
                print(f"{self.config.name}: {what}: {one_line(error)}", file=sys.stderr)


def _warm_start_line(row: Mapping[str, float]) -> str:
    """One epoch of a warm start as a line."""
    parts = (f"{key} {value:.4g}" for key, value in row.items() if key != "steps" and not key.startswith("system/"))
    return "  ".join(parts)
