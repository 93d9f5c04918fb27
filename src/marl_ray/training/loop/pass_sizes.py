"""Halve the passes of a policy after a worker has run out of memory in one.

The worker cannot try a smaller pass itself, because the others wait for it in the middle of the pass. So it notes half
the size in the run's folder and ends. All workers start again from the checkpoint, and all read the note.
"""

from collections.abc import Callable

from marl_ray.errors import one_line
from marl_ray.stored_files.json_files import read_json, write_json
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.errors import PassMemoryError

SIZES_FILE = "passes.json"
"""Name of the file in a run's folder: policy -> maximum number of sequences of a pass."""


def pass_sizes(folder: StoredFolder, say: Callable[[str], None]) -> dict[str, int]:
    """Return policy -> maximum number of sequences of a pass, of the policies whose passes ran out of memory.

    A damaged file counts as none, because workers that run out of memory write it anew; `say` gets a line about it.
    """
    try:
        return _read_sizes(folder)
    except ValueError as error:
        where = (folder / SIZES_FILE).path
        say(f"{where} does not hold the sizes of passes: {one_line(error)}; they are as large as without it")
        return {}


def _read_sizes(folder: StoredFolder) -> dict[str, int]:
    """Return the content of the file; empty where there is none. Raises ValueError if it holds something else."""
    noted = read_json(folder.filesystem, (folder / SIZES_FILE).path)
    if noted is None:
        return {}
    if not isinstance(noted, dict):
        raise ValueError("expected a JSON object")
    for name, rows in noted.items():
        if type(rows) is not int or rows < 1:  # a bool is an int too
            raise ValueError(f"{name}={rows!r}: expected a number of sequences from 1")
    return noted


def note_smaller_pass(folder: StoredFolder, error: PassMemoryError) -> None:
    """Halve the passes of the error's policy from the next start of the workers on.

    Passes of one sequence stay as they are. Workers that run out of memory together note the same.
    """
    if error.policy is not None and error.rows > 1:
        sizes = pass_sizes(folder, lambda line: None)  # the start of the workers has said the line
        write_json(folder.filesystem, (folder / SIZES_FILE).path, sizes | {error.policy: error.rows // 2})
