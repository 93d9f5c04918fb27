"""The MLflow run of a training run: parameters, batched metrics, curve, registered bundle.

A run that restarts keeps it.
"""

import hashlib
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from marl_ray.config import RunConfig, config_hash, resolve_tracking_uri
from marl_ray.config.load import dotted_keys
from marl_ray.errors import MarlRayError, one_line
from marl_ray.policies.bundles.mlflow_client import mlflow_client
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS
from marl_ray.training.tracking.sinks import finite_metrics

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run


BEST_SCORE = "best_score"
"""Name of a metric of the run, and of a tag of a registered version: the bundle's score on episodes that chose nothing."""
BEST_ALIAS = "best"
"""Alias of the best version in the registry. MLflow itself keeps the alias `latest`."""
OWNER_TAG = "owner"
"""Name of a tag of the run: a digest of whose it is."""
PARENT_TAG = "mlflow.parentRunId"
"""Name of MLflow's own tag for the run that a run belongs to."""
MAX_BATCH = 1000
"""Maximum number of metrics of one request: MLflow's limit."""
PARAM_BATCH = 100
"""Number of parameters of one request: MLflow's limit."""
MAX_PARAM_CHARACTERS = 6000
"""Maximum number of characters of a parameter's value: MLflow's limit."""
MAX_TAG_CHARACTERS = 5000
"""Maximum number of characters of a tag's value: the limit of older MLflow servers; newer ones take 8,000."""
GIT_S = 5.0
"""Maximum seconds that git may take to name the commit; a run without one is begun all the same."""
ANSWER_S = 15
"""Seconds that a server may take for an answer, unless MLFLOW_HTTP_REQUEST_TIMEOUT says otherwise; MLflow's own is 120."""
RETRIES = 1
"""Times that a request is sent again at once, unless MLFLOW_HTTP_REQUEST_MAX_RETRIES says otherwise. MLflow's own 7 keep a
caller waiting for four minutes."""
_is_bounded: ContextVar[bool] = ContextVar("bounded", default=False)
"""True within a call of an MlflowRun."""


def uri_of(config: RunConfig) -> str:
    """Return the run's tracking URI. Raises MarlRayError for remote storage without one."""
    return resolve_tracking_uri(config.tracking.uri, config.storage)


class MlflowRun:
    """One MLflow run. Every call names the run, so that nothing is global to the process."""

    def __init__(
        self, config: RunConfig, run_id: str | None = None, tags: Mapping[str, str] | None = None, owner: str = ""
    ):
        """Open the run `run_id`, or begin a run where it is None or the server does not know it.

        The server does not know it after a copy of the run's folder to other storage, for example. `owner` says whose
        run it is: one that a process began for the same owner, which was killed before it noted the id, is taken
        over. Raises MarlRayError if the server does not answer.
        """
        self.config, self.tags = config, dict(tags or {})
        if owner:
            self.tags[OWNER_TAG] = hashlib.sha256(owner.encode()).hexdigest()[:32]
        self.uri = uri_of(config)
        try:
            self.client = cast("MlflowClient", _BoundedClient(mlflow_client(self.uri)))
            self.run_id = run_id if run_id and self._has_run(run_id) else self._begin_run()
        except Exception as error:  # errors of MLflow, SQLAlchemy and HTTP mean the same to the user
            raise MarlRayError(f"tracking.uri: {self.uri!r} cannot be used: {one_line(error)}") from error

    def _has_run(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def _begin_run(self) -> str:
        from mlflow.entities import Param

        name = self.config.tracking.experiment
        existing = self.client.get_experiment_by_name(name)
        if existing is None:
            # Artifacts of a local database lie beside it; a server knows its own place.
            local = self.uri.startswith("sqlite:///")
            root = (Path(self.uri.removeprefix("sqlite:///")).parent / "mlartifacts").as_uri() if local else None
            experiment = self._new_experiment(name, root)
        else:
            experiment = existing.experiment_id
        values = {key: str(value)[:MAX_PARAM_CHARACTERS] for key, value in dotted_keys(self.config.resolve()).items()}
        run = self._find_unused_run(experiment, values) or self.client.create_run(
            experiment, run_name=self.config.name, tags=self._tags()
        )
        params = [Param(key, value) for key, value in values.items()]
        for start in range(0, len(params), PARAM_BATCH):
            self.client.log_batch(run.info.run_id, params=params[start : start + PARAM_BATCH])
        return str(run.info.run_id)

    def _find_unused_run(self, experiment: str, values: Mapping[str, str]) -> "Run | None":
        """Return a run of the same owner that is still running and empty; None if there is none.

        The run has no rows and no runs of its own, and no other parameters than these.
        """
        if OWNER_TAG not in self.tags:
            return None
        query = f"tags.`{OWNER_TAG}` = '{self.tags[OWNER_TAG]}' and attributes.status = 'RUNNING'"
        runs = self.client.search_runs([experiment], query)
        candidates = (run for run in runs if run.data.params.items() <= values.items())
        return next((run for run in candidates if not self._is_used(experiment, run)), None)

    def _is_used(self, experiment: str, run: "Run") -> bool:
        """Return True if a run has rows, or is the parent of others."""
        children = f"tags.`{PARENT_TAG}` = '{run.info.run_id}'"
        return "iteration" in run.data.metrics or bool(self.client.search_runs([experiment], children, max_results=1))

    def _new_experiment(self, name: str, root: str | None) -> str:
        """Make the experiment, unless another process was first, and return its id."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self.client.create_experiment(name, artifact_location=root))
        except MlflowException:
            existing = self.client.get_experiment_by_name(name)
            if existing is None:
                raise
            return str(existing.experiment_id)

    def _tags(self) -> dict[str, str]:
        """Return the tags that runs are searched by.

        The key of the commit is MLflow's own, so that its pages show the commit.
        """
        algorithms = dict.fromkeys(self.config.algorithm_of(name) for name in self.config.team)
        tags = {
            "algorithm": ",".join(algorithms),
            "environment": self.config.env.id,
            "config_hash": config_hash(self.config),
        }
        commit = git_commit()
        return tags | ({"mlflow.source.git.commit": commit} if commit else {}) | self.tags

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Log rows of metrics, each with its `steps`. Values that are not finite are left out.

        MLflow stores a value once however often it gets it with the same time, so rows with a `timestamp` (seconds since
        1970) may be logged again.
        """
        from mlflow.entities import Metric

        waiting: list[Metric] = []
        for row in rows:
            at = int(row.get("timestamp", time.time()) * 1000)
            values = {"steps": float(row["steps"])} | dict(finite_metrics(row))
            # The iteration comes last, so that MLflow has all of a row whose iteration it has.
            values |= {"iteration": values.pop("iteration")} if "iteration" in values else {}
            metrics = [Metric(key, value, at, int(row["steps"])) for key, value in values.items()]
            if len(waiting) + len(metrics) > MAX_BATCH:
                self._send(waiting)
                waiting = []
            waiting += metrics
        self._send(waiting)

    def _send(self, metrics: "list[Metric]") -> None:
        for start in range(0, len(metrics), MAX_BATCH):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MAX_BATCH])

    def last_iteration(self) -> int | None:
        """Return the last iteration of which all metrics were logged; None if there is none."""
        value = self.client.get_run(self.run_id).data.metrics.get("iteration")
        return None if value is None else int(value)

    def history(self, key: str) -> list[tuple[int, float]]:
        """Return the (environment steps, value) of a metric, ordered by step.

        Of several values for one step the last counts.
        """
        points = {m.step: m.value for m in self.client.get_metric_history(self.run_id, key)}
        return sorted(points.items())

    def store_artifact(self, path: Path, folder: str | None = None) -> None:
        """Store a file, or a folder's content under `folder`, with the run."""
        if path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), folder)
        else:
            self.client.log_artifact(self.run_id, str(path), folder)

    def register(self, bundle: Path, digest: str, score: float | None = None) -> str:
        """Store a bundle, make it a version in the model registry and return `models:/name/version`.

        The run and the version get the score as `best_score`. The alias `best` names the version of the model with the
        greatest score. A bundle whose digest the registry has already is not registered again.
        """
        name = self.config.tracking.register_as or self.config.name
        tags = {"digest": digest} | ({} if score is None else {BEST_SCORE: repr(score)})
        if score is not None:
            self.client.log_metric(self.run_id, BEST_SCORE, score)
        versions = {version.version: version for version in self.client.search_model_versions(f"name = '{name}'")}
        number = next(
            (number for number, registered in versions.items() if registered.tags.get("digest") == digest), None
        )
        if number is None:
            folder = f"bundles/{digest[:DIGEST_DIGITS]}"
            self.store_artifact(bundle, folder)
            if not self.client.search_registered_models(f"name = '{name}'"):
                self.client.create_registered_model(name)
            source = f"{self.client.get_run(self.run_id).info.artifact_uri}/{folder}"
            version = self.client.create_model_version(name, source, self.run_id, tags=tags)
            number, versions = version.version, versions | {version.version: version}
        scores = {
            other: float(registered.tags[BEST_SCORE])
            for other, registered in versions.items()
            if BEST_SCORE in registered.tags
        }
        if scores:
            best = max(scores, key=lambda other: (scores[other], int(other)))
            self.client.set_registered_model_alias(name, BEST_ALIAS, best)
        return f"models:/{name}/{number}"

    def find_run(self, tags: Mapping[str, str]) -> str | None:
        """Return the id of a run of the same experiment that has all these tags; None if there is none."""
        experiment = self.client.get_run(self.run_id).info.experiment_id
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        runs = self.client.search_runs([experiment], query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        for key, value in tags.items():
            self.client.set_tag(self.run_id, key, value[:MAX_TAG_CHARACTERS])

    def reopen(self) -> None:
        """Mark a run that ended, or whose driver died, as running again."""
        self.client.update_run(self.run_id, "RUNNING")

    def end(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.run_id, status)


class _BoundedClient:
    """An MLflow client whose requests have ANSWER_S and RETRIES as limits.

    Files, which may be large, have MLflow's own limits.
    """

    def __init__(self, client: "MlflowClient"):
        _bound_requests()
        self._client = client

    def __getattr__(self, name: str) -> object:
        member = getattr(self._client, name)
        return member if name.startswith("log_artifact") or not callable(member) else _bound_call(member)


def _bound_call(call: Callable[..., object]) -> Callable[..., object]:
    @wraps(call)
    def call_bounded(*args: object, **options: object) -> object:
        token = _is_bounded.set(True)
        try:
            return call(*args, **options)
        finally:
            _is_bounded.reset(token)

    return call_bounded


@cache
def _bound_requests() -> None:
    """Let MLflow's settings for requests have other defaults within a call of an MlflowRun, and there alone.

    MLflow takes them from the environment, which belongs to the user and to all threads.
    """
    from mlflow import environment_variables as settings

    def bound(setting: Any, limit: int) -> None:
        usual = setting.get
        setting.get = lambda: limit if _is_bounded.get() and not setting.is_set() else usual()

    bound(settings.MLFLOW_HTTP_REQUEST_TIMEOUT, ANSWER_S)
    bound(settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES, RETRIES)


def git_commit() -> str:
    """Return the commit of the folder that this process works in; empty where there is none."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
