"""Tracking of a sweep while it runs: printed lines and a table for people, MLflow, and TensorBoard's files."""

import sys
from collections.abc import Callable, Sequence

from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import describe_error
from marl_ray.training.tracking.printed_lines import print_line
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records import REPORT_FILE, SweepRecords, TrialRecord, end_reason, values_line
from marl_ray.tuning.reporting.event_files import EventFiles
from marl_ray.tuning.reporting.mlflow_runs import SweepMlflowRuns
from marl_ray.tuning.reporting.progress import SweepProgress
from marl_ray.tuning.reporting.report import write_report


class SweepTracking:
    """Shows people and trackers what happens in a sweep. It reads the records and decides nothing."""

    def __init__(self, config: SweepConfig, folder: Folder, records: SweepRecords, owns: Callable[[], bool]):
        """Begin to track a sweep; `owns` says that it has no other owner.

        Raises MarlRayError if MLflow does not answer when a sweep begins (see `SweepMlflowRuns`).
        """
        self.config, self.folder, self.records = config, folder, records
        self.progress = SweepProgress(config, records)
        self.mlflow_runs = SweepMlflowRuns(config, records, owns)
        self.events = EventFiles(folder, self.warn)

    def say(self, text: str) -> None:
        """Print a line about the sweep to standard output."""
        print_line(f"{self.config.name}: {text}", sys.stdout)

    def warn(self, text: str) -> None:
        """Print a line about the sweep to standard error."""
        print_line(f"{self.config.name}: {text}", sys.stderr)

    def log_rows(self, record: TrialRecord, leg: str, rows: list[dict[str, float]]) -> None:
        """Log rows of metrics of a trial, which its leg of this name has sent."""
        self.mlflow_runs.log(record, rows)
        self.events.log(leg, rows)
        self.progress.show()

    def end_leg(self, leg: str) -> None:
        """Close the files of a leg; no more of its rows follow."""
        self.events.end(leg)

    def show_changes(self, changes: Sequence[TrialRecord]) -> None:
        """Show records that have changed, and end the tracking of the trials that have ended."""
        for record in changes:
            if record.state == "ended":
                self.mlflow_runs.end(record)
                self.say(_ending_line(record, self.config, self.records))
        self.progress.show()

    def say_interrupted(self) -> None:
        """Tell the user at once which work is kept."""
        trials = self.records.trials
        ended = sum(record.state == "ended" for record in trials)
        progress = f"{ended} of {len(trials)} trials have ended, the others' checkpoints are in {self.folder.uri}"
        self.warn(f"interrupted; {progress}; the same command continues them")

    def close(self) -> str:
        """Write the report and end all tracking, however the sweep ended.

        Returns the path or URI of the report; empty if it could not be written, which must not end a sweep.
        """
        report = ""
        try:
            report = write_report(self.folder, self.records)
            self.mlflow_runs.report(self.folder.read(REPORT_FILE))
        except Exception as error:
            self.warn(f"no report: {describe_error(error)}; `marl-ray report {self.folder.uri}` makes one later")
        self.events.close()
        self.mlflow_runs.close(self.records.status)
        return report

    def leave(self) -> None:
        """Make no more calls of MLflow, whose runs are now another owner's."""
        self.mlflow_runs.leave()


def _ending_line(record: TrialRecord, config: SweepConfig, records: SweepRecords) -> str:
    """Return one line about an ended trial: its values, status and scores."""
    text = f"trial {record.number:04d} ({values_line(record.values)}) {record.status}"
    if record.error:
        return f"{text}: {record.error}"
    objectives = zip(config.metric, record.objectives or [], strict=False)
    scores = ", ".join(f"{metric.name} {value:.4g}" for metric, value in objectives)
    text += f": {scores or 'no result'} after {record.steps:,} steps, {record.seconds:.0f} s"
    reason = end_reason(record, records)
    return f"{text} ({reason})" if reason else text
