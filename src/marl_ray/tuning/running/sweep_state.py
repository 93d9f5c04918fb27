"""A sweep while its driver runs: its legs, its records, and what people and trackers are told."""

import os
import sys
from collections.abc import Sequence

from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError, describe_error, one_line
from marl_ray.json_types import JsonMapping
from marl_ray.stored_files.folder_kinds import SWEEP_FILE
from marl_ray.stored_files.storages import absolute_storage
from marl_ray.training.run_folder.lease import Lease
from marl_ray.training.tracking.printed_lines import print_line
from marl_ray.tuning.folder import Folder, read_rows, trial_folder
from marl_ray.tuning.records import (
    REPORT_FILE,
    SweepRecords,
    TrialRecord,
    end_reason,
    median_seed,
    ranked_trials,
    values_line,
)
from marl_ray.tuning.records_file import RecordsFile
from marl_ray.tuning.reporting.event_files import EventFiles
from marl_ray.tuning.reporting.mlflow_runs import SweepMlflowRuns
from marl_ray.tuning.reporting.progress import SweepProgress
from marl_ray.tuning.reporting.report import write_report
from marl_ray.tuning.running.capacity import TrialResources, count_slots
from marl_ray.tuning.running.trial_files import Leg, Takeover, take_over
from marl_ray.tuning.running.trial_needs import TrialNeeds
from marl_ray.tuning.search.plan import SweepPlan
from marl_ray.tuning.search.schedulers import Exploit


class RunningSweep:
    """A sweep while its driver runs: its records, its plan, and all that tells people about it."""

    def __init__(self, config: SweepConfig, folder: Folder, records: SweepRecords, lease: Lease):
        self.config = config
        self.folder = folder
        self.records = records
        self.lease = lease
        self.file = RecordsFile(folder, records)
        self.needs = TrialNeeds(config)
        self.report = ""
        """Path or URI of the report; empty until it is written."""
        self.progress = SweepProgress(config, records)
        self.plan = SweepPlan(config, records, self.exploit, self.needs.check, self.save_and_show)
        self.mlflow_runs = SweepMlflowRuns(config, records, lease.owns)
        self.events = EventFiles(folder, self.warn)
        self._save_error = ""
        """The reason why the records are not up to date; empty while they are."""

    def __getstate__(self) -> dict[str, object]:
        """Return an empty state, because Tune pickles its callbacks into a file that is never read."""
        return {}

    def run(self, retried: Sequence[TrialRecord]) -> None:
        """Run the legs that the plan decides on, until it has none or the budget is used up.

        If the cluster can run none of the trials that are left, those that are `retried` end as refused again, and
        MarlRayError is raised for the others, which stay as they are.
        """
        from marl_ray.tuning.running.ray_tune import LegCalls, run_legs

        need, reason = self.needs.biggest(self.plan.values_left())
        if need is None and reason:
            for record in retried:
                self.plan.refuse_unfit(record)
            if self.plan.has_work():
                raise MarlRayError(reason)
            return
        concurrent = min(count_slots(need or TrialResources(1, 1.0, False)), self.config.max_concurrent or sys.maxsize)
        calls = LegCalls(self.begin_leg, self.note_leg_end, self.note_rows, self.say_of_leg, self.is_over)
        run_legs(self.config.name, concurrent, self.plan, calls)

    def is_over(self) -> bool:
        """Return True if another process owns the sweep, or its budget is used up."""
        return self.lease.lost.is_set() or bool(self.plan.used_up())

    def begin_leg(self, record: TrialRecord) -> Leg:
        """Begin the next leg of a record that the plan has checked, and return it."""
        leg = self.next_leg(record)
        # Else another configuration could find the files of this one.
        self.save(record, durable=True)
        return leg

    def note_rows(self, leg: Leg, rows: list[dict[str, float]]) -> None:
        """Note rows of metrics that a leg has sent."""
        last, record = rows[-1], self.records.trials[leg.number]
        names = [f"objective/{metric.name}" for metric in self.config.metric]
        objectives = [last[name] for name in names] if all(last.get(name) is not None for name in names) else None
        self.plan.note_progress(leg.number, {"steps": int(last["steps"]), "played": int(last["played"])}, objectives)
        self.file.mark(record)
        self.mlflow_runs.log(record, rows)
        self.events.log(leg.name, rows)
        self.progress.show()

    def say_of_leg(self, leg: Leg, line: str) -> None:
        """Print a line that a leg has sent for the user."""
        self.warn(f"trial {leg.number:04d}: {line}")

    def note_leg_end(self, leg: Leg, result: JsonMapping | None, failed: bool) -> None:
        """Note that a leg has ended, with a result unless its process was lost."""
        self.events.end(leg.name)
        loss = {"error": "its process was lost again and again"} if failed else {}
        self.plan.note_leg_end(leg.number, result or loss or None, failed, leg.until)

    def next_leg(self, record: TrialRecord) -> Leg:
        """Return the record's next leg, with a run config for each seed."""
        configs = []
        for seed in self.config.seeds:
            name_and_seed = {"name": f"{self.config.name}-{record.number:04d}-seed-{seed}", "seed": seed}
            configs.append(
                self.needs.run_config(record.values).model_copy(update=name_and_seed).as_given() | name_and_seed
            )
        need = self.needs.need(record.values)
        self.plan.note_leg(record, configs, need.total["CPU"], need.total.get("GPU", 0.0))
        return Leg(
            sweep=self.config.name,
            storage=absolute_storage(self.config.storage),
            number=record.number,
            leg=record.legs,
            configs=configs,
            metrics=[metric.model_dump() for metric in self.config.metric],
            until=self.plan.next_leg_end(record),
            has_worker_group=need.has_worker_group,
            use_gpu=need.use_gpu,
            cpus=need.cpus,
            tracking_uri=self.mlflow_runs.uri,
            folder=os.getcwd(),
        )

    def exploit(self, recipient: TrialRecord, donor: TrialRecord, exploit: Exploit, at: int) -> None:
        """Copy the donor's checkpoint and bundles into the recipient's folder. Both wait, so no process writes there."""
        target = trial_folder(self.config.storage, self.config.name, recipient.number)
        source = trial_folder(self.config.storage, self.config.name, donor.number)
        if take_over(target, source, Takeover(at, donor.number, dict(exploit.values))):
            takes = f"trial {recipient.number:04d} takes over {donor.number:04d} at {at:,} steps"
            print_line(f"{self.config.name}: {takes}: {values_line(exploit.values)}", sys.stdout)

    def save_and_show(self, *records: TrialRecord) -> None:
        """Save and show these records after a change."""
        self.save(*records)
        for record in records:
            if record.state == "ended":
                self.mlflow_runs.end(record)
                print_line(f"{self.config.name}: {_ending_line(record, self.config, self.records)}", sys.stdout)
        self.progress.show()

    def save(self, *changed: TrialRecord, durable: bool = False, all_records: bool = False) -> None:
        """Save the records that have changed, or all (see `RecordsFile`).

        A full disk does not end the sweep: the next change writes what this call could not.
        """
        if self.lease.lost.is_set():
            # The records are another owner's now.
            return
        try:
            if all_records:
                self.file.save_all()
            else:
                self.file.save(*changed, durable=durable)
            self._save_error = ""
        except OSError as error:
            if not self._save_error:
                self.warn(f"{SWEEP_FILE} is not up to date: {one_line(error)}")
            self._save_error = one_line(error)

    def warn(self, text: str) -> None:
        """Print a line about the sweep for people."""
        print_line(f"{self.config.name}: {text}", sys.stderr)

    def choose_winner(self) -> None:
        """Choose and register the winner."""
        records = self.records
        records.seconds = self.plan.seconds()
        budget = self.plan.used_up()
        records.status, records.error = ("cut", f"{budget} is used up") if budget else ("finished", "")
        candidates = ranked_trials(records, self.config.metric)
        if candidates:
            self._register(candidates[0])
        self.save(*candidates[:1])

    def _register(self, winner: TrialRecord) -> None:
        """Register the bundle of one of the winner's seeds. Damaged rows, of which it cannot be chosen, end no sweep."""
        records = self.records
        home = trial_folder(self.config.storage, self.config.name, winner.number)
        if records.winner != winner.number:
            records.winner, records.winner_seed, records.winner_model = winner.number, None, ""
        try:
            records.winner_seed = median_seed(read_rows(home), self.config.seeds, self.config.metric[0])
        except (OSError, MarlRayError) as error:
            self.warn(f"no bundle of the winner, trial {winner.number:04d}, can be chosen: {one_line(error)}")
            return
        bundle = f"bundles/seed-{records.winner_seed}"
        if home.exists(bundle):
            with home.local(bundle) as local:
                assert local is not None
                records.winner_model = self.mlflow_runs.register(winner, local)

    def close(self) -> None:
        """Save the records, write the report and end all tracking, however the sweep ended."""
        self.records.seconds = self.plan.seconds()
        self.save(all_records=True)
        try:
            self.report = write_report(self.folder, self.records)
            self.mlflow_runs.report(self.folder.read(REPORT_FILE))
        except Exception as error:
            # A failing report must not end a sweep.
            self.warn(f"no report: {describe_error(error)}; `marl-ray report {self.folder.uri}` makes one later")
        self.events.close()
        self.mlflow_runs.close(self.records.status)

    def say_interrupted(self) -> None:
        """Tell the user at once which work is kept."""
        trials = self.records.trials
        ended = sum(record.state == "ended" for record in trials)
        progress = f"{ended} of {len(trials)} trials have ended, the others' checkpoints are in {self.folder.uri}"
        self.warn(f"interrupted; {progress}; the same command continues them")


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
