"""The driver of a training run: it runs the loop on Ray Train, tracks it, and registers the best bundle.

`ray.train.torch.prepare_model` is not used: it wraps FSDP1 and refuses CPUs. The learner calls FSDP2 itself.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, named, one_line
from marl_ray.ray_seams import failures_of, for_ray_of_one_run, unwrapped, watched_workers
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.checkpoints.index import BUNDLE, best_whole, checkpoints_in, kept, published
from marl_ray.training.checkpoints.manifest import withdraw
from marl_ray.training.checkpoints.origin import source_of
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.journal.deliveries import ALL_TAKEN, END_S, MLFLOW, BestBundle, Deliveries, incomplete
from marl_ray.training.journal.delivery import read_mark
from marl_ray.training.journal.follower import Follower
from marl_ray.training.journal.mlflow_sink import MlflowSink
from marl_ray.training.journal.repair import repair
from marl_ray.training.journal.writer import write_failure
from marl_ray.training.run_folder.bundle_link import link_bundle, linked_bundle
from marl_ray.training.run_folder.lease import Lease
from marl_ray.training.run_folder.metrics_file import history_of, read_metrics
from marl_ray.training.run_folder.record import (
    FINISHED,
    ORIGIN,
    config_record,
    filesystem_of,
    identity_hash,
    pin_bundles,
    record_of,
    storage_of,
    traceback_of,
    write_record,
)
from marl_ray.training.run_folder.run_log import RunLog
from marl_ray.training.surroundings.cluster_capacity import check_capacity
from marl_ray.training.surroundings.full_disk import disk_full
from marl_ray.training.surroundings.interruption import INTERRUPTS, LEAVE_S, answering, within
from marl_ray.training.surroundings.torch_trainer import torch_trainer
from marl_ray.training.surroundings.worker_watch import WorkerWatch, exchange_s, spoken
from marl_ray.training.tracking.curve_plot import panels_of, plot_benchmarks, plot_run, title_of
from marl_ray.training.tracking.mlflow_run import uri_of
from marl_ray.training.tracking.other_sinks import open_sinks
from marl_ray.training.tracking.summary import benchmark_lines, best_score_of, run_summary
from marl_ray.training.worker import REFUSED, STOPPED, worker


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    name: str
    model: str
    """`models:/name/version`, which names the best bundle in MLflow's registry; empty while MLflow has not registered it.
    The same command does that when MLflow answers."""
    bundle: str
    """The link to the best bundle in the run's folder, or the bundle's URI on remote storage."""
    curve: Path | None
    """Learning curve, where the storage is local."""
    tracking_uri: str
    run_id: str
    best_return: float | None
    """Mean return of the best bundle. It is measured on other episodes than those that chose the bundle, and on
    training episodes if the run has no evaluations; None if nothing was played."""
    metrics: dict[str, float]
    """The metrics of the last iteration."""
    summary: list[str]
    """Lines for people about the best policy and the last one."""
    trained: bool = True
    """False if the run had played all its steps already."""


def finished(config: RunConfig) -> RunResult | None:
    """Return the result of a run that has played `train.total_steps` already, and None for any other run.

    Raises MarlRayError if the folder under its name is another run's.
    """
    ended = record_of(config).get(FINISHED)
    if ended is None or ended["total_steps"] < config.train.total_steps:
        return None
    outcome, (filesystem, folder) = ended["outcome"], filesystem_of(config)
    # The folder may have been copied or moved since.
    curve = None if outcome["curve"] is None else Path(outcome["curve"])
    if curve is not None and Path(folder, curve.name).exists():
        curve = Path(folder, curve.name)
    bundle = linked_bundle(filesystem, folder) or outcome["bundle"]
    return RunResult(**outcome | {"curve": curve, "bundle": bundle}, trained=False)


def delivered(config: RunConfig, result: RunResult) -> RunResult:
    """Deliver what the sinks have not got of a finished run, and register its bundle if it is not registered yet; returns
    the result with the bundle's name in the registry. It trains nothing and needs no Ray."""
    filesystem, folder = filesystem_of(config)
    try:
        names = incomplete(config, filesystem, folder)
    except OSError:  # a folder that cannot be read has nothing to deliver
        return result
    if not names:
        return result
    with RunLog(config) as console, Lease(filesystem, folder, f"run {config.name!r}") as lease:
        console.open()
        console.phase(f"delivering the rest to {', '.join(names)}")
        record = record_of(config)
        deliveries = Deliveries(
            config, result.run_id, filesystem, folder, console.say, {}, names=names, owns=lease.owns
        )
        return _closed(config, record, result, deliveries)


def _closed(config: RunConfig, record: dict[str, Any], result: RunResult, deliveries: Deliveries) -> RunResult:
    """Close the sinks of a finished run, and note its bundle's name in the registry."""
    filesystem, folder = filesystem_of(config)
    bundle = BestBundle(linked_bundle(filesystem, folder) or result.bundle, record[FINISHED].get("score"))
    model = deliveries.close(ALL_TAKEN, bundle, model=result.model)
    run_id = (
        read_mark(filesystem, folder, MLFLOW).run_id or result.run_id
    )  # another one if MLflow did not know the first
    if (model, run_id) != (result.model, result.run_id):
        result = replace(result, model=model, run_id=run_id)
        record[FINISHED]["outcome"] |= {"model": model, "run_id": run_id}
        record["mlflow_run_id"] = run_id
        write_record(config, record)
    return result


def train(config: RunConfig, console: RunLog | None = None, own_ray: bool = False) -> RunResult:
    """Run to the end on the Ray that this process is connected to. A run that is finished is not run again, but what its
    sinks have not got is delivered. `console` holds the lines of what came before. `own_ray` says that this Ray ends
    where the run fails, so that nothing needs to be freed on it.

    Raises MarlRayError with the cause of a failure, and where another process owns the name. On Ctrl-C and SIGTERM it prints
    which checkpoint is kept, and raises.
    """
    before = finished(config)
    if before is not None:
        return delivered(config, before)
    use_gpu = check_capacity(config)
    filesystem, folder = filesystem_of(config)
    with (
        console or RunLog(config) as log,
        Lease(filesystem, folder, f"run {config.name!r}") as lease,
        spoken(log.say) as notes,
    ):
        record = record_of(config)
        resumes = bool(checkpoints_in(StoredFolder(filesystem, folder)))
        last = _last_iteration(config, record) if resumes else None
        for line in repair(filesystem, folder, last, ORIGIN in record):
            log.say(line)
        if config.resume_from is not None and not resumes:
            record[ORIGIN] = source_of(config)
        # Where a run begins, a tracking server that does not answer is most likely a mistake in its address.
        run_id = read_mark(filesystem, folder, MLFLOW).run_id or record.get("mlflow_run_id")
        record["mlflow_run_id"] = run_id
        opened = {} if resumes and run_id else {MLFLOW: MlflowSink(config, run_id, filesystem, folder)}
        return _train(config, record, opened, use_gpu, log, lease, notes, own_ray)


def _last_iteration(config: RunConfig, record: dict[str, Any]) -> int | None:
    """The last iteration that a checkpoint of the run covers; None where there is none."""
    identity = identity_hash(RunConfig.model_validate(pin_bundles(config, record)))
    checkpoints = published(StoredFolder(*filesystem_of(config)))
    own = [each.manifest.iteration for each in checkpoints if each.manifest.identity == identity]
    return max(own, default=None)


def _train(
    config: RunConfig,
    record: dict[str, Any],
    opened: dict[str, Any],
    use_gpu: bool,
    console: RunLog,
    lease: Lease,
    notes: Path,
    own_ray: bool,
) -> RunResult:
    import ray

    filesystem, folder = filesystem_of(config)
    status, shield = "FAILED", contextlib.ExitStack()
    controllers: list[Any] = []
    follower: Follower | None = None
    deliveries: Deliveries | None = None
    try:
        shield.enter_context(answering(lambda: say_kept(config, console)))
        tags = {"resume_from": record[ORIGIN]} if ORIGIN in record else {}
        if opened:
            record["mlflow_run_id"] = opened[MLFLOW].run_id
            opened[MLFLOW].tracker.tag(tags)
        run_id = record["mlflow_run_id"]
        record |= config_record(config)
        pinned = pin_bundles(config, record)
        write_record(config, record)
        console.open()
        workers = config.resources.workers
        console.phase(f"{workers} worker{'s' * (workers > 1)} on {'GPU' if use_gpu else 'CPU'}")
        if opened:
            opened |= open_sinks(config, run_id)
        payload = {
            "config": pinned,
            "run_id": run_id,
            "tracking_uri": uri_of(config),
            "folder": os.getcwd(),
            "origin": record.get(ORIGIN),
            "lease": lease.number,
        }
        trainer = torch_trainer(
            worker,
            payload,
            config,
            label=config.name,
            name=config.name,
            storage=storage_of(config),
            use_gpu=use_gpu,
            exchange_s=exchange_s(config),
            begun=controllers.append,
            callbacks=[_noting_failures(filesystem, folder), watched_workers(WorkerWatch(notes))],
        )
        if own_ray:
            for_ray_of_one_run(trainer)
        lease.when_lost = lambda: [ray.kill(controller) for controller in controllers]
        deliveries = Deliveries(config, run_id, filesystem, folder, console.say, opened, tags, owns=lease.owns)
        follower = Follower(config, filesystem, folder, console, deliveries.watch)
        result: Any = trainer.fit()
        follower.close()
        lease.check()
        if refused := (result.return_value or {}).get(REFUSED):
            raise MarlRayError(f"run {config.name!r} failed: {refused}")
        stopped = (result.return_value or {}).get(STOPPED)
        if stopped:
            raise MarlRayError(f"run {config.name!r} stopped at {stopped}; its last checkpoint is kept in {folder}")
        outcome, score = _finish(config, run_id, result, console)
        plain = asdict(outcome) | {"curve": None if outcome.curve is None else str(outcome.curve)}
        plain.pop("trained")
        record[FINISHED] = {"total_steps": config.train.total_steps, "outcome": plain, "score": score}
        write_record(config, record)
        console.phase("registering the best bundle")
        outcome = _closed(config, record, outcome, deliveries)
        status = "FINISHED"
        console.write("finished", *outcome.summary)
        return outcome
    except ray.train.TrainingFailedError as error:
        where = traceback_of(config, failures_of(error))
        more = f"; its traceback is in {where}" if where else ""
        raise MarlRayError(f"run {config.name!r} failed: {cause(error)}{more}") from error
    except OSError as error:
        full = disk_full(error, storage_of(config))
        raise MarlRayError(f"run {config.name!r} failed: {full}") if full else error from error
    except INTERRUPTS:
        status = "KILLED"
        for controller in controllers:  # the controller's workers end with it
            ray.kill(controller)
        raise
    finally:
        with shield:
            if follower is not None:
                follower.close()
            if not lease.owns():
                if deliveries is not None:
                    deliveries.disown()
            elif deliveries is None and opened:
                within(LEAVE_S, lambda: opened[MLFLOW].end(status))
            elif deliveries is not None and status != "FINISHED":
                deliveries.close(status, wait_s=LEAVE_S if status == "KILLED" else END_S)


def _noting_failures(filesystem: fs.FileSystem, folder: str) -> Any:
    """A callback of Ray Train that writes the cause of each failure of the workers to the run's `folder`. Ray Train itself
    starts the workers again without a word."""
    from ray.train import UserCallback

    class NotingFailures(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, BaseException]) -> None:
            write_failure(filesystem, folder, unwrapped(worker_exceptions))

    return NotingFailures()


def say_kept(config: RunConfig, console: RunLog) -> None:
    """Print which checkpoint the same command will continue from."""
    console.say(f"interrupted; {kept(config)}")


def _finish(config: RunConfig, run_id: str, result: Any, console: RunLog) -> tuple[RunResult, float | None]:
    """Draw the curves; returns the run's result, whose bundle is not registered yet, and the bundle's score."""

    filesystem, folder = filesystem_of(config)
    checkpoint, damaged = best_whole(published(StoredFolder(filesystem, folder)))
    for place, line in damaged:
        console.say(line)
        withdraw(place)
    if checkpoint is None:
        more = "; the same command makes one of the last weights" if damaged else ""
        raise MarlRayError(f"run {config.name!r} failed: {folder} has no checkpoint with a bundle{more}")
    bundle, best_metrics = f"{checkpoint.place}/{BUNDLE}", dict(checkpoint.manifest.metrics)
    with contextlib.suppress(OSError):  # some file systems have no links
        link_bundle(filesystem, folder, checkpoint.name, f"{storage_of(config)}/{config.name}")
    history = partial(history_of, read_metrics(filesystem, folder))
    with temporary_folder("plots") as temporary:
        curve = plot_run(panels_of(config, history), temporary / "return.png", title_of(config))
        benchmarks = plot_benchmarks(config, history, temporary / "benchmarks.png")
        for picture in filter(None, (curve, benchmarks)):
            try:
                with filesystem.open_output_stream(f"{folder}/{picture.name}") as target:
                    target.write(picture.read_bytes())
            except OSError as error:  # a finished run does not fail by its pictures
                console.say(f"{picture.name} cannot be written: {one_line(error)}")
    is_local = "://" not in config.storage
    last = result.return_value or {}
    outcome = RunResult(
        name=config.name,
        model="",
        bundle=linked_bundle(filesystem, folder) or bundle,
        curve=Path(folder) / "return.png" if is_local else None,
        tracking_uri=uri_of(config),
        run_id=run_id,
        best_return=best_metrics.get("best/return", best_metrics.get("return")),
        metrics=last,
        summary=[*run_summary(config, best_metrics, last), *benchmark_lines(config, history)],
    )
    return outcome, best_score_of(config, best_metrics)


def cause(error: BaseException) -> str:
    """The first line of the error that a worker raised, without the wrappers around it."""
    failures = failures_of(error)
    error = getattr(error, "controller_failure", error)
    if isinstance(error, MarlRayError):
        return str(error)
    return _first(failures) if failures else one_line(error)


def _first(failures: Mapping[int, BaseException]) -> str:
    rank, failure = next(iter(failures.items()))
    return f"worker {rank}: {named(failure)}"
