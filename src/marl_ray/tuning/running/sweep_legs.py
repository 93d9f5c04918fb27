"""The legs of a sweep while its driver runs: what Ray Tune asks for, and what it reports, in the sweep's own terms."""

import os
import threading
from collections.abc import Callable

from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonMapping
from marl_ray.stored_files.storages import absolute_storage
from marl_ray.tuning.folder import trial_folder
from marl_ray.tuning.records import SweepRecords, TrialRecord, values_line
from marl_ray.tuning.records_file import LeasedRecords
from marl_ray.tuning.reporting.tracking import SweepTracking
from marl_ray.tuning.running.trial_files import Leg, Takeover, take_over
from marl_ray.tuning.running.trial_needs import TrialNeeds
from marl_ray.tuning.search.plan import Pause, SweepPlan
from marl_ray.tuning.search.schedulers import TrialVerdicts


class SweepLegs:
    """Carries out what a sweep's plan decides, saves the records that change, and passes on what the legs report."""

    def __init__(
        self,
        config: SweepConfig,
        records: SweepRecords,
        plan: SweepPlan,
        saved: LeasedRecords,
        tracking: SweepTracking,
        lost: threading.Event,
    ):
        """`lost` is set once another process owns the sweep."""
        self.config = config
        self.records = records
        self.plan = plan
        self.needs = TrialNeeds(config)
        self.saved = saved
        self.tracking = tracking
        self.lost = lost

    def __getstate__(self) -> dict[str, object]:
        """Return an empty state, because Tune pickles its callbacks into a file that is never read."""
        return {}

    def is_over(self) -> bool:
        """Return True if another process owns the sweep, or its budget is used up."""
        return self.lost.is_set() or bool(self.plan.used_up())

    def next_leg(self) -> Leg | Pause:
        """Begin the next leg that the plan decides on, and return it, or the reason why none is to run now."""
        while True:
            step = self.plan.next_step()
            if isinstance(step, TrialVerdicts):
                failures = copy_weights(self.config, self.records, step, self.tracking.say)
                self.plan.apply_verdicts(step, failures)
            self._show_changes()
            if isinstance(step, Pause):
                return step
            if isinstance(step, TrialRecord) and not self.refuse_unfit(step):
                leg = self._begin_leg(step)
                # A driver that is killed must find the record: a new trial would get its number, and so find its files.
                self.saved.save(step, durable=True)
                return leg

    def refuse_unfit(self, record: TrialRecord) -> bool:
        """End a trial that does not run as refused if the cluster can never run it; return False if it can."""
        try:
            self.needs.check(record.values)
        except MarlRayError as error:
            self.plan.refuse(record, str(error))
            self._show_changes()
            return True
        return False

    def note_rows(self, leg: Leg, rows: list[dict[str, float]]) -> None:
        """Note rows of metrics that a leg has sent."""
        last, record = rows[-1], self.records.trials[leg.number]
        names = [f"objective/{metric.name}" for metric in self.config.metric]
        objectives = [last[name] for name in names] if all(last.get(name) is not None for name in names) else None
        self.plan.note_progress(leg.number, {"steps": int(last["steps"]), "played": int(last["played"])}, objectives)
        self.saved.mark(record)
        self.tracking.log_rows(record, leg.name, rows)

    def say(self, leg: Leg, line: str) -> None:
        """Print a line that a leg has sent for the user."""
        self.tracking.warn(f"trial {leg.number:04d}: {line}")

    def note_end(self, leg: Leg, result: JsonMapping | None, is_lost: bool) -> None:
        """Note that a leg has ended, with a result unless its process was lost (`is_lost`)."""
        self.tracking.end_leg(leg.name)
        loss = {"error": "its process was lost again and again"} if is_lost else {}
        self.plan.note_leg_end(leg.number, result or loss or None, is_lost, leg.until)
        self._show_changes()

    def _show_changes(self) -> None:
        """Save and show the records that the plan has changed."""
        changes = self.plan.take_changes()
        if changes:
            self.saved.save(*changes)
            self.tracking.show_changes(changes)

    def _begin_leg(self, record: TrialRecord) -> Leg:
        """Begin the record's next leg, with a run config for each seed."""
        configs = []
        for seed in self.config.seeds:
            name_and_seed = {"name": f"{self.config.name}-{record.number:04d}-seed-{seed}", "seed": seed}
            configs.append(
                self.needs.run_config(record.values).model_copy(update=name_and_seed).as_given() | name_and_seed
            )
        need = self.needs.need(record.values)
        self.plan.begin_leg(record, configs, need.total["CPU"], need.total.get("GPU", 0.0))
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
            tracking_uri=self.tracking.mlflow_runs.uri,
            folder=os.getcwd(),
        )


def copy_weights(
    config: SweepConfig, records: SweepRecords, verdicts: TrialVerdicts, say: Callable[[str], None]
) -> dict[int, str]:
    """Copy the donors' checkpoints and bundles into the folders of the trials that take them over.

    All of these trials wait, so no process writes there. `say` gets a line about each takeover. Returns the reason, such
    as a full disk or a damaged file, of each trial that could not take over its donor's weights, by its number; its
    folder may hold a part of the donor's bundles.
    """
    failures: dict[int, str] = {}
    for number, exploit in verdicts.exploits.items():
        at = max(records.trials[number].scores)
        target, source = (trial_folder(config.storage, config.name, each) for each in (number, exploit.donor))
        try:
            is_new = take_over(target, source, Takeover(at, exploit.donor, dict(exploit.values)))
        except (OSError, MarlRayError) as error:
            failures[number] = f"exploit of trial {exploit.donor:04d}: {one_line(error)}"
            continue
        if is_new:
            say(f"trial {number:04d} takes over {exploit.donor:04d} at {at:,} steps: {values_line(exploit.values)}")
    return failures
