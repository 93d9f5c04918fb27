"""The driver of a sweep: it checks the config, claims the folder, and runs or continues the sweep.

Tune runs and retries legs: a Tune trial is one leg of one trial of the sweep, from its checkpoint to the next decision
point. `SweepPlan` decides which leg is next, and `SweepLegs`, which Tune asks, carries its decisions out. Tune's own
schedulers are not used: with Ray Train V2 they see no checkpoints, so pausing or copying a trial does not work. Tune also
pickles their state and its own, and `Tuner.restore` reads that; the sweep's records are JSON.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError, describe_error, one_line
from marl_ray.stored_files.folder_kinds import SWEEP_FILE, SWEEP_KIND, refuse_other_kind
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.training.machines.interruption import interrupt_handler
from marl_ray.training.run_checks import check_trial
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records import SweepRecords, TrialRecord, identity_of
from marl_ray.tuning.records_file import LeasedRecords, RecordsFile, load_records
from marl_ray.tuning.reporting.ending import ending_document, ending_lines
from marl_ray.tuning.reporting.tracking import SweepTracking
from marl_ray.tuning.running.capacity import TrialResources, count_slots
from marl_ray.tuning.running.sweep_legs import SweepLegs
from marl_ray.tuning.search.plan import SweepPlan, retry_failed
from marl_ray.tuning.search.spaces import check_space
from marl_ray.tuning.winner import choose_winner


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
    first = SEARCHES[config.search.kind](config).propose(0)
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
    tracking = SweepTracking(config, folder, records, lease.owns)
    saved = LeasedRecords(RecordsFile(folder, records), lease, tracking.warn)
    plan = SweepPlan(config, records)
    report = ""
    shield = ExitStack()
    try:
        shield.enter_context(interrupt_handler(tracking.say_interrupted))
        if plan.has_work():
            legs = SweepLegs(config, records, plan, saved, tracking, lease.lost)
            # Once more after Ray has started, because Ray replaces signal handlers at its start.
            with cluster(), interrupt_handler(tracking.say_interrupted), tracking.progress:
                _run_legs(legs, retried)
        else:
            plan.stop_clock()
        lease.check()
        records.seconds, budget = plan.seconds(), plan.used_up()
        records.status, records.error = ("interrupted", f"{budget} is used up") if budget else ("finished", "")
        winner = choose_winner(config, records, tracking.mlflow_runs.register, tracking.warn)
        saved.save(*([] if winner is None else [winner]))
    except Exception as error:
        records.status, records.error = "failed", describe_error(error)
        raise
    except BaseException:
        records.status, records.error = "interrupted", "by a person; the same command continues it"
        raise
    finally:
        with shield:
            if not lease.owns():
                tracking.leave()
            else:
                records.seconds = plan.seconds()
                saved.save_all()
                report = tracking.close()
    return SweepResult(config.name, folder.uri, records, report)


def _run_legs(legs: SweepLegs, retried: Sequence[TrialRecord]) -> None:
    """Run the legs that the plan decides on, until it has none or the budget is used up.

    If the cluster can run none of the trials that are left, those that are `retried` end as refused again, and
    MarlRayError is raised for the others, which stay as they are.
    """
    from marl_ray.tuning.running.ray_tune import run_legs

    need, reason = legs.needs.biggest(legs.plan.values_left())
    if need is None and reason:
        for record in retried:
            legs.refuse_unfit(record)
        if legs.plan.has_work():
            raise MarlRayError(reason)
        return
    slots = count_slots(need or TrialResources(1, 1.0, False))
    run_legs(min(slots, legs.config.max_concurrent or sys.maxsize), legs)


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
