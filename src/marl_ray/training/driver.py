"""The driver of a training run: it runs the loop on Ray Train, tracks it, and registers the best bundle.

`ray.train.torch.prepare_model` is not used: it wraps FSDP1 and refuses CPUs. The learner calls FSDP2 itself.
"""

import contextlib
import os
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.errors import MarlRayError, named, one_line
from marl_ray.ray_seams import failures_of, named_workers, poll_often, without_datasets, without_own_interrupts
from marl_ray.training.cluster_capacity import check_capacity
from marl_ray.training.interruption import INTERRUPTS, LEAVE_S, answering, within
from marl_ray.training.run_folder import (
    filesystem_of,
    kept,
    pin_bundles,
    record_of,
    storage_of,
    traceback_of,
    work_in,
    write_record,
    write_traceback,
)
from marl_ray.training.tracking.curve_plot import panels_of, plot_benchmarks, plot_run
from marl_ray.training.tracking.metrics_log import DRAIN_S, TRANSCRIPTS, MetricsLog
from marl_ray.training.tracking.mlflow_run import Tracker
from marl_ray.training.tracking.other_sinks import Sink, open_sinks
from marl_ray.training.tracking.rows_to_driver import metrics_queue
from marl_ray.training.tracking.summary import benchmark_lines, best_score_of, run_summary

FINISHED = "finished"
"""Key of the run's record for its result, which is stored when the run has played all its steps."""
REFUSED = "refused"
"""Key under which a worker returns the error message of an engine that would refuse again after every restart."""
STOPPED = "stopped"
"""Key of a worker's return value for the error message of a run whose numbers stopped being finite."""


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    name: str
    model: str
    """`models:/name/version`, which names the best bundle in MLflow's registry."""
    bundle: str
    """Folder or URI of the best bundle under the run's storage."""
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
    outcome = ended["outcome"]
    return RunResult(**outcome | {"curve": None if outcome["curve"] is None else Path(outcome["curve"])}, trained=False)


def train(config: RunConfig) -> RunResult:
    """Run to the end on the Ray that this process is connected to; a run that is finished is not run again.

    Raises MarlRayError with the cause of a failure. On Ctrl-C and SIGTERM it prints which checkpoint is kept, and raises.
    """
    import ray
    from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    before = finished(config)
    if before is not None:
        return before
    use_gpu = check_capacity(config)
    record = record_of(config)
    filesystem, folder = filesystem_of(config)
    tracker = Tracker(config, record.get("mlflow_run_id"))
    status, shield = "FAILED", contextlib.ExitStack()
    sinks: dict[str, Sink] = {}
    controllers: list[Any] = []
    queue: Any = None
    log: MetricsLog | None = None
    try:
        shield.enter_context(answering(lambda: say_kept(config)))
        tracker.reopen()
        record |= {"mlflow_run_id": tracker.run_id}
        pinned = pin_bundles(config, record)
        write_record(config, record)
        sinks = open_sinks(config, tracker.run_id)
        poll_often()
        queue = metrics_queue(config.name)
        trainer: Any = TorchTrainer(
            worker,
            train_loop_config={
                "config": pinned,
                "queue": queue,
                "run_id": tracker.run_id,
                "tracking_uri": tracker.uri,
                "folder": os.getcwd(),
            },
            torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=config.resources.workers,
                use_gpu=use_gpu,
                resources_per_worker={"CPU": config.resources.cpus_per_worker} | ({"GPU": 1} if use_gpu else {}),
            ),
            run_config=RayRunConfig(
                name=config.name,
                storage_path=storage_of(config),
                failure_config=FailureConfig(max_failures=config.resources.max_failures),
                checkpoint_config=CheckpointConfig(
                    num_to_keep=config.checkpoint.keep, checkpoint_score_attribute="score", checkpoint_score_order="max"
                ),
                callbacks=[named_workers(config.name)],
            ),
        )
        without_own_interrupts(trainer, controllers.append)
        without_datasets(trainer)
        log = MetricsLog(config, queue, tracker, {"mlflow": tracker, **sinks})
        result: Any = trainer.fit()
        log.close()
        if refused := (result.return_value or {}).get(REFUSED):
            raise MarlRayError(f"run {config.name!r} failed: {refused}")
        stopped = (result.return_value or {}).get(STOPPED)
        if stopped:
            raise MarlRayError(f"run {config.name!r} stopped at {stopped}; its last checkpoint is kept in {folder}")
        outcome = _finish(config, tracker, result, filesystem, folder)
        plain = asdict(outcome) | {"curve": None if outcome.curve is None else str(outcome.curve)}
        plain.pop("trained")
        write_record(config, record | {FINISHED: {"total_steps": config.train.total_steps, "outcome": plain}})
        status = "FINISHED"
        return outcome
    except ray.train.TrainingFailedError as error:
        where = traceback_of(config, failures_of(error))
        more = f"; its traceback is in {where}" if where else ""
        raise MarlRayError(f"run {config.name!r} failed: {cause(error)}{more}") from error
    except INTERRUPTS:
        status = "KILLED"
        for controller in controllers:  # the controller's workers end with it
            ray.kill(controller)
        raise
    finally:
        with shield:
            if log is not None:
                log.close(LEAVE_S if status == "KILLED" else DRAIN_S)
            if queue is not None:
                queue.shutdown(force=True)
            for name, sink in sinks.items():
                _end(name, sink, status)
            if status != "KILLED":
                tracker.end(status)
            elif not within(LEAVE_S, lambda: tracker.end(status)):
                _say(config, f"MLflow was not told within {LEAVE_S:g} s that the run was killed")


def worker(payload: dict[Any, Any]) -> Any:
    """Train in one worker process; Ray Train calls this function in each."""
    import ray.train
    import ray.train.torch

    from marl_ray.policies.engines.vllm_process.process import EngineRefused
    from marl_ray.training.learner.prepared_batch import Diverged
    from marl_ray.training.loop import run_worker
    from marl_ray.training.tracking.machine_readings import MachineReadings
    from marl_ray.training.tracking.rows_to_driver import Rows

    os.environ[TRACKING_URI] = payload["tracking_uri"]  # a worker looks up bundles in the registry too
    work_in(payload["folder"])
    rows, system = Rows(payload["queue"]), MachineReadings()

    def emit(metrics: dict[str, float]) -> None:
        rows.add(metrics | system.read())

    def report(folder: Path, metrics: dict[str, float]) -> None:
        rows.flush()  # steps up to this checkpoint are not played again after a failure, so their rows must not be lost
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    config = RunConfig.model_validate(payload["config"])
    latest = ray.train.get_checkpoint()
    with latest.as_directory() if latest else contextlib.nullcontext() as resume_from:
        try:
            return run_worker(
                config,
                ray.train.torch.get_device(),
                Path(resume_from) if resume_from else None,
                emit=emit,
                report=report,
                run_id=payload["run_id"],
                show=lambda iteration, transcripts: rows.add({"iteration": float(iteration), TRANSCRIPTS: transcripts}),
                engine_of=_engine_actors(config) if config.engine_actors else None,
            )
        except Diverged as error:  # all workers raise it together, and would raise it again after every restart
            return {STOPPED: str(error)}
        except EngineRefused as error:
            return {REFUSED: str(error)}
        except Exception:
            rank = ray.train.get_context().get_world_rank()
            write_traceback(config, f"worker-{rank}", traceback.format_exc())
            raise
        finally:
            rows.flush()


def _engine_actors(config: RunConfig) -> Any:
    """The function that makes a policy's engine: actors where vLLM samples, and else one in the worker's process."""
    from marl_ray.policies.engines.sampler import make_engine
    from marl_ray.training.team.engine_actors import EngineActors

    def engine_of(name: str, policy: Any) -> Any:
        return EngineActors(config, name, policy) if policy.generation.engine == "vllm" else make_engine(policy)

    return engine_of


def say_kept(config: RunConfig) -> None:
    """Print which checkpoint the same command will continue from."""
    _say(config, f"interrupted; {kept(config)}")


def _say(config: RunConfig, text: str) -> None:
    print(f"{config.name}: {text}", file=sys.stderr, flush=True)


def _end(name: str, sink: Sink, status: str) -> None:
    """End a sink. Neither an error of a tracker nor one that does not end makes the run fail."""

    def end() -> None:
        try:
            sink.end(status)
        except Exception as error:
            print(f"tracking.also: {name}: {one_line(error)}", file=sys.stderr)

    if not within(DRAIN_S, end):
        print(f"tracking.also: {name} did not end within {DRAIN_S:g} s", file=sys.stderr)


def _finish(config: RunConfig, tracker: Tracker, result: Any, filesystem: fs.FileSystem, folder: str) -> RunResult:
    """Register the best bundle, draw the curves, and return the run's result."""
    from marl_ray.policies.bundles.actor_critic import load_bundle
    from marl_ray.training.loop import BUNDLE

    # Among equal scores, such as those of a run that played nothing, the newest checkpoint counts.
    kept = sorted(result.best_checkpoints, key=lambda pair: (pair[1]["score"], pair[1]["iteration"]), reverse=True)
    paths = ((f"{checkpoint.path}/{BUNDLE}", metrics) for checkpoint, metrics in kept)
    best, best_metrics = next(p for p in paths if filesystem.get_file_info(p[0]).type == fs.FileType.Directory)
    with tempfile.TemporaryDirectory(prefix="marl-ray-") as temporary:
        local = Path(temporary) / BUNDLE
        local.mkdir()
        fs.copy_files(best, str(local), source_filesystem=filesystem, destination_filesystem=fs.LocalFileSystem())
        model = tracker.register(local, load_bundle(local).digest, best_score_of(config, best_metrics))
        curve = plot_run(panels_of(config, tracker.history), Path(temporary) / "return.png", config.env.id)
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
        bundle=best,
        curve=Path(folder) / "return.png" if is_local else None,
        tracking_uri=tracker.uri,
        run_id=tracker.run_id,
        best_return=best_metrics.get("best/return", best_metrics.get("return")),
        metrics=last,
        summary=[*run_summary(config, best_metrics, last), *benchmark_lines(config, tracker.history)],
    )


def cause(error: BaseException) -> str:
    """The first line of the error that a worker raised, without the wrappers around it."""
    for rank, failure in failures_of(error).items():
        return f"worker {rank}: {named(failure)}"
    return one_line(error)
