"""A run's MLflow run as a sink: metrics, transcripts, pictures, and the bundle in the registry."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from pyarrow import fs
from typing_extensions import override

from marl_ray.config import RunConfig
from marl_ray.stored_files.folder_kinds import BENCHMARKS_PICTURE, CURVE_PICTURE
from marl_ray.stored_files.ownership.owners import whose_folder
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.journal.writer import TRANSCRIPTS_FOLDER, transcripts_path
from marl_ray.training.run_folder.metrics_file import iteration_of
from marl_ray.training.tracking.mlflow_run import MlflowRun
from marl_ray.training.tracking.sinks import IdentifiedSink, ResumableSink


class MlflowSink(IdentifiedSink, ResumableSink):
    """Everything that a run reports to MLflow."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str | None,
        filesystem: fs.FileSystem,
        folder: str,
        tags: Mapping[str, str] | None = None,
    ):
        """Open the MLflow run `run_id`, or begin one where it is None, and mark it as running.

        Raises MarlRayError if the server does not answer.
        """
        self.config, self.filesystem, self.folder = config, filesystem, folder
        self.mlflow_run = MlflowRun(config, run_id, owner=whose_folder(filesystem, folder))
        self.run_id = self.mlflow_run.run_id
        self.mlflow_run.reopen()
        self.mlflow_run.tag(tags or {})

    @override
    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        rows = list(rows)
        if self.config.has_language_models:
            self._store_files(transcripts_path(self.folder, iteration_of(row)) for row in rows)
        self.mlflow_run.log(rows)

    @override
    def last_iteration(self) -> int | None:
        return self.mlflow_run.last_iteration()

    def register(self, bundle: Path, digest: str, score: float | None) -> str:
        """Store the pictures, register the best bundle and return `models:/name/version`."""
        self._store_files((f"{self.folder}/{name}" for name in (CURVE_PICTURE, BENCHMARKS_PICTURE)), None)
        return self.mlflow_run.register(bundle, digest, score)

    @override
    def end(self, status: str) -> None:
        self.mlflow_run.end(status)

    def _store_files(self, paths: Iterable[str], artifacts: str | None = TRANSCRIPTS_FOLDER) -> None:
        """Store those of the files that are there as files of the MLflow run."""
        for info in self.filesystem.get_file_info(list(paths)):
            if info.type != fs.FileType.File:
                continue
            if isinstance(self.filesystem, fs.LocalFileSystem):
                self.mlflow_run.store_artifact(Path(info.path), artifacts)
                continue
            with temporary_folder("artifact") as temporary:
                path = temporary / info.base_name
                with self.filesystem.open_input_stream(info.path) as stream:
                    path.write_bytes(stream.read())
                self.mlflow_run.store_artifact(path, artifacts)
