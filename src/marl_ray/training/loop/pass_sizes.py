"""Halve the passes of a policy after a worker has run out of memory in one.

The worker cannot try a smaller pass itself, because the others wait for it in the middle of the pass. So it notes half
the size in the run's folder and ends. All workers start again from the checkpoint, and all read the note.
"""

from marl_ray.stored_files.json_files import read_json, write_json
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.errors import PassMemoryError

SIZES_FILE = "passes.json"
"""Name of the file in a run's folder: policy -> maximum number of sequences of a pass."""


def pass_sizes(folder: StoredFolder) -> dict[str, int]:
    """Return policy -> maximum number of sequences of a pass, of the policies whose passes ran out of memory."""
    noted = read_json(folder.filesystem, (folder / SIZES_FILE).path) or {}
    return {str(name): int(rows) for name, rows in noted.items()}


def note_smaller_pass(folder: StoredFolder, error: PassMemoryError) -> None:
    """Halve the passes of the error's policy from the next start of the workers on.

    Passes of one sequence stay as they are. Workers that run out of memory together note the same.
    """
    if error.policy is not None and error.rows > 1:
        write_json(folder.filesystem, (folder / SIZES_FILE).path, pass_sizes(folder) | {error.policy: error.rows // 2})
