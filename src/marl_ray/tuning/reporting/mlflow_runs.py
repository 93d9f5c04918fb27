"""A sweep in MLflow: a parent run, and a child run for each trial.

A tracking server that does not answer neither ends a sweep nor slows it.

A line of `NAME/mlflow.jsonl` in the sweep's folder is a row of a trial, or says that a trial has ended. A
thread delivers the lines as a run's rows are delivered (training/journal/delivery.py); the same command
delivers what is left.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from marl_ray.config import RunConfig
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import one_line
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.stored_files.appended_file import AppendedFile, appended_file, lines_of
from marl_ray.stored_files.ownership.owners import whose_folder
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.journal.delivery import Delivery
from marl_ray.training.machines.interruption import run_within
from marl_ray.training.run_folder.metrics_file import is_metrics, row_of
from marl_ray.training.tracking.mlflow_run import PARENT_TAG, MlflowRun, uri_of
from marl_ray.training.tracking.printed_lines import print_line
from marl_ray.training.tracking.summary import best_score_of
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records import SweepRecords, TrialRecord

OUTBOX_FILE = "mlflow.jsonl"
"""File in the sweep's folder with all that MLflow is to get."""
END_S = 30.0
"""Seconds that a sweep waits for its winner to be registered, and at its end for all other deliveries."""
ENDINGS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}
"""Status of an ended trial -> the status of its run in MLflow; FAILED for all others."""
MLFLOW_STATUSES = ("FINISHED", "FAILED", "KILLED")
"""Statuses that a trial's run in MLflow can end with."""
PARENT_ENDINGS = {"finished": "FINISHED", "failed": "FAILED"}
"""Status of an ended sweep -> the status of its run in MLflow; KILLED for all others."""


class SweepMlflowRuns:
    """Reports a sweep to MLflow. No call waits for the server, but for the first one and `register`."""

    def __init__(self, config: SweepConfig, records: SweepRecords, owns: Callable[[], bool] = lambda: True):
        """Open the parent run.

        MLflow is called while `owns` says that the sweep has no other owner. Raises MarlRayError if the tracking
        server does not answer when a sweep begins; a sweep that continues does not need it.
        """
        self.config, self.base = config, config.example()
        self.uri = uri_of(self.base)
        folder = Folder(config.storage, config.name)
        self.filesystem, self.path = folder.filesystem, f"{folder.path}/{OUTBOX_FILE}"
        self.page = b""
        self.outbox: AppendedFile | None = None
        self.logged: dict[int, tuple[int, int]] = {}
        """Trial -> exploits and iteration of its last row."""
        self.runs = _SweepRuns(config, records, self.uri)
        opened = None
        if records.mlflow_run_id:
            self._read_logged()
        else:
            opened = self.runs
            opened.open()
        self.delivery = Delivery(
            "mlflow", self.runs.open, folder.filesystem, folder.path, self._say, opened, file=OUTBOX_FILE, owns=owns
        )

    @property
    def parent(self) -> MlflowRun:
        """The sweep's own MLflow run. Raises MarlRayError if the tracking server does not answer."""
        return self.runs.parent

    def log(self, record: TrialRecord, rows: list[dict[str, float]]) -> None:
        """Log rows of a trial. Rows that it has played again after its process was lost are logged once."""
        new = []
        for row in rows:
            place = (int(row.get("exploits", 0)), int(row.get("iteration", 0)))
            if place > self.logged.get(record.number, (-1, -1)):
                self.logged[record.number] = place
                new.append({"trial": record.number, "row": row | {"timestamp": time.time()}})
        self._append(new)

    def end(self, record: TrialRecord) -> None:
        """Log a trial's last state and close its run."""
        tags = {"status": record.status} | ({"error": record.error} if record.error else {})
        self._append([{"trial": record.number, "end": ENDINGS.get(record.status, "FAILED"), "tags": tags}])

    def register(self, record: TrialRecord, bundle: Path) -> str:
        """Register the winner's bundle as a version of the sweep's name, and return the version.

        The text is empty if that failed or takes too long. The version's `best_score` is the score of this bundle
        alone, as for a single run: the sweep's metric is a mean over seeds, or another number altogether, and the
        versions of one name must be comparable.
        """
        from marl_ray.policies.bundles.loading import load_bundle

        versions: list[str] = []
        errors: list[str] = []

        def make() -> None:
            try:
                loaded = load_bundle(bundle)
                score = best_score_of(self.runs.config_of(record) or self.base, loaded.manifest.lineage.metrics)
                version = self.parent.register(bundle, loaded.digest, score)
                self.parent.tag({"winner": f"{record.number:04d}"})
                versions.append(version)
            except Exception as error:
                errors.append(one_line(error))

        run_within(END_S, make)
        if not versions:
            why = errors[0] if errors else f"MLflow did not answer within {END_S:g} s"
            self._say(f"the winner is not registered in MLflow yet ({why}); the same command registers it")
        return versions[0] if versions else ""

    def report(self, page: bytes) -> None:
        """Store the report as an artifact of the parent run when the sweep's tracking is closed."""
        self.page = page

    def close(self, status: str) -> None:
        """Deliver what MLflow has not got, close the runs, and print what could not be delivered in END_S seconds."""
        unended = [record.number for record in self.runs.records.trials if record.state != "ended"]
        logged = [number for number in unended if number in self.logged]
        # The same command resumes the sweep.
        self._append([{"trial": number, "end": "KILLED", "tags": {}} for number in logged])
        if self.outbox is not None:
            self.outbox.close()
        self.delivery.end(PARENT_ENDINGS.get(status, "KILLED"), lambda runs: runs.store(self.page))
        self.delivery.thread.join(END_S)
        self.delivery.leave()

    def leave(self) -> None:
        """Make no more calls of MLflow, whose runs are now another owner's."""
        self.delivery.stopped.set()

    def _append(self, entries: list[JsonObject]) -> None:
        try:
            if self.outbox is None:
                self.filesystem.create_dir(self.path.rpartition("/")[0])
                self.outbox = appended_file(self.filesystem, self.path)
            self.outbox.append([json.dumps(entry) for entry in entries])
        except OSError as error:
            self._say(f"rows of trials will not be in MLflow: {one_line(error)}")

    def _read_logged(self) -> None:
        """Find the last row of each trial among what was logged before."""
        entries: Iterable[Any] = map(row_of, lines_of(self.filesystem, self.path))
        for entry in entries:
            if entry is not None and _is_entry(entry) and "row" in entry:
                self.logged[entry["trial"]] = (entry["row"].get("exploits", 0), entry["row"].get("iteration", 0))

    def _say(self, text: str) -> None:
        print_line(f"{self.config.name}: {text}", sys.stderr)


def _is_entry(entry: JsonMapping) -> bool:
    """Return True for what `SweepMlflowRuns` has written.

    The sink would wait for ever at a line that was damaged.
    """
    has_trial = type(entry.get("trial")) is int and entry["trial"] >= 0
    if "row" in entry:
        return has_trial and isinstance(entry["row"], dict) and is_metrics(entry["row"])
    tags = entry.get("tags")
    return has_trial and isinstance(tags, dict) and entry.get("end") in MLFLOW_STATUSES


class _SweepRuns:
    """The MLflow runs of a sweep, as a sink of the lines of its outbox."""

    def __init__(self, config: SweepConfig, records: SweepRecords, uri: str):
        self.config, self.records, self.uri = config, records, uri
        self._parent: MlflowRun | None = None
        self.children: dict[int, MlflowRun | None] = {}

    @property
    def parent(self) -> MlflowRun:
        self.open()
        return self._parent  # type: ignore[return-value]

    @property
    def run_id(self) -> str:
        return self.parent.run_id

    def open(self) -> "_SweepRuns":
        """Open the parent run if it is not open. Raises MarlRayError if the server does not answer."""
        if self._parent is None:
            folder = Folder(self.config.storage, self.config.name)
            owner = whose_folder(folder.filesystem, folder.path)
            run_id = self.records.mlflow_run_id or None
            parent = MlflowRun(self.config.example(), run_id, {"marl_ray.kind": "sweep"}, owner)
            parent.reopen()
            self.records.mlflow_run_id = parent.run_id
            self._parent = parent
        return self

    def log(self, entries: Iterable[JsonMapping]) -> None:
        waiting: dict[int, list[Mapping[str, float]]] = {}
        for entry in filter(_is_entry, entries):
            number = entry["trial"]
            if number >= len(self.records.trials):
                continue
            if "row" in entry:
                waiting.setdefault(number, []).append(entry["row"])
                continue
            child = self._child(number)
            if child is not None:
                child.log(waiting.pop(number, []))
                child.tag(entry["tags"])
                child.end(entry["end"])
        for number, rows in waiting.items():
            child = self._child(number)
            if child is not None:
                child.log(rows)

    def store(self, page: bytes) -> None:
        """Store the report as an artifact of the parent run."""
        if page:
            with temporary_folder("report") as folder:
                path = folder / "report.html"
                path.write_bytes(page)
                self.parent.store_artifact(path)

    def end(self, status: str) -> None:
        self.parent.end(status)

    def config_of(self, record: TrialRecord) -> RunConfig | None:
        """Return the run config whose values become the parameters of a trial's child run.

        Return None for a trial whose config is invalid.
        """
        try:
            return self.config.run_config(
                record.values, f"{self.config.name}-{record.number:04d}", self.config.seeds[0]
            )
        except Exception:
            return None

    def _child(self, number: int) -> MlflowRun | None:
        """Return the run of a trial; None for a trial whose config is invalid."""
        if number not in self.children:
            record = self.records.trials[number]
            config = self.config_of(record)
            if config is None:
                self.children[number] = None
                return None
            tags = {PARENT_TAG: self.parent.run_id, "trial": f"{number:04d}"}
            # A driver may have been killed after it began a trial's run and before it noted that.
            run_id = record.mlflow_run_id or self.parent.find_run(tags)
            child = MlflowRun(config, run_id, tags)
            if run_id:
                child.reopen()
            record.mlflow_run_id = child.run_id
            self.children[number] = child
        return self.children[number]
