"""Reads the log of a run while it grows."""

import time
from collections.abc import Iterator

from marl_ray.errors import MarlRayError
from marl_ray.runs.stored import StoredRun
from marl_ray.stored_files.appended_file import content_of
from marl_ray.training.run_folder.run_log import LOG_FILE

POLL_S = 0.5
"""Seconds between two looks at a log that grows."""


def log_lines(run: StoredRun, follow: bool = False) -> Iterator[str]:
    """Yield the lines of a run's log.

    With `follow` it also yields those that are written later, until the run's driver has ended. Raises MarlRayError if
    there is no log.
    """
    if not run.has(LOG_FILE):
        raise MarlRayError(f"run {run.name!r} has no log under {run.uri!r}")
    yielded_lines = 0
    while True:
        alive = _is_alive(run)  # before reading, so that the last lines are not missed
        content = content_of(run.filesystem, f"{run.folder}/{LOG_FILE}") or b""
        lines = content.decode(errors="replace").split("\n")[:-1]
        yield from lines[yielded_lines:]
        yielded_lines = len(lines)
        if not (follow and alive):
            return
        time.sleep(POLL_S)


def _is_alive(run: StoredRun) -> bool:
    owner = run.owner()
    return owner is not None and owner.is_alive(time.time())
