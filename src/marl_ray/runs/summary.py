"""Summaries of runs and sweeps, from the files of their folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonMapping
from marl_ray.runs.diagnosis import diagnose
from marl_ray.runs.stored import DamagedEntry, StoredAttempt, StoredRun, StoredSweep
from marl_ray.stored_files.folder_kinds import CURVE_PICTURE, ERRORS_FOLDER, SWEEP_FILE
from marl_ray.training.checkpoints.index import PublishedCheckpoint, find_best, published_checkpoints
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.run_folder.bundle_link import linked_bundle
from marl_ray.training.run_folder.record import FINISHED_KEY, RESULT_KEY
from marl_ray.training.run_folder.run_log import LOG_FILE

if TYPE_CHECKING:
    from pyarrow import fs


BEST = "best/"
"""Prefix of the metrics of the best bundle, on other episodes than those that chose it."""
SOURCES = {BEST: "best bundle", "eval/": "last evaluation", "": "training episodes"}
"""Prefix of a metric -> whose episodes it is of."""


@dataclass(frozen=True)
class Score:
    """A mean return."""

    value: float
    low: float | None
    """Lower end of its 95 % interval over episodes; None where it is not known."""
    high: float | None
    episodes: str
    """The episodes that were scored: one of the values of SOURCES, or words of the same kind."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One row of a list of runs and sweeps."""

    name: str
    kind: str
    """`run`, `sweep`, or `attempt`: a driver that has not written the record of either."""
    state: str
    """A `StoredRunState`; of a sweep the status in its records."""
    algorithm: str
    """Algorithms of the policies that learn, with commas; of a sweep its scheduler and search; of an attempt empty."""
    env: str
    """Id of the environment; of an attempt empty."""
    seed: int | None
    """None for a sweep."""
    steps: int
    """Environment steps played; of a sweep by all trials and seeds."""
    total_steps: int | None
    """Environment steps that the config asks for; None for a sweep whose budget does not bound them."""
    score: Score | None
    """None if nothing was scored yet."""
    at: float | None
    """Time of the last sign of it, in seconds since 1970."""
    storage: str
    """Folder or URI."""


class CheckpointSummary(TypedDict):
    """A complete checkpoint: its folder or URI, and where training stood."""

    path: str
    iteration: int
    steps: int


class MlflowReference(TypedDict):
    """The MLflow run of a run; the URI of a finished run alone is known."""

    run_id: str | None
    uri: str | None


@dataclass(frozen=True, kw_only=True)
class RunDetails:
    """The facts that a run's folder holds, for `marl-ray runs show`."""

    summary: RunSummary
    error: str | None
    """One line that says why the last attempt failed; None if it did not."""
    warnings: Sequence[str]
    """Sentences about what is wrong, with the keys to change; empty for a run that learns."""
    given: JsonMapping
    """The keys of the config that were given; empty if the record does not have them."""
    config: JsonMapping
    """With every default written out."""
    bundle: str | None
    """Folder or URI of the best bundle; None before there is one."""
    model: str | None
    """`models:/name/version` of a finished run; None before."""
    checkpoints: Sequence[CheckpointSummary]
    """The complete checkpoints, oldest first."""
    mlflow: MlflowReference
    curve: str | None
    """File of the learning curve's picture; None where there is none."""
    log: str | None
    """File of the run's log; None where there is none."""
    errors: Sequence[str]
    """Files with the tracebacks of workers and of the driver."""


def summary_of(run: StoredRun | StoredSweep | StoredAttempt | DamagedEntry) -> RunSummary:
    """Return the summary of a run, a sweep, or an attempt at one.

    Raises MarlRayError for a record, a file of metrics, or records of a sweep, that are none.
    """
    if isinstance(run, DamagedEntry):
        raise run.error
    if isinstance(run, StoredSweep):
        try:
            return _sweep_summary(run)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            path = f"{run.folder}/{SWEEP_FILE}"
            raise MarlRayError(f"{path} is not the record of a sweep: {one_line(error)}") from error
    if isinstance(run, StoredAttempt):
        return _attempt_summary(run)
    return _run_summary(run, run.rows(), published_of(run))


def _run_summary(
    run: StoredRun, rows: Sequence[Mapping[str, float]], checkpoints: Sequence[PublishedCheckpoint]
) -> RunSummary:
    owner = run.owner()
    steps = max((int(row["steps"]) for row in rows if "steps" in row), default=0)
    at = owner.at if owner is not None else max((row.get("timestamp", 0.0) for row in rows), default=None)
    return RunSummary(
        name=run.name,
        kind=run.kind,
        state=run.state(),
        algorithm=algorithms_of(run.config),
        env=run.config["env"]["id"],
        seed=run.config["seed"],
        steps=steps,
        total_steps=run.config["train"]["total_steps"],
        score=score_of(checkpoints, rows) or _finished_score(run),
        at=at,
        storage=run.storage,
    )


def details_of(run: StoredRun) -> RunDetails:
    """Return the details of a run. Raises MarlRayError as `summary_of` does."""
    result = run.record.get(FINISHED_KEY, {}).get(RESULT_KEY, {})
    owner, rows, checkpoints = run.owner(), run.rows(), published_of(run)
    return RunDetails(
        summary=_run_summary(run, rows, checkpoints),
        error=None if owner is None else owner.error,
        warnings=diagnose(run.config, rows),
        given=run.record.get("given", {}),
        config=run.config,
        bundle=linked_bundle(run.filesystem, run.folder) or result.get("bundle"),
        model=result.get("model"),
        checkpoints=[
            {
                "path": f"{run.uri}/{checkpoint.name}",
                "iteration": checkpoint.manifest.iteration,
                "steps": checkpoint.manifest.steps,
            }
            for checkpoint in checkpoints
        ],
        mlflow={"run_id": run.record.get("mlflow_run_id"), "uri": result.get("tracking_uri")},
        curve=f"{run.uri}/{CURVE_PICTURE}" if run.has(CURVE_PICTURE) else None,
        log=f"{run.uri}/{LOG_FILE}" if run.has(LOG_FILE) else None,
        errors=[info.path for info in _list_files(run, f"{run.folder}/{ERRORS_FOLDER}")],
    )


def algorithms_of(config: JsonMapping) -> str:
    """Return the names of the algorithms of the policies that learn, with commas."""
    learners = [policy for policy in config["team"].values() if not policy["frozen"]]
    return ",".join(dict.fromkeys(policy["algorithm"] for policy in learners))


def published_of(run: StoredRun) -> list[PublishedCheckpoint]:
    """Return the complete checkpoints of a run, the oldest first."""
    return published_checkpoints(StoredFolder(run.filesystem, run.folder))


def score_of(checkpoints: Sequence[PublishedCheckpoint], rows: Sequence[Mapping[str, float]]) -> Score | None:
    """Return the score of the run's best bundle, else that of the last evaluation, else of training episodes.

    The bundle's comes from its checkpoint: a run that was killed has `rows` about weights that were never saved. None
    if there is no return at all.
    """
    saved = find_best(checkpoints)
    rows_of = dict.fromkeys(SOURCES, rows) | {BEST: [] if saved is None else [saved.manifest.metrics]}
    for prefix, episodes in SOURCES.items():
        row = next((row for row in reversed(rows_of[prefix]) if f"{prefix}return" in row), None)
        if row is not None:
            low, high = (row.get(f"{prefix}return_{end}") for end in ("low", "high"))
            return Score(row[f"{prefix}return"], low, high, episodes)
    return None


def _finished_score(run: StoredRun) -> Score | None:
    value = run.record.get(FINISHED_KEY, {}).get(RESULT_KEY, {}).get("best_return")
    return None if value is None else Score(value, None, None, SOURCES[BEST])


def _list_files(run: StoredRun, folder: str) -> "list[fs.FileInfo]":
    from pyarrow import fs

    try:
        infos = run.filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    except OSError:  # a file in the place of the folder
        return []
    return [info for info in infos if info.type == fs.FileType.File]


def _sweep_summary(sweep: StoredSweep) -> RunSummary:
    config, trials = sweep.records["config"], sweep.records["trials"]
    env = config["run"].get("env", {})
    number = sweep.records.get("winner")
    objectives = None if number is None else trials[number].get("objectives")
    metric = config["metric"][0]["name"]
    return RunSummary(
        name=sweep.name,
        kind=sweep.kind,
        state=sweep.records["status"],
        algorithm=f"{config['scheduler']['kind']}/{config['search']['kind']}",
        env=str(env.get("id", "")) if isinstance(env, Mapping) else "",
        seed=None,
        steps=sum(trial["played"] for trial in trials),
        total_steps=config["budget"]["steps"],
        score=Score(objectives[0], None, None, f"winner's {metric}") if objectives else None,
        at=sweep.changed,
        storage=sweep.storage,
    )


def _attempt_summary(attempt: StoredAttempt) -> RunSummary:
    owner = attempt.owner()
    return RunSummary(
        name=attempt.name,
        kind=attempt.kind,
        state=attempt.state(),
        algorithm="",
        env="",
        seed=None,
        steps=0,
        total_steps=None,
        score=None,
        at=None if owner is None else owner.at,
        storage=attempt.storage,
    )
