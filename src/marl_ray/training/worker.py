"""One worker process of a training run on Ray Train.

It runs the loop, and rank 0 writes the run's journal.
"""

import contextlib
import math
import os
import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from marl_ray.config import RunConfig, engine_spec
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonObject
from marl_ray.stored_files.ownership.lease import LeaseLostError, check_owned
from marl_ray.stored_files.temporary_files import remove_temporary
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.journal.writer import Journal
from marl_ray.training.machines.full_disk import find_full_disk
from marl_ray.training.machines.working_folder import enter_folder
from marl_ray.training.run_folder.bundle_link import link_bundle
from marl_ray.training.run_folder.record import filesystem_of, identity_hash, storage_of
from marl_ray.training.run_folder.tracebacks import write_traceback

if TYPE_CHECKING:
    from collections.abc import Callable

    from marl_ray.policies.engines.base import Engine
    from marl_ray.policies.language.token_policy import TokenPolicy
    from marl_ray.training.loop.callbacks import RunCallbacks

REFUSED_KEY = "refused"
"""Key under which a worker returns the message of an error that would come again after every restart."""
STOPPED_KEY = "stopped"
"""Key of a worker's return value for the error message of a run whose numbers stopped being finite."""


@dataclass(frozen=True, kw_only=True)
class WorkerPayload:
    """The plain data that the driver sends to every worker."""

    config: JsonObject
    """The run's config with the versions of its bundles."""
    run_id: str
    """The run's id in MLflow."""
    tracking_uri: str
    folder: str
    """The driver's folder, from which relative paths of the config count."""
    origin: str | None
    """URI of the checkpoint of another run that the run begins from."""
    lease: int
    """Number of this driver's lease file in `owner/` of the run's folder."""


@dataclass(frozen=True)
class _StoragePosition:
    """The place from which the run continues, as rank 0 reads it from the storage.

    The storage may show the other workers an older list.
    """

    checkpoints: list[str]
    """Paths of the run's checkpoints, the oldest first."""
    refusal: str
    """The reason that no checkpoint can be used where other runs' are all that is there; empty if one can, or none is."""
    attempt: int
    """Number of this group of workers."""
    best_left: float
    """Score of the best bundle that is left; infinity if none may be lost."""
    damaged: list[tuple[str, str]]
    """Paths of the checkpoints whose bundle is not there, each with a line about it."""
    pass_sizes: dict[str, int]
    """Policy -> most sequences of a pass, where larger ones had no room."""


def train_in_worker(plain: dict[Any, Any]) -> object:
    """Train in one worker process. Ray Train calls it in each, with the fields of a `WorkerPayload`.

    Returns the metrics of the last iteration, or the message of an error that would come again after every restart under
    REFUSED_KEY or STOPPED_KEY.
    """
    import ray.train

    from marl_ray.policies.agreement import run_on_all_workers
    from marl_ray.policies.engines.base import EngineRefusedError
    from marl_ray.training.checkpoints.index import take_attempt_number
    from marl_ray.training.checkpoints.loading import UnreadableCheckpointError
    from marl_ray.training.checkpoints.storage import UnwritableCheckpointError
    from marl_ray.training.errors import DivergedError, PassMemoryError
    from marl_ray.training.loop.pass_sizes import note_smaller_pass

    payload = WorkerPayload(**plain)
    os.environ[TRACKING_URI] = payload.tracking_uri  # a worker looks up bundles in the registry too
    enter_folder(payload.folder)
    config = RunConfig.model_validate(payload.config)
    rank = ray.train.get_context().get_world_rank()
    folder = StoredFolder(*filesystem_of(config))
    try:
        attempt = take_attempt_number(folder) if rank == 0 else 0
        run_on_all_workers(lambda: _check_owner(config, folder, payload.lease))
    except LeaseLostError as error:
        return {REFUSED_KEY: str(error)}
    except OSError as error:
        if full := find_full_disk(error, storage_of(config)):
            raise full from error
        raise
    if rank == 0:
        remove_temporary(*folder)
    journal = Journal(folder.filesystem, folder.path, rank)
    try:
        return _train(config, payload, folder, journal, rank, attempt)
    except DivergedError as error:  # all workers raise it together, and would raise it again after every restart
        return {STOPPED_KEY: str(error)}
    except (UnwritableCheckpointError, UnreadableCheckpointError) as error:  # likewise
        return {REFUSED_KEY: str(error)}
    except Exception as error:
        if isinstance(error, EngineRefusedError) and error.shared:
            return {REFUSED_KEY: str(error)}
        write_traceback(config, f"worker-{rank}", traceback.format_exc())
        if isinstance(error, PassMemoryError):
            with contextlib.suppress(OSError):  # then the workers start again with passes of the same size
                note_smaller_pass(folder, error)
        if full := find_full_disk(error, storage_of(config)):
            raise full from error
        raise
    finally:
        with contextlib.suppress(OSError):  # rows after the last checkpoint are played again
            journal.close()


def _train(
    config: RunConfig, payload: WorkerPayload, folder: StoredFolder, journal: Journal, rank: int, attempt: int
) -> object:
    """Train from the run's position in the storage; returns as `train_in_worker` does."""
    import ray.train.torch

    from marl_ray.training.checkpoints.index import check_last_group, checkpoint_name
    from marl_ray.training.collectives import broadcast_from_rank0
    from marl_ray.training.loop.iterations import CheckpointKeeping, run_worker
    from marl_ray.training.loop.start import RunStart

    position = broadcast_from_rank0(lambda: _read_position(config, folder, journal, attempt))
    if position.refusal:
        return {REFUSED_KEY: position.refusal}
    places = [StoredFolder(folder.filesystem, path) for path in reversed(position.checkpoints)]
    origin = payload.origin
    if places:
        origin = None
    elif origin is not None:
        places = [StoredFolder(*fs.FileSystem.from_uri(origin))]

    def before_checkpoint() -> None:
        if rank == 0:  # the driver may sleep while another owner's workers write to the same folder
            _check_owner(config, folder, payload.lease)
            check_last_group(folder, position.attempt)
        journal.flush()  # steps up to this checkpoint are not played again after a failure, so their rows must not be lost

    tidy = partial(_tidy_folder, config, folder, position.attempt)
    last = run_worker(
        config,
        ray.train.torch.get_device(),
        RunStart(places, origin, payload.run_id, best_score_left=position.best_left, pass_sizes=position.pass_sizes),
        _make_callbacks(journal, folder, position, rank),
        CheckpointKeeping(
            lambda iteration: folder / checkpoint_name(iteration, position.attempt), before_checkpoint, tidy
        ),
        _make_engine_of(config) if config.engine_actors else None,
    )
    if rank == 0:
        check_last_group(folder, position.attempt)
        tidy()  # again, for a worker that was killed after the last checkpoint and before this
    return last


def _check_owner(config: RunConfig, folder: StoredFolder, lease: int) -> None:
    """Raise LeaseLostError if another driver owns the run now."""
    check_owned(folder.filesystem, folder.path, lease, f"run {config.name!r}")


def _read_position(config: RunConfig, folder: StoredFolder, journal: Journal, attempt: int) -> _StoragePosition:
    """Read the run's position from the storage, on rank 0 alone."""
    from marl_ray.training.checkpoints.index import own_checkpoints
    from marl_ray.training.loop.pass_sizes import pass_sizes

    checkpoints, refusal = [], ""
    try:
        checkpoints = [place.path for place in own_checkpoints(folder, identity_hash(config), journal.say)]
    except MarlRayError as error:
        refusal = f"no checkpoint can be used: {error}"
    best_left, damaged = (math.inf, []) if refusal else _find_best_left(folder)
    return _StoragePosition(checkpoints, refusal, attempt, best_left, damaged, pass_sizes(folder, journal.say))


def _make_callbacks(journal: Journal, folder: StoredFolder, position: _StoragePosition, rank: int) -> "RunCallbacks":
    """Return the functions that write the run's journal. As the run begins, damaged checkpoints are withdrawn."""
    from marl_ray.training.checkpoints.index import check_last_group, check_rows_own, note_start
    from marl_ray.training.checkpoints.manifest import withdraw_manifest
    from marl_ray.training.loop.callbacks import RunCallbacks
    from marl_ray.training.tracking.system_metrics import SystemMetrics

    system = SystemMetrics()

    def row(metrics: dict[str, float]) -> None:
        journal.write_row(metrics | system.read())

    def begin(after: int | None) -> None:
        if rank != 0:
            return
        check_last_group(folder, position.attempt)
        note_start(folder, position.attempt, after)
        journal.begin(after)
        check_rows_own(folder, position.attempt, after)
        for path, line in position.damaged:  # now that there is another checkpoint to continue from
            journal.say(line)
            withdraw_manifest(StoredFolder(folder.filesystem, path))

    return RunCallbacks(row, journal.write_transcripts, journal.phase, begin, journal.say)


def _find_best_left(folder: StoredFolder) -> tuple[float, list[tuple[str, str]]]:
    """Return the score of the best checkpoint whose bundle is there, and the paths of the better ones.

    The score is minus infinity if there is none. The paths are of those whose bundle is not there, each with a line
    about it. The newest checkpoint is not among them: `load_newest` checks it.
    """
    from marl_ray.training.checkpoints.index import find_best_undamaged, published_checkpoints

    checkpoints = published_checkpoints(folder)
    try:
        best_checkpoint, damaged = find_best_undamaged(checkpoints, sizes=True)
    except OSError:  # storage that does not answer has lost nothing
        return math.inf, []
    lines = [(place.path, line) for place, line in damaged if place != checkpoints[-1].place]
    return -math.inf if best_checkpoint is None else best_checkpoint.manifest.score, lines


def _tidy_folder(config: RunConfig, folder: StoredFolder, attempt: int) -> None:
    """Let the run's link lead to the best bundle so far, and remove the checkpoints that are not kept."""
    from marl_ray.training.checkpoints.index import find_best, published_checkpoints, remove_unneeded

    with contextlib.suppress(OSError):  # a run that cannot make links, or not delete, continues
        best_checkpoint = find_best(published_checkpoints(folder))
        if best_checkpoint is not None:
            link_bundle(*folder, best_checkpoint.name, f"{storage_of(config)}/{config.name}")
        remove_unneeded(folder, config.checkpoint.newest, config.checkpoint.interval, attempt)


def _make_engine_of(config: RunConfig) -> "Callable[[str, TokenPolicy], Engine]":
    """Return the function that makes a policy's engine.

    The function makes the engine in actors if it can run there, and else in the worker's process.
    """
    from marl_ray.policies.engines.choice import make_engine
    from marl_ray.training.team.engine_actors import EngineActors

    def engine_of(name: str, policy: "TokenPolicy") -> "Engine":
        return EngineActors(config, name, policy) if engine_spec(policy.generation.engine).host else make_engine(policy)

    return engine_of
