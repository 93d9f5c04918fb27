"""The result of a run that has played all its steps.

It is made once, stored in the run's record and read from there.
"""

import contextlib
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, one_line
from marl_ray.stored_files.folder_kinds import BENCHMARKS_PICTURE, CURVE_PICTURE
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.checkpoints.index import (
    BUNDLE_FOLDER,
    PublishedCheckpoint,
    find_best,
    find_best_undamaged,
    published_checkpoints,
)
from marl_ray.training.checkpoints.manifest import withdraw_manifest
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.journal.deliveries import FINISHED_STATUS, MLFLOW, BestBundle, Deliveries, find_incomplete_sinks
from marl_ray.training.journal.delivery import read_mark
from marl_ray.training.run_folder.bundle_link import link_bundle, linked_bundle
from marl_ray.training.run_folder.metrics_file import history_of, read_metrics
from marl_ray.training.run_folder.record import (
    FINISHED_KEY,
    RESULT_KEY,
    RunRecord,
    filesystem_of,
    record_of,
    storage_of,
    write_record,
)
from marl_ray.training.run_folder.run_log import RunLog
from marl_ray.training.tracking.curve_plot import panels_of, plot_benchmarks, plot_run, title_of
from marl_ray.training.tracking.mlflow_run import uri_of
from marl_ray.training.tracking.summary import benchmark_lines, best_score_of, run_summary


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
    """Mean return of the best bundle. The return is measured on other episodes than those that chose the bundle, and on
    training episodes if the run has no evaluations; None if nothing was played."""
    metrics: dict[str, float]
    """The metrics of the last iteration."""
    summary: list[str]
    """Lines for people about the best policy and the last one."""
    trained: bool = True
    """False if the run had played all its steps already."""


def read_finished_result(config: RunConfig) -> RunResult | None:
    """Return the result of a run that has played `train.total_steps` already, and None for any other run.

    Raises MarlRayError if the folder under its name is another run's.
    """
    ended = record_of(config).get(FINISHED_KEY)
    if ended is None or ended["total_steps"] < config.train.total_steps:
        return None
    stored, (filesystem, folder) = ended[RESULT_KEY], filesystem_of(config)
    # The folder may have been copied or moved since.
    curve = None if stored["curve"] is None else Path(stored["curve"])
    if curve is not None and Path(folder, curve.name).exists():
        curve = Path(folder, curve.name)
    bundle = linked_bundle(filesystem, folder)
    if bundle is None:  # the link was lost
        checkpoint = find_best(published_checkpoints(StoredFolder(filesystem, folder)))
        bundle = stored["bundle"] if checkpoint is None else f"{checkpoint.place}/{BUNDLE_FOLDER}"
    return RunResult(**stored | {"curve": curve, "bundle": bundle}, trained=False)


def deliver_rest(config: RunConfig, result: RunResult) -> RunResult:
    """Deliver what the sinks have not got of a finished run, and register its bundle if it is not yet.

    Returns the result with the bundle's name in the registry. Registering trains nothing and needs no Ray.
    """
    filesystem, folder = filesystem_of(config)
    try:
        names = find_incomplete_sinks(config, filesystem, folder)
    except OSError:  # a folder that cannot be read has nothing to deliver
        return result
    if not result.model and MLFLOW not in names:
        names.insert(0, MLFLOW)  # a driver was killed after the bundle was registered and before its name was noted
    if not names:
        return result
    with RunLog(config) as console, Lease(filesystem, folder, f"run {config.name!r}") as lease:
        console.open()
        console.phase(f"delivering the rest to {', '.join(names)}")
        record = record_of(config)
        deliveries = Deliveries(
            config, result.run_id, filesystem, folder, console.say, {}, names=names, owns=lease.owns
        )
        return register_bundle(config, record, result, deliveries, lease)


def make_result(
    config: RunConfig, run_id: str, last: dict[str, float], console: RunLog
) -> tuple[RunResult, float | None]:
    """Draw the curves of a run that has ended; return its result and the score of its bundle.

    `last` is its last row of metrics. The bundle is not registered yet. Raises MarlRayError if no bundle is left.
    """
    filesystem, folder = filesystem_of(config)
    checkpoint = _best_checkpoint(config, StoredFolder(filesystem, folder), console)
    with contextlib.suppress(OSError):  # some file systems have no links
        link_bundle(filesystem, folder, checkpoint.name, f"{storage_of(config)}/{config.name}")
    metrics = dict(checkpoint.manifest.metrics)
    history = partial(history_of, read_metrics(filesystem, folder))
    with temporary_folder("plots") as temporary:
        curve = plot_run(panels_of(config, history), temporary / CURVE_PICTURE, title_of(config))
        benchmarks = plot_benchmarks(config, history, temporary / BENCHMARKS_PICTURE)
        for picture in filter(None, (curve, benchmarks)):
            try:
                with filesystem.open_output_stream(f"{folder}/{picture.name}") as target:
                    target.write(picture.read_bytes())
            except OSError as error:  # a finished run does not fail by its pictures
                console.say(f"{picture.name} cannot be written: {one_line(error)}")
    result = RunResult(
        name=config.name,
        model="",
        bundle=linked_bundle(filesystem, folder) or f"{checkpoint.place}/{BUNDLE_FOLDER}",
        curve=None if "://" in config.storage else Path(folder) / CURVE_PICTURE,
        tracking_uri=uri_of(config),
        run_id=run_id,
        best_return=metrics.get("best/return", metrics.get("return")),
        metrics=last,
        summary=[*run_summary(config, metrics, last), *benchmark_lines(config, history)],
    )
    return result, best_score_of(config, metrics)


def _best_checkpoint(config: RunConfig, folder: StoredFolder, console: RunLog) -> PublishedCheckpoint:
    """Return the best checkpoint whose bundle is not damaged.

    Damaged ones are withdrawn, with a line about each.
    """
    checkpoint, damaged = find_best_undamaged(published_checkpoints(folder))
    for place, line in damaged:
        console.say(line)
        withdraw_manifest(place)
    if checkpoint is None:
        more = "; the same command makes one of the last weights" if damaged else ""
        raise MarlRayError(f"run {config.name!r} failed: {folder} has no checkpoint with a bundle{more}")
    return checkpoint


def store_result(config: RunConfig, record: RunRecord, result: RunResult, score: float | None) -> None:
    """Write a run's result and its bundle's score into the run's record.

    From then on the run is finished.
    """
    plain = asdict(result) | {"curve": None if result.curve is None else str(result.curve)}
    plain.pop("trained")
    record[FINISHED_KEY] = {"total_steps": config.train.total_steps, RESULT_KEY: plain, "score": score}
    write_record(config, record)


def register_bundle(
    config: RunConfig, record: RunRecord, result: RunResult, deliveries: Deliveries, lease: Lease
) -> RunResult:
    """Close the sinks of a finished run, of which MLflow registers the bundle.

    Returns the result with the bundle's name in the registry, and writes it into the run's record. Raises
    LeaseLostError if another process has taken the run meanwhile, which then registers the bundle itself.
    """
    filesystem, folder = filesystem_of(config)
    bundle = BestBundle(linked_bundle(filesystem, folder) or result.bundle, record[FINISHED_KEY].get("score"))
    model = deliveries.close(FINISHED_STATUS, bundle, model=result.model)
    lease.check()
    # Another one if MLflow did not know the first.
    run_id = read_mark(filesystem, folder, MLFLOW).run_id or result.run_id
    if (model, run_id) != (result.model, result.run_id):
        result = replace(result, model=model, run_id=run_id)
        record[FINISHED_KEY][RESULT_KEY] |= {"model": model, "run_id": run_id}
        record["mlflow_run_id"] = run_id
        write_record(config, record)
    return result
