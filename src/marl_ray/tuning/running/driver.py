"""The driver of a sweep: checks the config, runs the trials on Ray Tune, tracks them and registers the winner.

Tune runs, retries and shows the trials. `SweepPlan`, as Tune's searcher, decides what runs next: a Tune trial is one
leg of one trial of the sweep, from its checkpoint to the next decision point. Tune's own schedulers are not used: with
Ray Train V2 they see no checkpoints, so pausing or copying a trial does not work. Tune also pickles their state and its
own, and `Tuner.restore` reads that; the sweep's records are JSON.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from marl_ray.config import RunConfig, parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError, describe_error, one_line
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.storages import absolute_storage
from marl_ray.stored_files.folder_kinds import SWEEP_FILE, SWEEP_KIND, refuse_other_kind
from marl_ray.training.machines.interruption import interrupt_handler
from marl_ray.training.run_checks import check_trial
from marl_ray.training.run_folder.lease import Lease
from marl_ray.training.tracking.printed_lines import print_line
from marl_ray.tuning.folder import Folder, read_rows, trial_folder
from marl_ray.tuning.records import (
    REPORT_FILE,
    RecordsFile,
    SweepRecords,
    TrialRecord,
    end_reason,
    identity_of,
    load_records,
    median_seed,
    ranked_trials,
    values_line,
)
from marl_ray.tuning.reporting.ending import ending_document, ending_lines
from marl_ray.tuning.reporting.event_files import EventFiles
from marl_ray.tuning.reporting.mlflow_runs import SweepMlflowRuns
from marl_ray.tuning.reporting.progress import SweepProgress
from marl_ray.tuning.reporting.report import write_report
from marl_ray.tuning.running.capacity import TrialResources, count_slots, need_of
from marl_ray.tuning.running.trial_files import Leg, Takeover, take_over
from marl_ray.tuning.search.plan import SweepPlan, retry_failed
from marl_ray.tuning.search.schedulers import Exploit
from marl_ray.tuning.search.spaces import Values, check_space

MAX_LISTED_TRIALS = 1000
"""Maximum number of configurations whose needs are compared before a sweep begins or continues."""


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended."""

    name: str
    folder: str
    """Folder or URI; its `sweep.json` holds all records of a sweep that has ended."""
    records: SweepRecords
    report: str
    """Path or URI of `report.html`; empty if it could not be written."""

    def document(self) -> dict[str, object]:
        """Return the end of the sweep as plain data, with the trials that have a result in the order of their scores."""
        config = parse_config(SweepConfig, self.records.config)
        return ending_document(Folder(self.folder), config, self.records, self.report)

    def __repr__(self) -> str:
        return f"<SweepResult {self.name}: {self.records.status}, {len(self.records.trials)} trials; {self.folder}>"

    def __str__(self) -> str:
        return "\n".join(ending_lines(self.document()))


def check_sweep(config: SweepConfig) -> None:
    """Check everything that can be known before a cluster is used. Raises MarlRayError."""
    from marl_ray.tuning.search.schedulers import make_scheduler
    from marl_ray.tuning.search.spaces import SEARCHES

    check_space(config)
    make_scheduler(config, config.example().train.total_steps)
    first = SEARCHES[config.search.kind](config).ask(0)
    assert first is not None
    _claim(config, Folder(config.storage, config.name))
    check_trial(config.run_config(first, config.name, config.seeds[0]))


def run_sweep(
    config: SweepConfig, retry: bool = False, cluster: Callable[[], AbstractContextManager[None]] = nullcontext
) -> SweepResult:
    """Run, or continue, a sweep on the Ray that this process is connected to, or that `cluster` starts.

    `cluster` is not called if nothing is left to train. `retry` restarts trials that failed, were lost or were refused.
    Raises MarlRayError if nothing can run at all, or another process owns the name; a trial that fails, or that the
    cluster can never run, is noted in the records, and the others continue.
    """
    folder = Folder(config.storage, config.name)
    with Lease(folder.filesystem, folder.path, f"sweep {config.name!r}") as lease:
        return _run(config, folder, lease, retry, cluster)


def _run(
    config: SweepConfig, folder: Folder, lease: Lease, retry: bool, cluster: Callable[[], AbstractContextManager[None]]
) -> SweepResult:
    records = _claim(config, folder)
    retried = retry_failed(records) if retry else []
    sweep = _Sweep(config, folder, records, lease)
    shield = ExitStack()
    try:
        shield.enter_context(interrupt_handler(sweep.say_interrupted))
        if sweep.plan.has_work():
            # Once more after Ray has started, because Ray replaces signal handlers at its start.
            with cluster(), interrupt_handler(sweep.say_interrupted), sweep.progress:
                sweep.run(retried)
        else:
            sweep.plan.stop_clock()
        lease.check()
        sweep.finish()
    except Exception as error:
        records.status, records.error = "failed", describe_error(error)
        raise
    except BaseException:
        records.status, records.error = "cut", "interrupted; the same command continues it"
        raise
    finally:
        with shield:
            if not lease.owns():
                sweep.mlflow_runs.leave()
            else:
                sweep.close()
    return SweepResult(config.name, folder.uri, records, sweep.report)


def _claim(config: SweepConfig, folder: Folder) -> SweepRecords:
    """Return the sweep's records, new or read from its folder.

    Raises MarlRayError if they are another sweep's, or the name is a run's.
    """
    refuse_other_kind(config.storage, config.name, SWEEP_KIND)
    identity = identity_of(config)
    try:
        records = load_records(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        path = f"{folder.uri}/{SWEEP_FILE}"
        raise MarlRayError(f"name: {path} is not the record of a sweep: {one_line(error)}") from error
    if records is None:
        return SweepRecords(config.name, config.resolve(), identity)
    differing = sorted(key for key in identity if records.identity.get(key) != identity[key])
    if differing:
        raise MarlRayError(
            f"name: sweep {config.name!r} exists under {config.storage!r} with another {', '.join(differing)}; "
            "choose another name, or the same config to continue it"
        )
    records.status, records.error, records.config = "running", "", config.resolve()
    return records


class _Sweep:
    """The state of a sweep's driver while it runs."""

    def __init__(self, config: SweepConfig, folder: Folder, records: SweepRecords, lease: Lease):
        self.config = config
        self.folder = folder
        self.records = records
        self.lease = lease
        self.file = RecordsFile(folder, records)
        self.needs: dict[str, TrialResources] = {}
        """Resources of a config as JSON -> what a trial with them occupies."""
        self.last: tuple[JsonObject, RunConfig] | None = None
        """The last values whose run config was made, and that config."""
        self.unsaved = self.report = ""
        self.progress = SweepProgress(config, records)
        self.plan = SweepPlan(config, records, self.exploit, self.check, self.save_and_show)
        self.mlflow_runs = SweepMlflowRuns(config, records, lease.owns)
        self.events = EventFiles(folder, self.warn)

    def __getstate__(self) -> dict[str, object]:
        """Return an empty state, because Tune pickles its callbacks into a file that is never read."""
        return {}

    def run(self, retried: Sequence[TrialRecord]) -> None:
        """Run the legs that the plan decides on, until it has none or the budget is used up.

        If the cluster can run none of the trials that are left, those that are `retried` end as refused again, and
        MarlRayError is raised for the others, which stay as they are.
        """
        from marl_ray.tuning.running.ray_tune import LegCalls, run_legs

        need, problem = self._biggest_need()
        if need is None and problem:
            for record in retried:
                self.plan.refuse_unfit(record)
            if self.plan.has_work():
                raise MarlRayError(problem)
            return
        concurrent = min(count_slots(need or TrialResources(1, 1.0, False)), self.config.max_concurrent or sys.maxsize)
        calls = LegCalls(self.begin, self.leg_ended, self.note_rows, self.is_over)
        run_legs(self.config.name, concurrent, self.plan, calls)

    def is_over(self) -> bool:
        """Return True if another process owns the sweep, or its budget is used up."""
        return self.lease.lost.is_set() or bool(self.plan.used_up())

    def _biggest_need(self) -> tuple[TrialResources | None, str]:
        """Return the largest need, by CPUs, of the trials that are left, and why the cluster can never run one of them.

        The need is None if it can run none of them, and the reason is empty if it can run all.
        """
        biggest: TrialResources | None = None
        problem = ""
        for values in itertools.islice(self._values_left(), MAX_LISTED_TRIALS):
            try:
                need = self._need(values)
            except MarlRayError as error:
                problem = str(error)
                continue
            if biggest is None or need.total["CPU"] > biggest.total["CPU"]:
                biggest = need
        return biggest, problem

    def _values_left(self) -> Iterator[Values]:
        """Yield the configurations of trials that have not ended, and then of those that have not started.

        For a search that learns the latter are only the run's own, because asking would change what it suggests.
        """
        yield from (record.values for record in self.records.trials if record.state != "ended")
        if self.plan.search.learns:
            yield {}
            return
        for number in itertools.count(len(self.records.trials)):
            values = self.plan.search.ask(number)
            if values is None:
                return
            yield values

    def _need(self, values: Mapping[str, object]) -> TrialResources:
        config = self._run_config(values)
        key = config.resources.model_dump_json()
        if key not in self.needs:  # each answer is several questions to the cluster
            self.needs[key] = need_of(config)
        return self.needs[key]

    def _run_config(self, values: Mapping[str, object]) -> RunConfig:
        """Return the run config of these values with the first seed.

        Checking a config takes a millisecond, so the last one is kept: a trial's is asked for several times in a row.
        """
        if self.last is None or self.last[0] != values:
            self.last = dict(values), self.config.run_config(values, self.config.name, self.config.seeds[0])
        return self.last[1]

    def check(self, values: Mapping[str, object]) -> None:
        """Raise MarlRayError if the cluster can never run this configuration."""
        self._need(values)

    def begin(self, record: TrialRecord) -> Leg:
        """Begin the next leg of a record that the plan has checked, and return it."""
        leg = self.leg(record)
        self.save(record, durable=True)  # else another configuration could find the files of this one
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

    def leg_ended(self, leg: Leg, result: JsonMapping | None, failed: bool) -> None:
        """Note that a leg has ended, with a result unless its process was lost."""
        self.events.end(leg.name)
        problem = {"error": "its process was lost again and again"} if failed else {}
        for note in (result or {}).get("notes", ()):
            self.warn(f"trial {leg.number:04d}: {note}")
        self.plan.leg_ended(leg.number, result or problem or None, failed, leg.until)

    def leg(self, record: TrialRecord) -> Leg:
        """Return the record's next leg, with a run config for each seed."""
        configs = []
        for seed in self.config.seeds:
            name_and_seed = {"name": f"{self.config.name}-{record.number:04d}-seed-{seed}", "seed": seed}
            configs.append(self._run_config(record.values).model_copy(update=name_and_seed).as_given() | name_and_seed)
        need = self._need(record.values)
        self.plan.note_leg(record, configs, need.total["CPU"], need.total.get("GPU", 0.0))
        return Leg(
            sweep=self.config.name,
            storage=absolute_storage(self.config.storage),
            number=record.number,
            leg=record.legs,
            configs=configs,
            metrics=[metric.model_dump() for metric in self.config.metric],
            until=self.plan.leg_end(record),
            nested=need.nested,
            use_gpu=need.use_gpu,
            cpus=need.cpus,
            tracking_uri=self.mlflow_runs.uri,
            folder=os.getcwd(),
        )

    def exploit(self, recipient: TrialRecord, donor: TrialRecord, what: Exploit, at: int) -> None:
        """Copy the donor's checkpoint and bundles into the recipient's folder. Both wait, so no process writes there."""
        target = trial_folder(self.config.storage, self.config.name, recipient.number)
        source = trial_folder(self.config.storage, self.config.name, donor.number)
        if take_over(target, source, Takeover(at, donor.number, dict(what.values))):
            takes = f"trial {recipient.number:04d} takes over {donor.number:04d} at {at:,} steps"
            print_line(f"{self.config.name}: {takes}: {values_line(what.values)}", sys.stdout)

    def save_and_show(self, *records: TrialRecord) -> None:
        """Save and show these records after a change."""
        self.save(*records)
        for record in records:
            if record.state == "ended":
                self.mlflow_runs.end(record)
                print_line(f"{self.config.name}: {self.line(record)}", sys.stdout)
        self.progress.show()

    def save(self, *changed: TrialRecord, durable: bool = False, all_records: bool = False) -> None:
        """Save the records that have changed, or all (see `RecordsFile`).

        A full disk does not end the sweep: the next change writes what this call could not.
        """
        if self.lease.lost.is_set():
            return  # they are another owner's now
        try:
            if all_records:
                self.file.save_all()
            else:
                self.file.save(*changed, durable=durable)
            self.unsaved = ""
        except OSError as error:
            if not self.unsaved:
                self.warn(f"{SWEEP_FILE} is not up to date: {one_line(error)}")
            self.unsaved = one_line(error)

    def line(self, record: TrialRecord) -> str:
        """Return one line about an ended trial: its values, status and scores."""
        text = f"trial {record.number:04d} ({values_line(record.values)}) {record.status}"
        if record.error:
            return f"{text}: {record.error}"
        objectives = zip(self.config.metric, record.objectives or [], strict=False)
        scores = ", ".join(f"{metric.name} {value:.4g}" for metric, value in objectives)
        text += f": {scores or 'no result'} after {record.steps:,} steps, {record.seconds:.0f} s"
        reason = end_reason(record, self.records)
        return f"{text} ({reason})" if reason else text

    def warn(self, text: str) -> None:
        print_line(f"{self.config.name}: {text}", sys.stderr)

    def finish(self) -> None:
        """Choose and register the winner."""
        records = self.records
        records.seconds = self.plan.seconds()
        over = self.plan.used_up()
        records.status, records.error = ("cut", f"{over} is used up") if over else ("finished", "")
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
        except Exception as error:  # a failing report must not end a sweep
            self.warn(f"no report: {describe_error(error)}; `marl-ray report {self.folder.uri}` makes one later")
        self.events.close()
        self.mlflow_runs.close(self.records.status)

    def say_interrupted(self) -> None:
        """Tell the user at once which work is kept."""
        trials = self.records.trials
        ended = sum(record.state == "ended" for record in trials)
        progress = f"{ended} of {len(trials)} trials have ended, the others' checkpoints are in {self.folder.uri}"
        self.warn(f"interrupted; {progress}; the same command continues them")
