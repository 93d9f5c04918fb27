"""The driver of a training run: it runs the loop on Ray Train, tracks it, and registers the best bundle.

`ray.train.torch.prepare_model` is not used: it wraps FSDP1 and refuses CPUs. The learner calls FSDP2 itself.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, named, one_line
from marl_ray.ray_seams import (
    failures_of,
    give_up_silent_workers,
    named_workers,
    poll_often,
    unwrapped,
    watched_workers,
    without_datasets,
    without_own_interrupts,
)
from marl_ray.training.checkpoints.index import BUNDLE, best, checkpoints_in, kept, published
from marl_ray.training.checkpoints.origin import source_of
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.run_folder.bundle_link import link_bundle, linked_bundle
from marl_ray.training.run_folder.lease import Lease
from marl_ray.training.run_folder.metrics_file import METRICS, MetricsFile
from marl_ray.training.run_folder.record import (
    config_record,
    filesystem_of,
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
from marl_ray.training.surroundings.worker_watch import WorkerWatch, exchange_s, spoken
from marl_ray.training.tracking.curve_plot import panels_of, plot_benchmarks, plot_run, title_of
from marl_ray.training.tracking.metrics_log import DRAIN_S, MetricsLog
from marl_ray.training.tracking.mlflow_run import Tracker
from marl_ray.training.tracking.other_sinks import Sink, open_sinks
from marl_ray.training.tracking.rows_to_driver import FAILURE, metrics_queue
from marl_ray.training.tracking.summary import benchmark_lines, best_score_of, run_summary
from marl_ray.training.worker import REFUSED, STOPPED, worker

FINISHED = "finished"
"""Key of the run's record for its result, which is stored when the run has played all its steps."""

ORIGIN = "origin"
"""Key of the run's record for the checkpoint that `resume_from` named when the run last began without one of its own."""


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    name: str
    model: str
    """`models:/name/version`, which names the best bundle in MLflow's registry."""
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


def train(config: RunConfig, console: RunLog | None = None) -> RunResult:
    """Run to the end on the Ray that this process is connected to; a run that is finished is not run again. `console` holds
    the lines of what came before.

    Raises MarlRayError with the cause of a failure, and where another process owns the name. On Ctrl-C and SIGTERM it prints
    which checkpoint is kept, and raises.
    """
    before = finished(config)
    if before is not None:
        return before
    use_gpu = check_capacity(config)
    filesystem, folder = filesystem_of(config)
    with (
        console or RunLog(config) as log,
        Lease(filesystem, folder, f"run {config.name!r}") as lease,
        spoken(log.say) as notes,
    ):
        record = record_of(config)
        if config.resume_from is not None and not checkpoints_in(StoredFolder(filesystem, folder)):
            record[ORIGIN] = source_of(config)
        tracker = Tracker(config, record.get("mlflow_run_id"))
        return _train(config, record, tracker, use_gpu, log, lease, notes)


def _train(
    config: RunConfig,
    record: dict[str, Any],
    tracker: Tracker,
    use_gpu: bool,
    console: RunLog,
    lease: Lease,
    notes: Path,
) -> RunResult:
    import ray
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    filesystem, folder = filesystem_of(config)
    status, shield = "FAILED", contextlib.ExitStack()
    sinks: dict[str, Sink] = {}
    controllers: list[Any] = []
    queue: Any = None
    log: MetricsLog | None = None
    try:
        shield.enter_context(answering(lambda: say_kept(config, console)))
        tracker.reopen()
        if ORIGIN in record:
            tracker.tag({"resume_from": record[ORIGIN]})
        record |= {"mlflow_run_id": tracker.run_id, **config_record(config)}
        pinned = pin_bundles(config, record)
        write_record(config, record)
        console.open()
        workers = config.resources.workers
        console.phase(f"{workers} worker{'s' * (workers > 1)} on {'GPU' if use_gpu else 'CPU'}")
        sinks = open_sinks(config, tracker.run_id)
        poll_often(workers)
        give_up_silent_workers()
        queue = metrics_queue(config.name)
        trainer: Any = TorchTrainer(
            worker,
            train_loop_config={
                "config": pinned,
                "queue": queue,
                "run_id": tracker.run_id,
                "tracking_uri": tracker.uri,
                "folder": os.getcwd(),
                "origin": record.get(ORIGIN),
                "lease": lease.number,
            },
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo", timeout_s=math.ceil(exchange_s(config))
            ),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=use_gpu,
                resources_per_worker={"CPU": config.resources.cpus_per_worker} | ({"GPU": 1} if use_gpu else {}),
            ),
            run_config=RayRunConfig(
                name=config.name,
                storage_path=storage_of(config),
                failure_config=FailureConfig(max_failures=config.resources.max_failures),
                callbacks=[
                    named_workers(config.name),
                    _sending_failures(queue),
                    watched_workers(WorkerWatch(notes)),
                ],
            ),
        )
        without_own_interrupts(trainer, controllers.append)
        lease.when_lost = lambda: [ray.kill(controller) for controller in controllers]
        without_datasets(trainer)
        log = MetricsLog(config, queue, tracker, MetricsFile(filesystem, folder), {"mlflow": tracker, **sinks}, console)
        result: Any = trainer.fit()
        log.close()
        lease.check()
        if refused := (result.return_value or {}).get(REFUSED):
            raise MarlRayError(f"run {config.name!r} failed: {refused}")
        stopped = (result.return_value or {}).get(STOPPED)
        if stopped:
            raise MarlRayError(f"run {config.name!r} stopped at {stopped}; its last checkpoint is kept in {folder}")
        console.phase("registering the best bundle")
        outcome = _finish(config, tracker, sinks, result, console)
        plain = asdict(outcome) | {"curve": None if outcome.curve is None else str(outcome.curve)}
        plain.pop("trained")
        write_record(config, record | {FINISHED: {"total_steps": config.train.total_steps, "outcome": plain}})
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
            if log is not None:
                log.close(LEAVE_S if status == "KILLED" else DRAIN_S)
                _try(METRICS, partial(log.stored.end, status), console)
            if queue is not None:
                queue.shutdown(force=True)
            for name, sink in sinks.items():
                _try(f"tracking.also: {name}", partial(sink.end, status), console)
            if lease.lost.is_set():
                pass  # MLflow's run is now the other owner's
            elif status != "KILLED":
                tracker.end(status)
            elif not within(LEAVE_S, lambda: tracker.end(status)):
                console.say(f"MLflow was not told within {LEAVE_S:g} s that the run was killed")


def _sending_failures(queue: Any) -> Any:
    """A callback of Ray Train that sends the cause of each failure of the workers to the driver as a row. Ray Train itself
    starts the workers again without a word."""
    from ray.exceptions import RayError
    from ray.train import UserCallback

    class SendingFailures(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, BaseException]) -> None:
            with contextlib.suppress(RayError):  # a queue that is lost must not end the run
                queue.put_nowait_batch([{FAILURE: _first(unwrapped(worker_exceptions))}])

    return SendingFailures()


def say_kept(config: RunConfig, console: RunLog) -> None:
    """Print which checkpoint the same command will continue from."""
    console.say(f"interrupted; {kept(config)}")


def _try(what: str, action: Callable[[], None], console: RunLog) -> None:
    """End something of a tracker. Neither its error nor one that does not end makes the run fail."""

    def end() -> None:
        try:
            action()
        except Exception as error:
            console.say(f"{what}: {one_line(error)}")

    if not within(DRAIN_S, end):
        console.say(f"{what} did not end within {DRAIN_S:g} s")


def _finish(config: RunConfig, tracker: Tracker, sinks: Mapping[str, Sink], result: Any, console: RunLog) -> RunResult:
    """Register the best bundle, draw the curves, and return the run's result."""
    from marl_ray.policies.bundles.actor_critic import load_bundle

    filesystem, folder = filesystem_of(config)
    checkpoint = best(published(StoredFolder(filesystem, folder)))
    if checkpoint is None:
        raise MarlRayError(f"run {config.name!r} failed: {folder} has no checkpoint with a bundle")
    bundle, best_metrics = f"{checkpoint.place}/{BUNDLE}", dict(checkpoint.manifest.metrics)
    with contextlib.suppress(OSError):  # some file systems have no links
        link_bundle(filesystem, folder, checkpoint.name, f"{storage_of(config)}/{config.name}")
    with tempfile.TemporaryDirectory(prefix="marl-ray-") as temporary:
        local = Path(temporary) / BUNDLE
        local.mkdir()
        fs.copy_files(bundle, str(local), source_filesystem=filesystem, destination_filesystem=fs.LocalFileSystem())
        digest = load_bundle(local).digest
        model = tracker.register(local, digest, best_score_of(config, best_metrics))
        for name, sink in sinks.items():
            keep_bundle = getattr(sink, "keep_bundle", None)
            if keep_bundle is not None:
                _try(f"tracking.also: {name}", partial(keep_bundle, local, model, digest), console)
        curve = plot_run(panels_of(config, tracker.history), Path(temporary) / "return.png", title_of(config))
        benchmarks = plot_benchmarks(config, tracker.history, Path(temporary) / "benchmarks.png")
        for picture in filter(None, (curve, benchmarks)):
            tracker.artifact(picture)
            with picture.open("rb") as source, filesystem.open_output_stream(f"{folder}/{picture.name}") as target:
                target.write(source.read())
    is_local = "://" not in config.storage
    last = result.return_value or {}
    return RunResult(
        name=config.name,
        model=model,
        bundle=linked_bundle(filesystem, folder) or bundle,
        curve=Path(folder) / "return.png" if is_local else None,
        tracking_uri=tracker.uri,
        run_id=tracker.run_id,
        best_return=best_metrics.get("best/return", best_metrics.get("return")),
        metrics=last,
        summary=[*run_summary(config, best_metrics, last), *benchmark_lines(config, tracker.history)],
    )


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
