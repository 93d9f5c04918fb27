"""Write checkpoints beside the training.

Another thread copies the weights while the team plays, and writes the copy. Every rank writes its own part straight
onto the storage. The ranks then tell rank 0 sizes and hashes of their files, and rank 0 publishes the checkpoint by its
manifest.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from marl_ray.errors import MarlRayError, describe_error
from marl_ray.json_types import JsonMapping
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.policies.language.sharding.gather_shards import gather_to_rank0
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.checkpoints.index import BUNDLE_FOLDER, STATE_FILE
from marl_ray.training.checkpoints.learner_tensors import CpuCopy, scalars_of
from marl_ray.training.checkpoints.manifest import FORMAT, CheckpointManifest, publish
from marl_ray.training.checkpoints.run_state import RunState, StateFile
from marl_ray.training.checkpoints.storage import StoredFile, StoredFolder, UnwritableCheckpointError
from marl_ray.training.checkpoints.tensor_files import StoredFiles, TensorWriter
from marl_ray.training.learner.policy_update import Learner

WEIGHTS = "weights"
"""Folder of the tensors in a checkpoint."""
SAVE_S = 1800.0
"""Seconds that a checkpoint may take from its copy to its manifest."""


def envs_file(rank: int) -> str:
    """Return the file with the running episodes of a worker's environment copies."""
    return f"envs-{rank}.json"


@dataclass(frozen=True)
class CheckpointContents:
    """The parts of a checkpoint besides the tensors; the training changes none of them any more."""

    state: RunState
    """The run's state, equal on all workers."""
    learners: JsonMapping
    """Policy -> the plain state of its learner."""
    envs: Callable[[], JsonMapping]
    """Makes the running episodes of this worker's environment copies."""
    score: float
    bundle: Callable[..., None] | None = None
    """Writes a bundle, if the score is the best so far.

    Rank 0 writes it as the local folder that is the first argument and does not exist yet. The last argument returns
    trained weights, (policy, weight) -> tensor; other ranks call it with that alone.
    """


class CheckpointSaver:
    """Writes the checkpoints of one run, one at a time; every worker makes the same calls."""

    def __init__(self, learners: Mapping[str, Learner]):
        self.copy = CpuCopy(learners)
        self.group: dist.ProcessGroup | None = None
        """The workers on CPU: the training's own group may know GPUs alone, and is in use meanwhile."""
        # A thread that waits already is handed its job in microseconds, also on a machine that is busy.
        self.thread = ThreadPoolExecutor(1, "checkpoints")
        self.pending: Future[None] | None = None
        """The checkpoint that is being written; None before the first, and when `wait` has returned."""
        self.copy_done = threading.Event()
        """Set unless weights are being copied."""
        self.copy_done.set()
        self.place: StoredFolder | None = None
        """The folder of the last checkpoint."""
        self.began_at = 0.0
        """Time at which the last checkpoint was begun, by the monotonic clock."""

    def save(
        self, place: StoredFolder, contents: CheckpointContents, published: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to copy the state and to write it to `place`.

        An update must call `wait_for_copy` first. Rank 0 calls `published`, which must not raise, when the checkpoint
        is complete; all workers wait for it with their next one. Raises as `wait` does, for the checkpoint before.
        """
        self.wait()
        if self.group is None:
            # Longer than the wait of the training thread, so that all workers raise the same error.
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * SAVE_S))
        copy = self.copy.take()
        self.place, self.began_at = place, time.monotonic()
        self.copy_done.clear()
        self.pending = self.thread.submit(self._write, copy, place, contents, published)

    def _write(
        self, copy: Callable[[], None], place: StoredFolder, contents: CheckpointContents, published: Callable[[], None]
    ) -> None:
        def copy_weights() -> None:
            try:
                copy()
            finally:
                self.copy_done.set()

        _run_together(copy_weights, self.group)
        write(place, self.copy.tensors, contents, self.group, published)

    def wait_for_copy(self) -> None:
        """Wait until the weights of the last checkpoint are copied, so that they may change.

        Raises UnwritableCheckpointError.
        """
        if not self.copy_done.wait(SAVE_S):
            raise UnwritableCheckpointError(f"the weights of {self.place} were not copied within {SAVE_S:g} s")

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises UnwritableCheckpointError, which names the file, and what a lost worker makes torch raise.
        """
        if self.pending is None:
            return
        if not wait([self.pending], max(0.0, self.began_at + SAVE_S - time.monotonic())).done:
            raise UnwritableCheckpointError(f"{self.place} was not written within {SAVE_S:g} s")
        checkpoint, self.pending = self.pending, None
        checkpoint.result()

    def close(self) -> None:
        """Leave the group. A checkpoint that is still being written keeps the group and its thread until it is complete."""
        ended = self.pending is None
        self.thread.shutdown(wait=ended)
        if ended and self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


def write(
    place: StoredFolder,
    tensors: Mapping[str, Tensor],
    contents: CheckpointContents,
    group: dist.ProcessGroup | None,
    published: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint.

    All workers of the gloo group call it. Raises UnwritableCheckpointError, on all of them.
    """
    rank, files, scalars = dist.get_rank(group), StoredFiles(place), scalars_of(tensors)
    sharded = {name: value for name, value in tensors.items() if name not in scalars}
    _run_together(lambda: _write_plain(files, rank, contents, scalars), group)
    if contents.bundle is not None:
        with ExitStack() as folders:
            made: list[Path] = []
            # A failure here must be known to all before the others send their parts.
            _run_together(lambda: made.extend(_make_bundle_folder(files, folders) if rank == 0 else ()), group)
            _run_together(lambda: _write_bundle(files, tensors, contents, made, group), group)
    try:
        state_dict_saver.save(sharded, storage_writer=TensorWriter(files, WEIGHTS), process_group=group)
    except CheckpointException as error:  # torch's own, a BaseException
        raise _unwritable_error(place, error) from error
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, files.written, group=group)
    manifest = _make_manifest(contents, {name: file for part in parts for name, file in part.items()}, len(parts))

    def complete() -> None:
        publish(place, manifest)
        published()  # no worker has begun its next checkpoint, which this might take for an unfinished one

    _run_together(complete if rank == 0 else lambda: None, group)


def _write_plain(files: StoredFiles, rank: int, contents: CheckpointContents, scalars: Mapping[str, float]) -> None:
    """Write the files of plain data: each worker its running episodes, and rank 0 the state."""
    files.write(envs_file(rank), json.dumps(contents.envs()).encode())
    if rank != 0:
        return
    files.write(STATE_FILE, StateFile(contents.state, contents.learners, scalars).encode())


def _make_bundle_folder(files: StoredFiles, folders: ExitStack) -> tuple[Path]:
    """Make a local folder for the bundle.

    The folder is on the checkpoint's own disk if that is local: the disk of the temporary folder may have no room for
    it.
    """
    if files.place.is_local:
        return (Path(folders.enter_context(TemporaryDirectory(prefix=".bundle-", dir=files.place.path))),)
    return (Path(folders.enter_context(temporary_folder("bundle"))),)


def _write_bundle(
    files: StoredFiles,
    tensors: Mapping[str, Tensor],
    contents: CheckpointContents,
    folders: Sequence[Path],
    group: dist.ProcessGroup | None,
) -> None:
    """Write the bundle into the folder of `folders` and copy it into the checkpoint.

    Other ranks send their parts.
    """
    assert contents.bundle is not None

    def trained_weight(policy: str, weight: str) -> Tensor | None:
        return gather_to_rank0(tensors[f"{policy}/model/lm.{weight}"], group)  # all learn there if one has failed

    if not folders:
        contents.bundle(trained_weight)
        return
    (folder,) = folders
    try:
        contents.bundle(folder / BUNDLE_FOLDER, trained_weight)
    except MarlRayError:
        raise
    except Exception as error:  # an error of safetensors names no file
        raise UnwritableCheckpointError(
            f"{files.place / BUNDLE_FOLDER} cannot be written: {describe_error(error)}"
        ) from error
    files.copy_in(folder / BUNDLE_FOLDER, BUNDLE_FOLDER)


def _run_together(action: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Run an action on each worker. If it fails on any, all workers raise the first error."""
    try:
        run_on_all_workers(action, group)
    except Exception as error:
        raise UnwritableCheckpointError(describe_error(error)) from error


def _make_manifest(contents: CheckpointContents, files: Mapping[str, StoredFile], ranks: int) -> CheckpointManifest:
    state = contents.state
    metrics = {**state.metrics, "iteration": state.iteration, "steps": state.steps, "score": contents.score}
    return CheckpointManifest(
        format=FORMAT,
        run=state.run,
        identity=state.identity,
        iteration=state.iteration,
        steps=state.steps,
        ranks=ranks,
        score=contents.score,
        metrics=metrics,
        files=files,
    )


def _unwritable_error(place: StoredFolder, error: CheckpointException) -> MarlRayError:
    """Return the error of a checkpoint that torch could not write, with what a worker has raised."""
    failures = [failure for failure, _ in error.failures.values()]
    failure = next((each for each in failures if isinstance(each, MarlRayError)), failures[0])
    if isinstance(failure, UnwritableCheckpointError):
        return failure
    return UnwritableCheckpointError(f"{place} cannot be written: {describe_error(failure)}")
