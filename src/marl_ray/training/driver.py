"""The driver of a training run.

It runs the loop on Ray Train, tracks it, and registers the best bundle. `ray.train.torch.prepare_model` is not used: it
wraps FSDP1 and refuses CPUs. The learner calls FSDP2 itself.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, describe_error, one_line
from marl_ray.json_types import JsonObject
from marl_ray.ray_seams import end_controllers, skip_cleanup_processes, unwrap_failures, worker_failures
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.training.checkpoints.index import checkpoints_in, kept_line, published_checkpoints, resume_line
from marl_ray.training.checkpoints.origin import source_of
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.journal.deliveries import END_S, FINISHED_STATUS, MLFLOW, OPEN_S, Deliveries
from marl_ray.training.journal.delivery import read_mark
from marl_ray.training.journal.follower import Follower
from marl_ray.training.journal.mlflow_sink import MlflowSink
from marl_ray.training.journal.repair import repair_metrics
from marl_ray.training.journal.writer import write_failure
from marl_ray.training.machines.cluster_capacity import check_capacity
from marl_ray.training.machines.full_disk import find_full_disk
from marl_ray.training.machines.interruption import INTERRUPTS, LEAVE_S, interrupt_handler, run_within
from marl_ray.training.machines.ray_variables import exchange_s
from marl_ray.training.machines.torch_trainer import torch_trainer
from marl_ray.training.machines.worker_watch import follow_notes
from marl_ray.training.run_folder.record import (
    ORIGIN_KEY,
    RunRecord,
    config_record,
    filesystem_of,
    identity_hash,
    pin_bundles,
    record_of,
    storage_of,
    write_record,
)
from marl_ray.training.run_folder.run_log import RunLog
from marl_ray.training.run_folder.tracebacks import traceback_of
from marl_ray.training.run_result import (
    RunResult,
    deliver_rest,
    make_result,
    read_finished_result,
    register_bundle,
    store_result,
)
from marl_ray.training.tracking.mlflow_run import uri_of
from marl_ray.training.worker import REFUSED_KEY, STOPPED_KEY, WorkerPayload, train_in_worker

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer


@dataclass(frozen=True)
class _Attempt:
    """The inputs of one attempt of the driver to train a run to its end."""

    config: RunConfig
    record: RunRecord
    console: RunLog
    lease: Lease
    mlflow_sink: MlflowSink | None
    """MLflow's sink, open, where the run begins; None where it continues."""
    controllers: list[Any] = field(default_factory=list)
    """Ray's actors that control the workers; the workers end with them."""

    @property
    def folder(self) -> StoredFolder:
        return StoredFolder(*filesystem_of(self.config))


@dataclass(frozen=True)
class _AnnouncedRun:
    """A run whose record is written and whose sinks are being opened."""

    run_id: str
    """Its id in MLflow."""
    pinned: JsonObject
    """Its config with the versions of its bundles."""
    deliveries: Deliveries


def train(config: RunConfig, console: RunLog | None = None, own_ray: bool = False) -> RunResult:
    """Run to the end on the Ray that this process is connected to.

    A run that is finished is not run again, but what its sinks have not got is delivered. `console` holds the
    lines of what came before. `own_ray` says that this Ray ends where the run fails, so that nothing needs to be
    freed on it.

    Raises MarlRayError with the cause of a failure, and where another process owns the name. On Ctrl-C and SIGTERM it
    prints which checkpoint is kept, and raises.
    """
    before = read_finished_result(config)
    if before is not None:
        return deliver_rest(config, before)
    use_gpu = check_capacity(config)
    filesystem, folder = filesystem_of(config)
    with (
        console or RunLog(config) as log,
        Lease(filesystem, folder, f"run {config.name!r}") as lease,
        follow_notes(log.say) as notes,
    ):
        record = record_of(config)
        resumes = bool(checkpoints_in(StoredFolder(filesystem, folder)))
        last = _last_iteration(config, record) if resumes else None
        for line in repair_metrics(filesystem, folder, last, ORIGIN_KEY in record):
            log.say(line)
        if not resumes and (source := source_of(config)) is not None:
            record[ORIGIN_KEY] = source
        run_id = read_mark(filesystem, folder, MLFLOW).run_id or record.get("mlflow_run_id")
        record["mlflow_run_id"] = run_id
        # Where a run begins, a tracking server that does not answer is most likely a mistake in its address.
        mlflow_sink = None if resumes and run_id else MlflowSink(config, run_id, filesystem, folder)
        return _train(_Attempt(config, record, log, lease, mlflow_sink), use_gpu, notes, own_ray)


def _last_iteration(config: RunConfig, record: RunRecord) -> int | None:
    """Return the last iteration that a checkpoint of the run covers; None where there is none."""
    identity = identity_hash(RunConfig.model_validate(pin_bundles(config, record)))
    checkpoints = published_checkpoints(StoredFolder(*filesystem_of(config)))
    iterations = [each.manifest.iteration for each in checkpoints if each.manifest.identity == identity]
    return max(iterations, default=None)


def _train(attempt: _Attempt, use_gpu: bool, notes: Path, own_ray: bool) -> RunResult:
    """Train to the end, and close what the attempt has opened, however it ends."""
    status, shield = "FAILED", contextlib.ExitStack()
    announced: _AnnouncedRun | None = None
    follower: Follower | None = None
    try:
        shield.enter_context(interrupt_handler(lambda: say_kept_checkpoint(attempt.config, attempt.console)))
        with _name_causes(attempt.config):
            announced = _announce(attempt, use_gpu)
            if attempt.mlflow_sink is not None:
                announced.deliveries.check_open(OPEN_S)
            trainer = _make_trainer(attempt, announced, use_gpu, notes)
            if own_ray:
                skip_cleanup_processes(trainer)
            attempt.lease.when_lost = lambda: end_controllers(attempt.controllers)
            follower = Follower(attempt.config, *attempt.folder, attempt.console, announced.deliveries.watch)
            last = _fit(attempt, trainer, follower)
            result = _finish(attempt, announced, last)
        status = FINISHED_STATUS
        attempt.console.write("finished", *result.summary)
        return result
    except INTERRUPTS:
        status = "KILLED"
        end_controllers(attempt.controllers)
        raise
    finally:
        with shield:
            _close(attempt, announced, follower, status)


def _announce(attempt: _Attempt, use_gpu: bool) -> _AnnouncedRun:
    """Write the run's record and the first line about it, and begin to open the sinks."""
    config, record, mlflow_sink = attempt.config, attempt.record, attempt.mlflow_sink
    tags = {"resume_from": record[ORIGIN_KEY]} if ORIGIN_KEY in record else {}
    if mlflow_sink is not None:
        record["mlflow_run_id"] = mlflow_sink.run_id
        mlflow_sink.mlflow_run.tag(tags)
    record |= config_record(config)
    pinned = pin_bundles(config, record)
    write_record(config, record)
    attempt.console.open()
    workers = config.resources.workers
    attempt.console.phase(f"{workers} worker{'s' * (workers > 1)} on {'GPU' if use_gpu else 'CPU'}")
    run_id = record["mlflow_run_id"]
    assert run_id is not None  # a run that continues has one, another gets it from its sink
    deliveries = Deliveries(
        config,
        run_id,
        *attempt.folder,
        attempt.console.say,
        {} if mlflow_sink is None else {MLFLOW: mlflow_sink},
        tags,
        owns=attempt.lease.owns,
        is_new_run=mlflow_sink is not None,
    )
    return _AnnouncedRun(run_id, pinned, deliveries)


def _make_trainer(attempt: _Attempt, announced: _AnnouncedRun, use_gpu: bool, notes: Path) -> "TorchTrainer":
    """Return the trainer of Ray Train whose workers train the run."""
    config = attempt.config
    payload = WorkerPayload(
        config=announced.pinned,
        run_id=announced.run_id,
        tracking_uri=uri_of(config),
        folder=os.getcwd(),
        origin=attempt.record.get(ORIGIN_KEY),
        lease=attempt.lease.number,
    )
    return torch_trainer(
        train_in_worker,
        asdict(payload),
        config,
        label=config.name,
        name=config.name,
        storage=storage_of(config),
        use_gpu=use_gpu,
        exchange_s=exchange_s(config),
        notes=notes,
        begun=attempt.controllers.append,
        callbacks=[_failure_callback(*attempt.folder)],
    )


def _fit(attempt: _Attempt, trainer: "TorchTrainer", follower: Follower) -> dict[str, float]:
    """Train while the sinks get the run's rows, and return the metrics of the last iteration."""
    config = attempt.config
    result: Any = trainer.fit()
    returned = result.return_value or {}
    follower.close()
    attempt.lease.check()
    if REFUSED_KEY in returned:
        raise MarlRayError(f"run {config.name!r} failed: {returned[REFUSED_KEY]}")
    if STOPPED_KEY in returned:
        raise MarlRayError(f"run {config.name!r} stopped at {returned[STOPPED_KEY]}; {kept_line(config)}")
    return dict(returned)


def _finish(attempt: _Attempt, announced: _AnnouncedRun, last: dict[str, float]) -> RunResult:
    """Make the run's result, store it, and register the bundle, while no other process has taken the run."""
    config, record = attempt.config, attempt.record
    result, score = make_result(config, announced.run_id, last, attempt.console)
    attempt.lease.check()
    store_result(config, record, result, score)
    attempt.console.phase("registering the best bundle")
    return register_bundle(config, record, result, announced.deliveries, attempt.lease)


def _close(attempt: _Attempt, announced: _AnnouncedRun | None, follower: Follower | None, status: str) -> None:
    """Stop the follower, and close the sinks with the status of the attempt.

    Another owner's sinks are left alone.
    """
    if follower is not None:
        follower.close()
    owns, mlflow_sink = attempt.lease.owns(), attempt.mlflow_sink
    if announced is None:
        if owns and mlflow_sink is not None:
            run_within(LEAVE_S, lambda: mlflow_sink.end(status))
    elif not owns:
        announced.deliveries.abandon()
    elif status != FINISHED_STATUS:
        announced.deliveries.close(status, wait_s=LEAVE_S if status == "KILLED" else END_S)


@contextlib.contextmanager
def _name_causes(config: RunConfig) -> Iterator[None]:
    """Turn errors of Ray Train and of a full disk into MarlRayErrors that name their cause, within the block."""
    import ray.train

    try:
        yield
    except ray.train.TrainingFailedError as error:
        where = traceback_of(config, worker_failures(error))
        more = f"; its traceback is in {where}" if where else ""
        raise MarlRayError(f"run {config.name!r} failed: {describe_cause(error)}{more}") from error
    except OSError as error:
        full = find_full_disk(error, storage_of(config))
        if full is None:
            raise
        raise MarlRayError(f"run {config.name!r} failed: {full}") from error


def _failure_callback(filesystem: fs.FileSystem, folder: str) -> Any:
    """Return a callback of Ray Train that writes the cause of each failure of the workers to `folder`.

    The folder is the run's. Ray Train itself starts the workers again without a word.
    """
    from ray.train import UserCallback

    class FailureWriter(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, BaseException]) -> None:
            write_failure(filesystem, folder, unwrap_failures(worker_exceptions))

    return FailureWriter()


def say_kept_checkpoint(config: RunConfig, console: RunLog) -> None:
    """Print which checkpoint the same command will continue from."""
    console.say(f"interrupted; {resume_line(config)}")


def describe_cause(error: BaseException) -> str:
    """Return the first line of the error that a worker raised, without the wrappers around it."""
    failures = worker_failures(error)
    error = getattr(error, "controller_failure", error)
    if isinstance(error, MarlRayError):
        return str(error)
    return _describe_first_failure(failures) if failures else one_line(error)


def _describe_first_failure(failures: Mapping[int, BaseException]) -> str:
    """Return a line about the first of the failures, which are rank -> error."""
    rank, failure = next(iter(failures.items()))
    return f"worker {rank}: {describe_error(failure)}"
