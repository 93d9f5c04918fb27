"""The driver of a training run: checks it, runs the loop on Ray Train, tracks it, registers the best bundle.

`ray.train.torch.prepare_model` is not used: it wraps FSDP1 and refuses CPUs. The learner calls FSDP2 itself.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs

from marl_ray.config import RunConfig, config_hash
from marl_ray.errors import MarlRayError, one_line
from marl_ray.training.curves import Panel, plot_run
from marl_ray.training.progress import Progress
from marl_ray.training.sinks import Sink, check_sinks, open_sinks
from marl_ray.training.summary import run_summary
from marl_ray.training.tracking import Tracker, flatten, tracking_uri

JOB_FOLDER = "working_dir_files"
"""Ray unpacks a job's working directory under a folder of this name, and deletes it with the job."""
TRANSCRIPTS = "transcripts"
"""Key of episodes as text among rows of metrics on their way to the driver, and the folder of MLflow that they go to."""
STOPPED = "stopped"
"""Key of what a worker returns when numbers stopped being finite."""
MOST_NAMED = 4
"""Differing keys that an error lists."""
POLL_S = 0.25
"""How often Ray Train looks after its workers. A look takes in at most one checkpoint of each, and workers that have
another one wait, so that Ray's own 2 s would be the pace of short iterations."""
QUEUE_GET_S = 1.0
DRAIN_S = 30.0
"""How long the driver waits, after the workers have ended, for the last metrics to be logged."""


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    name: str
    model: str
    """`models:/name/version` of the best bundle."""
    bundle: str
    """Folder or URI of the best bundle under the run's storage."""
    curve: Path | None
    """Learning curve, where the storage is local."""
    tracking_uri: str
    run_id: str
    best_return: float | None
    """Of the best bundle, over other episodes than it was chosen by; over training episodes where nothing was evaluated, and
    None where nothing was played."""
    metrics: dict[str, float]
    """Of the last iteration."""
    summary: list[str]
    """The best policy and the last one in lines for people."""


def check_run(config: RunConfig) -> None:
    """Everything that can be known before a cluster is used; raises MarlRayError.

    Builds the environment once (which also compiles what it compiles, cached for the workers) and the models; language
    models without their weights.
    """
    from marl_ray.envs import check_costs, make_env, warm_up
    from marl_ray.training.team import build_models, team_agents
    from marl_ray.training.warm_start import read_decisions

    if "://" not in config.storage and not Path(config.storage).is_absolute() and JOB_FOLDER in Path.cwd().parts:
        raise MarlRayError(
            f"storage: {config.storage!r} is relative to the job's temporary folder; give an absolute path or a URI"
        )
    tracking_uri(config)
    check_sinks(config)
    _check_writable(config)
    warm_up(config.env, config.constraints)
    env = make_env(config.env, config.constraints)
    try:
        agents = team_agents(config, env)
        if config.language:
            from marl_ray.training.language_checks import check_language

            check_language(config, env, agents)
        else:
            build_models(config, env, agents)
        if any(config.spec_of(name).costs for name in config.team):
            check_costs(env, len(config.constraints))
        if config.warm_start is not None and not config.language:
            read_decisions(config, env, agents)
    finally:
        env.close()


def train(config: RunConfig) -> Outcome:
    """Run to the end on the Ray that this process is connected to. Raises MarlRayError with the cause of a failure."""
    import ray
    from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    use_gpu = check_capacity(config)
    filesystem, folder = _filesystem(config)
    record = _claim(config, filesystem, folder)
    tracker = Tracker(config, record.get("mlflow_run_id"))
    tracker.reopen()
    filesystem.create_dir(folder)
    _write_json(filesystem, f"{folder}/run.json", record | {"mlflow_run_id": tracker.run_id})
    try:
        sinks = open_sinks(config, tracker.run_id)
    except MarlRayError:
        tracker.end("FAILED")
        raise
    poll_often()
    queue = Queue(actor_options={"num_cpus": 0})
    trainer = TorchTrainer(
        worker,
        train_loop_config={"config": config.given(), "queue": queue, "run_id": tracker.run_id},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=config.resources.workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": config.resources.cpus_per_worker} | ({"GPU": 1} if use_gpu else {}),
        ),
        run_config=RayRunConfig(
            name=config.name,
            storage_path=_storage(config),
            failure_config=FailureConfig(max_failures=config.resources.max_failures),
            checkpoint_config=CheckpointConfig(
                num_to_keep=config.checkpoint.keep, checkpoint_score_attribute="score", checkpoint_score_order="max"
            ),
        ),
    )
    status = "FAILED"
    try:
        with _logging(config, queue, tracker, {"mlflow": tracker, **sinks}):
            result: Any = trainer.fit()
        stopped = (result.return_value or {}).get(STOPPED)
        if stopped:
            raise MarlRayError(f"run {config.name!r} stopped at {stopped}; its last checkpoint is kept in {folder}")
        outcome = _finish(config, tracker, result, filesystem, folder)
        status = "FINISHED"
        return outcome
    except ray.train.TrainingFailedError as error:
        raise MarlRayError(f"run {config.name!r} failed: {cause(error)}") from error
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        queue.shutdown(force=True)
        for sink in sinks.values():
            _end(sink, status)
        tracker.end(status)


def poll_often() -> None:
    """Let the next TorchTrainer of this process look after its workers every POLL_S, unless the user says otherwise."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(POLL_S))


def worker(payload: dict[Any, Any]) -> Any:
    """What Ray Train starts in every worker process."""
    import ray.train
    import ray.train.torch

    from marl_ray.training.batches import Diverged
    from marl_ray.training.loop import run_worker
    from marl_ray.training.sending import Rows
    from marl_ray.training.system import System

    rows, system = Rows(payload["queue"]), System()

    def emit(metrics: dict[str, float]) -> None:
        rows.add(metrics | system.read())

    def report(folder: Path, metrics: dict[str, float]) -> None:
        rows.flush()  # what is played again after a failure is reported again; what is not, is not lost
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    latest = ray.train.get_checkpoint()
    with latest.as_directory() if latest else contextlib.nullcontext() as resume_from:
        try:
            return run_worker(
                RunConfig.model_validate(payload["config"]),
                ray.train.torch.get_device(),
                Path(resume_from) if resume_from else None,
                emit=emit,
                report=report,
                run_id=payload["run_id"],
                show=lambda iteration, told: rows.add({"iteration": float(iteration), TRANSCRIPTS: told}),
            )
        except Diverged as error:  # all workers meet it together, and would again after every restart
            return {STOPPED: str(error)}
        finally:
            rows.flush()


def check_capacity(config: RunConfig) -> bool:
    """Whether to use GPUs; raises MarlRayError if the cluster can never hold the workers, however it scales."""
    import ray
    from ray._private.state import state

    scaled = state.get_max_resources_from_cluster_config() or {}
    most = {key: max(ray.cluster_resources().get(key, 0), scaled.get(key, 0)) for key in ("CPU", "GPU")}
    need = config.resources
    use_gpu = need.device == "cuda" or (need.device == "auto" and most["GPU"] >= need.workers)
    cpus = need.workers * need.cpus_per_worker
    if cpus > most["CPU"]:
        raise MarlRayError(
            f"resources.workers={need.workers} with cpus_per_worker={need.cpus_per_worker:g} needs {cpus:g} CPUs, "
            f"but this cluster can never have more than {most['CPU']:g}"
        )
    if use_gpu and need.workers > most["GPU"]:
        raise MarlRayError(
            f"resources.workers={need.workers} on cuda needs {need.workers} GPUs, "
            f"but this cluster can never have more than {most['GPU']:g}"
        )
    return use_gpu


def _storage(config: RunConfig) -> str:
    return config.storage if "://" in config.storage else str(Path(config.storage).resolve())


def _filesystem(config: RunConfig) -> tuple[fs.FileSystem, str]:
    """File system and path of the run's folder; raises MarlRayError."""
    try:
        filesystem, root = fs.FileSystem.from_uri(_storage(config))
    except (OSError, ValueError) as error:
        raise _unwritable(config, error) from error
    return filesystem, f"{root.rstrip('/')}/{config.name}"


def _check_writable(config: RunConfig) -> None:
    """Prove that the run's folder can be written, and leave it as it was; raises MarlRayError."""
    filesystem, folder = _filesystem(config)
    try:
        existed = filesystem.get_file_info(folder).type != fs.FileType.NotFound
        filesystem.create_dir(folder)
        probe = f"{folder}/.write-test-{os.getpid()}"
        _write_json(filesystem, probe, {})
        filesystem.delete_file(probe)
        if not existed:
            filesystem.delete_dir(folder)
    except (OSError, ValueError) as error:
        raise _unwritable(config, error) from error


def _unwritable(config: RunConfig, error: Exception) -> MarlRayError:
    return MarlRayError(f"storage: {config.storage!r} cannot be written: {one_line(error)}")


def _write_json(filesystem: fs.FileSystem, path: str, data: Any) -> None:
    with filesystem.open_output_stream(path) as stream:
        stream.write(json.dumps(data, indent=1).encode())


def _claim(config: RunConfig, filesystem: fs.FileSystem, folder: str) -> dict[str, Any]:
    """The run's record in its folder: what it was begun with. Raises MarlRayError if it is another run's.

    Ray Train continues whatever lies under the name, so a name that is used again by accident must be caught here.
    """
    identity = {
        key: value for key, value in config.resolved().items() if key not in ("resources", "checkpoint", "tracking")
    }
    # A finished run may be made longer, and how a batch is worked off changes no result.
    identity["train"] = {k: v for k, v in identity["train"].items() if k not in ("total_steps", "micro_batch")}
    path = f"{folder}/run.json"
    if filesystem.get_file_info(path).type == fs.FileType.NotFound:
        return {"identity": identity, "config": config.resolved(), "config_hash": config_hash(config)}
    with filesystem.open_input_stream(path) as stream:
        record: dict[str, Any] = json.loads(stream.read())
    if record["identity"] != identity:
        ours, theirs = flatten(identity), flatten(record["identity"])
        differing = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        more = ", ..." if len(differing) > MOST_NAMED else ""
        raise MarlRayError(
            f"name: run {config.name!r} exists under {config.storage!r} with another "
            f"{', '.join(differing[:MOST_NAMED])}{more}; "
            "choose another name, or the same config to resume it"
        )
    return record


def _end(sink: Sink, status: str) -> None:
    try:
        sink.end(status)
    except Exception as error:  # what the run has made counts, whatever a tracker says to it
        print(f"tracking.also: {one_line(error)}", file=sys.stderr)


@contextlib.contextmanager
def _logging(config: RunConfig, queue: Any, tracker: Tracker, sinks: Mapping[str, Sink]) -> Iterator[None]:
    """Logs and shows the metrics that arrive in the queue while the body runs; transcripts become files of the run."""
    from ray.exceptions import RayError
    from ray.util.queue import Empty

    done = threading.Event()
    unlogged: dict[str, list[dict[str, float]]] = {name: [] for name in sinks}
    problems: dict[str, str] = {}

    def log(rows: Sequence[dict[str, float]] = ()) -> None:
        for name, sink in sinks.items():
            unlogged[name] += rows
            try:
                sink.log(unlogged[name])
                unlogged[name].clear()
            except Exception as error:  # a tracker that is away must not end a training run; rows wait for it
                problems[name] = one_line(error)

    def keep(told: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="marl-ray-") as temporary:
            path = Path(temporary) / f"{told['iteration']:.0f}.jsonl"
            path.write_text("".join(json.dumps(one) + "\n" for one in told[TRANSCRIPTS]))
            try:
                tracker.artifact(path, TRANSCRIPTS)
            except Exception as error:  # samples to look at: nothing depends on them
                print(
                    f"{config.name}: transcripts of iteration {told['iteration']:.0f}: {one_line(error)}",
                    file=sys.stderr,
                )

    def drain() -> None:
        with Progress(config) as progress:
            while True:
                try:
                    rows = [queue.get(timeout=QUEUE_GET_S)]
                    rows += queue.get_nowait_batch(queue.qsize())
                except Empty:
                    if done.is_set():
                        return
                    continue
                except RayError:
                    return  # the cluster is going down; the body's error says why
                for told in [row for row in rows if TRANSCRIPTS in row]:
                    keep(told)
                rows = [row for row in rows if TRANSCRIPTS not in row]
                if not rows:
                    continue
                if "iteration" in rows[-1]:
                    progress.show(rows[-1])
                elif config.tracking.progress:
                    print(f"{config.name}: {_warmth(rows[-1])}", flush=True)
                log(rows)

    thread = threading.Thread(target=drain, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(DRAIN_S)
        if any(unlogged.values()):
            log()
        for name, rows in unlogged.items():
            if rows:
                what = f"metrics of {len(rows)} iterations are not in {name}"
                print(f"{config.name}: {what}: {problems[name]}", file=sys.stderr)


def _warmth(row: dict[str, float]) -> str:
    """One epoch of a warm start as a line."""
    found = (f"{key} {value:.4g}" for key, value in row.items() if key != "steps" and not key.startswith("system/"))
    return "  ".join(found)


def _finish(config: RunConfig, tracker: Tracker, result: Any, filesystem: fs.FileSystem, folder: str) -> Outcome:
    """Register the best bundle, draw the curve."""
    from marl_ray.policies.bundle import load_bundle
    from marl_ray.training.loop import BUNDLE

    kept = sorted(result.best_checkpoints, key=lambda pair: pair[1]["score"], reverse=True)
    paths = ((f"{checkpoint.path}/{BUNDLE}", metrics) for checkpoint, metrics in kept)
    best, found = next(p for p in paths if filesystem.get_file_info(p[0]).type == fs.FileType.Directory)
    with tempfile.TemporaryDirectory(prefix="marl-ray-") as temporary:
        local = Path(temporary) / BUNDLE
        local.mkdir()
        fs.copy_files(best, str(local), source_filesystem=filesystem, destination_filesystem=fs.LocalFileSystem())
        model = tracker.register(local, load_bundle(local).digest)
        curve = plot_run(_panels(config, tracker), Path(temporary) / "return.png", config.env.id)
        tracker.artifact(curve)
        with curve.open("rb") as source, filesystem.open_output_stream(f"{folder}/return.png") as target:
            target.write(source.read())
    is_local = "://" not in config.storage
    last = result.return_value or {}
    return Outcome(
        name=config.name,
        model=model,
        bundle=best,
        curve=Path(folder) / "return.png" if is_local else None,
        tracking_uri=tracker.uri,
        run_id=tracker.run_id,
        best_return=found.get("best/return", found.get("return")),
        metrics=last,
        summary=run_summary(config, found, last),
    )


def _panels(config: RunConfig, tracker: Tracker) -> list[Panel]:
    """The mean return, and each cost with its budget."""
    single = len(config.budgets) == 1
    costs = [
        Panel(
            "mean cost of an episode" if single else f"mean cost {k} of an episode",
            tracker.history(f"eval/episode_cost_{k}"),
            tracker.history("episode_cost" if single else f"episode_cost_{k}"),
            budget,
        )
        for k, budget in enumerate(config.budgets)
    ]
    return [Panel("mean return", tracker.history("eval/return"), tracker.history("return")), *costs]


def cause(error: BaseException) -> str:
    """The first line of what went wrong in a worker, not of the wrappers around it."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, failure = next(iter(failures.items()))
        text = str(getattr(failure, "_base_exc", failure)).strip().splitlines()
        return f"worker {rank}: {text[-1] if text else type(failure).__name__}"
    return one_line(error)
