"""The plan of a sweep: search, scheduler and budget decide from the records what runs next.

Nothing here needs Ray, copies a file or calls anybody: the plan returns its decisions, and its caller carries them out. It
has no state besides the records, so a sweep whose driver was killed is continued from them.
"""

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from marl_ray.config.sweep import SweepConfig
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.tuning.records import FAILED_STATUSES, SweepRecords, TrialRecord, signed_objectives
from marl_ray.tuning.search.schedulers import TrialStanding, TrialStandings, TrialVerdicts, make_scheduler
from marl_ray.tuning.search.schedulers.protocol import WORST_SCORE
from marl_ray.tuning.search.spaces import SEARCHES, GridSearch, Values


class Pause(Enum):
    """The reason why no leg is to run now."""

    WAIT = auto()
    """All trials wait for those that run."""
    END = auto()
    """Nothing will run any more."""


def retry_failed(records: SweepRecords) -> list[TrialRecord]:
    """Let the trials that failed, were lost or were refused run again, and return them.

    Those that have a checkpoint continue from it. The plan refuses again those that the cluster still can never run.
    """
    failed = [record for record in records.trials if record.status in FAILED_STATUSES]
    for record in failed:
        record.state, record.status, record.error = "running", "", ""
    return failed


class SweepPlan:
    """Decides which trial a sweep runs next, and for how long, from its records, its search and its scheduler.

    While a sweep runs, it alone changes the records of the trials, but for the ids of their runs in MLflow.
    """

    def __init__(self, config: SweepConfig, records: SweepRecords):
        """Plan a sweep from its config and the records that it has so far."""
        self.config, self.records = config, records
        self.search = SEARCHES[config.search.kind](config)
        steps = config.example().train.total_steps
        self.scheduler = make_scheduler(config, steps)
        self._earlier_seconds = records.seconds
        """Wall time of the earlier times that the sweep ran."""
        self._began_at: float | None = time.monotonic()
        """Moment at which this time began, by the monotonic clock; None once nothing is left to train."""
        self.played = records.played
        """Environment steps of all trials: their sum, kept up to date."""
        self.active: set[int] = set()
        """Numbers of the trials of which a leg runs."""
        self.standings = TrialStandings()
        """Trials that have not failed, as the scheduler sees them."""
        self.undecided = True
        """True if the scheduler may decide otherwise than it did last."""
        self.exhausted = False
        """True once the search has no more configurations, or the budget has no more trials."""
        self._changes: dict[int, TrialRecord] = {}
        """Number of a trial -> its record, which has changed since `take_changes`."""
        for record in records.trials:
            if record.status == "interrupted" and not self.used_up():
                record.state, record.status = "running", ""
            if record.state == "ended" and record.status != "interrupted":
                self._tell_search(record)
            else:
                self.search.take_up(record.number, record.values)
            self._update_standing(record)
        self.ready = deque(record.number for record in records.trials if record.state == "running")

    def seconds(self) -> float:
        """Return the wall time in seconds, over all times that the sweep ran."""
        return self._earlier_seconds + (0.0 if self._began_at is None else time.monotonic() - self._began_at)

    def stop_clock(self) -> None:
        """Count no wall time of a sweep that has nothing left to train."""
        self._began_at = None

    def used_up(self) -> str:
        """Return the budget that is used up, such as `budget.hours=2`; empty while none is."""
        budget = self.config.budget
        if budget.hours is not None and self.seconds() >= budget.hours * 3600:
            return f"budget.hours={budget.hours:g}"
        if budget.steps is not None and self.played >= budget.steps:
            return f"budget.steps={budget.steps}"
        return ""

    def next_step(self) -> TrialRecord | TrialVerdicts | Pause:
        """Return what the sweep does next.

        A record is the trial whose next leg is to run: the caller gives it to `begin_leg`, or to `refuse` if the cluster
        can never run it. Verdicts let trials take over others' weights: the caller copies these, and gives the verdicts to
        `apply_verdicts`. A `Pause` is the reason why nothing is to be done now.
        """
        while True:
            if self.used_up():
                return Pause.WAIT if self.active else Pause.END
            if not self.ready and self.undecided:
                verdicts = self._decide()
                if verdicts.exploits:
                    return verdicts
                self.apply_verdicts(verdicts, {})
            record = self.records.trials[self.ready.popleft()] if self.ready else self._new_trial()
            if record is not None:
                return record
            if self.active:
                return Pause.WAIT
            if not self.undecided:
                return Pause.END

    def take_changes(self) -> list[TrialRecord]:
        """Return the records that have changed since the last call, each once, but for those of running legs."""
        changes = list(self._changes.values())
        self._changes.clear()
        return changes

    def refuse(self, record: TrialRecord, error: str) -> None:
        """End a trial that is not active as refused, because the cluster can never run it."""
        if record.number in self.ready:
            self.ready.remove(record.number)
        self._end(record, "refused", error)
        self.undecided = True

    def begin_leg(self, record: TrialRecord, configs: list[JsonObject], cpus: float, gpus: float) -> None:
        """Note that the trial's next leg begins, with the run config of each seed, and the CPUs and GPUs it occupies."""
        record.state, record.legs = "running", record.legs + 1
        record.configs, record.cpus, record.gpus = configs, cpus, gpus
        self.active.add(record.number)
        self._update_standing(record)

    def has_work(self) -> bool:
        """Return True if work is left; False for a sweep that has ended."""
        unended = any(record.state != "ended" for record in self.records.trials)
        return not self.used_up() and (unended or self.trials_left() != 0)

    def trials_left(self) -> int | None:
        """Return the number of configurations that may still be started.

        Return None if only the budget of hours or steps ends them.
        """
        number, max_trials = len(self.records.trials), self.config.budget.trials
        if self.exhausted:
            return 0
        if isinstance(self.search, GridSearch):
            max_trials = min(len(self.search.listed), sys.maxsize if max_trials is None else max_trials)
        return None if max_trials is None else max(0, max_trials - number)

    def values_left(self) -> Iterator[Values]:
        """Yield the configurations of trials that have not ended, and then of those that have not started.

        For a search that learns the latter are only the run's own, because asking would change what it suggests.
        """
        yield from (record.values for record in self.records.trials if record.state != "ended")
        if self.search.is_adaptive:
            yield {}
            return
        for number in itertools.count(len(self.records.trials)):
            values = self.search.propose(number)
            if values is None:
                return
            yield values

    def next_leg_end(self, record: TrialRecord) -> int | None:
        """Return the environment steps at which the record's next leg ends.

        None stands for the end of training.
        """
        return self.scheduler.next_stop(max(record.scores, default=0))

    def note_leg_end(self, number: int, result: JsonMapping | None, is_lost: bool, until: int | None) -> None:
        """Note that a leg has ended: with a result, with the loss of its process (`is_lost`), or by the budget.

        `until` is the decision point up to which the leg was to run; None for the end of training.
        """
        record = self.records.trials[number]
        self.active.discard(number)
        self.note_progress(number, result or {})
        status = "lost" if is_lost else "interrupted"
        if result is not None and not is_lost:
            status = result["status"]
        if status == "waiting":
            record.objectives = result["objectives"] if result else None
            assert until is not None
            scores = signed_objectives(self.config.metric, record.objectives)
            record.scores[until] = WORST_SCORE if scores is None else scores[0]
            record.state = "waiting"
            self._note_change(record)
        else:
            if result is not None and result.get("objectives") is not None:
                record.objectives = result["objectives"]
            self._end(record, status, (result or {}).get("error", ""))
        self.undecided = True
        self.records.seconds = self.seconds()

    def note_progress(self, number: int, counts: JsonMapping, objectives: Sequence[float] | None = None) -> None:
        """Note the progress of a running trial, and its objectives so far if all are known."""
        record = self.records.trials[number]
        if objectives is not None:
            record.objectives = list(objectives)
        self.played += counts.get("played", record.played) - record.played
        for key in ("steps", "played", "seconds"):
            if key in counts:
                setattr(record, key, counts[key])

    def _new_trial(self) -> TrialRecord | None:
        """Add a trial with the next configuration of the search; None if there is none."""
        if self.exhausted:
            return None
        number = len(self.records.trials)
        values = None if self.trials_left() == 0 else self.search.propose(number)
        if values is None:
            self.exhausted = self.undecided = True
            return None
        record = TrialRecord(number, values, unread=self.config.unread(values))
        self.records.trials.append(record)
        return record

    def _decide(self) -> TrialVerdicts:
        """Return what the scheduler decides about the waiting trials."""
        self.undecided = False
        if not self.standings.waiting:
            return TrialVerdicts()
        return self.scheduler.decide(self.standings, self.trials_left())

    def apply_verdicts(self, verdicts: TrialVerdicts, failures: Mapping[int, str]) -> None:
        """Note what the scheduler has decided, all at once: which trials took over others, stop, and go on.

        `failures` holds the reason why a trial could not take over the weights of another, by the trial's number: it ends
        as failed.
        """
        for number, exploit in verdicts.exploits.items():
            record = self.records.trials[number]
            if number in failures:
                self._end(record, "failed", failures[number])
                continue
            at = max(record.scores)
            record.history[at] = dict(record.values)
            record.exploits.append({"at": at, "donor": exploit.donor, "values": dict(exploit.values)})
            record.values = dict(exploit.values)
            self._note_change(record)
        for number in sorted(verdicts.stopping):
            self._end(self.records.trials[number], "stopped", "")
        for number in sorted(verdicts.continuing & self.standings.waiting):
            record = self.records.trials[number]
            record.state = "running"
            self._note_change(record)
            self.ready.append(number)

    def _end(self, record: TrialRecord, status: str, error: str) -> None:
        """End a trial and tell the search, which so knows what a plan knows that is made anew from the records."""
        record.state, record.status, record.error = "ended", status, error
        self._note_change(record)
        self._tell_search(record)

    def _note_change(self, record: TrialRecord) -> None:
        self._changes[record.number] = record
        self._update_standing(record)

    def _update_standing(self, record: TrialRecord) -> None:
        """Note what the scheduler sees of a trial."""
        if record.status in FAILED_STATUSES:
            self.standings.remove(record.number)
        else:
            self.standings.put(_standing_of(record))

    def _tell_search(self, record: TrialRecord) -> None:
        if record.status != "interrupted":
            scores = (
                None if record.status in FAILED_STATUSES else signed_objectives(self.config.metric, record.objectives)
            )
            self.search.tell(record.number, record.values, scores)


def _standing_of(record: TrialRecord) -> TrialStanding:
    state: Any = record.state
    donors = {exploit["at"]: exploit["donor"] for exploit in record.exploits}
    return TrialStanding(record.number, state, record.scores, record.values, record.history, donors)
