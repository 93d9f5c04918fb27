"""A sweep in MLflow: a parent run, and a child run per trial. An unreachable tracking server never ends a sweep."""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from marl_ray.config import RunConfig
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import one_line
from marl_ray.training.tracking.mlflow_run import Tracker
from marl_ray.training.tracking.summary import best_score_of
from marl_ray.tuning.records import SweepRecords, TrialRecord

FLUSH_S = 5.0
"""Least number of seconds between two uploads of a trial's rows."""
PARENT_TAG = "mlflow.parentRunId"
ENDINGS = {"finished": "FINISHED", "stopped": "FINISHED", "cut": "KILLED"}
PARENT_ENDINGS = {"finished": "FINISHED", "failed": "FAILED"}


class SweepTracker:
    def __init__(self, config: SweepConfig, records: SweepRecords):
        """Open the parent run; raises MarlRayError if the tracking server does not answer."""
        self.records, self.config = records, config
        self.base = config.example()
        self.parent = Tracker(self.base, records.mlflow_run_id or None, {"marl_ray.kind": "sweep"})
        self.parent.reopen()
        records.mlflow_run_id = self.parent.run_id
        self.children: dict[int, Tracker] = {}
        self.waiting: dict[int, list[dict[str, float]]] = {}
        self.sent: dict[int, float] = {}
        self.problem = ""

    def log(self, record: TrialRecord, rows: list[dict[str, float]]) -> None:
        """Queue rows of a trial; they are sent every few seconds."""
        self.waiting.setdefault(record.number, []).extend(rows)
        if time.monotonic() - self.sent.get(record.number, float("-inf")) > FLUSH_S:
            self.flush(record.number)

    def flush(self, number: int) -> None:
        rows = self.waiting.get(number)
        if not rows:
            return
        child = self._child(self.records.trials[number])
        if child is not None and self._try(lambda: child.log(rows)):
            self.waiting[number] = []
        self.sent[number] = time.monotonic()

    def end(self, record: TrialRecord) -> None:
        """Send a trial's last state and close its run."""
        child = self._child(record)
        if child is None:
            return
        tags = {"status": record.status} | ({"error": record.error} if record.error else {})
        self._try(lambda: child.tag(tags))
        self._try(lambda: child.end(ENDINGS.get(record.status, "FAILED")))

    def register(self, record: TrialRecord, bundle: Path) -> str:
        """Register the winner's bundle as a version of the sweep's name; empty if that failed.

        The version's `best_score` is the score of this bundle alone, as for a single run: the sweep's metric is a mean
        over seeds, or another number altogether, and the versions of one name must be comparable.
        """
        from marl_ray.policies.bundles.actor_critic import load_bundle

        versions: list[str] = []

        def make() -> None:
            loaded = load_bundle(bundle)
            score = best_score_of(self._config(record) or self.base, loaded.manifest.lineage.metrics)
            versions.append(self.parent.register(bundle, loaded.digest, score))

        self._try(make)
        self._try(lambda: self.parent.tag({"winner": f"{record.number:04d}"}))
        return versions[0] if versions else ""

    def report(self, page: bytes) -> None:
        """Store the report as an artifact of the parent run."""
        with tempfile.TemporaryDirectory(prefix="marl-ray-report-") as folder:
            path = Path(folder, "report.html")
            path.write_bytes(page)
            self._try(lambda: self.parent.artifact(path))

    def close(self, status: str) -> None:
        for number in list(self.waiting):
            self.flush(number)
        for number, child in self.children.items():
            if self.records.trials[number].state != "ended":
                self._try(partial(child.end, "KILLED"))  # running the same command again resumes it
        self._try(lambda: self.parent.end(PARENT_ENDINGS.get(status, "KILLED")))
        if self.problem:
            print(f"{self.config.name}: not all is in MLflow: {self.problem}", file=sys.stderr)

    def _child(self, record: TrialRecord) -> Tracker | None:
        if record.number not in self.children:
            config = self._config(record)
            if config is None:
                return None
            tags = {PARENT_TAG: self.parent.run_id, "trial": f"{record.number:04d}"}
            trackers: list[Tracker] = []
            if not self._try(lambda: trackers.append(Tracker(config, record.mlflow_run_id or None, tags))):
                return None
            if record.mlflow_run_id:
                self._try(trackers[0].reopen)
            record.mlflow_run_id = trackers[0].run_id
            self.children[record.number] = trackers[0]
        return self.children[record.number]

    def _config(self, record: TrialRecord) -> RunConfig | None:
        """The run config whose values become the child's parameters; None for a trial whose config is invalid."""
        try:
            return self.config.run_config(
                record.values, f"{self.config.name}-{record.number:04d}", self.config.seeds[0]
            )
        except Exception:
            return None

    def _try(self, action: Callable[[], Any]) -> bool:
        try:
            action()
        except Exception as error:
            self.problem = one_line(error)
            return False
        return True
