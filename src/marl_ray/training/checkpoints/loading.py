"""Read a checkpoint.

Every file is compared with the manifest, and a damaged checkpoint gives way to the one before.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.policies.agreement import all_gather_values, run_on_all_workers
from marl_ray.training.checkpoints.index import STATE_FILE, PublishedCheckpoint, check_bundle, refuse_older_format
from marl_ray.training.checkpoints.learner_tensors import allocate_states
from marl_ray.training.checkpoints.manifest import CheckpointManifest, read_manifest, withdraw_manifest
from marl_ray.training.checkpoints.run_state import RunState, StateFile
from marl_ray.training.checkpoints.saving import WEIGHTS, envs_file
from marl_ray.training.checkpoints.storage import DamagedCheckpointError, StoredFolder
from marl_ray.training.checkpoints.tensor_files import StoredFiles, TensorReader
from marl_ray.training.collectives import broadcast_from_rank0, rank_and_world_size
from marl_ray.training.learner.policy_update import Learner

NONE_READABLE = "no checkpoint can be read: "
"""First words of the error of a run none of whose checkpoints can be read."""


class UnreadableCheckpointError(MarlRayError):
    """The error of a run none of whose checkpoints can be read. Another start would meet it again."""


class LoadedCheckpoint(NamedTuple):
    """The plain parts of a checkpoint that was read; its tensors are in the learners."""

    state: RunState
    envs: JsonObject
    """Running episodes: of this worker's environment copies at least."""


def load_newest(
    places: Sequence[StoredFolder],
    learners: dict[str, Learner],
    own_hyper: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> LoadedCheckpoint:
    """Restore the learners from the first of the checkpoints `places` that is whole.

    Every worker calls it with the same places.

    `say` gets a line on rank 0 for each that cannot be read. One that is damaged is withdrawn, but only where another
    one is whole: a storage that shows no file at all is no damage. With `own_hyper` the learners keep their own
    hyper-parameters. Raises UnreadableCheckpointError, which names what is wrong with each, if none is whole.
    """
    lines: list[str] = []
    damages: list[StoredFolder] = []
    for place in places:
        loaded, line, damaged = _try_load(place, learners, own_hyper)
        if loaded is None:
            lines.append(line)
            damages += [place] * damaged
            continue
        if rank_and_world_size()[0] == 0:
            for line in lines:
                say(f"{line}; the run continues from {place}")
            for each in damages:
                withdraw_manifest(each)
        return loaded
    raise UnreadableCheckpointError(NONE_READABLE + "; ".join(lines))


def _try_load(
    place: StoredFolder, learners: dict[str, Learner], own_hyper: bool
) -> tuple[LoadedCheckpoint | None, str, bool]:
    """Try to read one checkpoint, with the same result on all workers.

    Returns (what was read, the error in one line, whether a file is damaged).
    """
    manifest, line, damaged = broadcast_from_rank0(lambda: _find_manifest(place))
    if manifest is None:
        return None, line, damaged

    def read() -> tuple[tuple[LoadedCheckpoint, JsonMapping] | None, tuple[str, bool] | None]:
        try:
            return _read_own_part(place, manifest, learners), None
        except (DamagedCheckpointError, OSError) as error:
            return None, _error_line(place, error)

    read_part, error = run_on_all_workers(read)
    errors = [each for each in all_gather_values(error) if each is not None]
    if read_part is None or errors:
        return None, *errors[0]
    loaded, plain = read_part
    for name, learner in learners.items():
        learner.load_state(plain[name], f"policy {name!r}, after reading {place}")
        if own_hyper:
            learner.apply_hyper()
    return loaded, "", False


def _find_manifest(place: StoredFolder) -> tuple[CheckpointManifest | None, str, bool]:
    """Return a checkpoint's manifest, or else None, the error in one line and whether a file is damaged."""
    try:
        manifest = read_manifest(place)
        if manifest is None:
            refuse_older_format(place)
            return None, f"{place} has no manifest.json, so it is no complete checkpoint", False
        return manifest, "", False
    except (MarlRayError, OSError) as error:
        return None, *_error_line(place, error)


def _error_line(place: StoredFolder, error: Exception) -> tuple[str, bool]:
    """Return an error in one line that names the checkpoint, and whether a file is damaged."""
    text = str(error) if str(place) in str(error) else f"{place} {one_line(error)}"
    return text, isinstance(error, DamagedCheckpointError)


def _read_own_part(
    place: StoredFolder, manifest: CheckpointManifest, learners: dict[str, Learner]
) -> tuple[LoadedCheckpoint, Mapping[str, object]]:
    """Read this worker's part, and the plain state of the learners.

    The learners' tensors are changed also where it fails.
    """
    rank, workers = rank_and_world_size()
    if rank == 0:
        check_bundle(PublishedCheckpoint(place, manifest))
    files = StoredFiles(place, manifest.files)
    state_file = StateFile.decode(files.read(STATE_FILE))
    # Copies of environments go to workers by number, so other workers' files matter only if there are more or fewer.
    ranks = [rank] if manifest.ranks == workers else range(manifest.ranks)
    envs: JsonObject = {}
    for each in ranks:
        envs |= files.read_json(envs_file(each))
    reader = TensorReader(files, WEIGHTS)
    try:
        tensors = allocate_states(learners, reader.read_metadata(), state_file.scalars)
        with warnings.catch_warnings():  # torch warns of a load without collectives, which one damaged part would block
            warnings.simplefilter("ignore")
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # torch's own, a BaseException
        raise next(iter(error.failures.values()))[0] from error
    return LoadedCheckpoint(state_file.state, envs), state_file.learners
