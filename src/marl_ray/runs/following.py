"""Reads the log of a run while it grows."""

import time
from collections.abc import Iterator

from marl_ray.errors import MarlRayError, one_line
from marl_ray.runs.stored import StoredRun
from marl_ray.stored_files.appended_file import content_of
from marl_ray.training.run_folder.run_log import LOG_FILE

POLL_S = 0.5
"""Seconds between two looks at a log that grows."""
UNREADABLE_S = 60.0
"""Seconds for which a log that is followed may be unreadable."""


def log_lines(run: StoredRun, follow: bool = False) -> Iterator[str]:
    """Yield the lines of a run's log.

    With `follow` it also yields those that are written later, until the run's driver has ended. Raises MarlRayError if
    there is no log, or if it cannot be read: one that is followed, for a minute.
    """
    if not run.has(LOG_FILE):
        raise MarlRayError(f"run {run.name!r} has no log under {run.uri!r}")
    yielded_lines, read_at = 0, time.monotonic()
    while True:
        try:
            alive = _is_alive(run)  # before reading, so that the last lines are not missed
            content = content_of(run.filesystem, f"{run.folder}/{LOG_FILE}") or b""
        except OSError as error:
            if not follow or time.monotonic() - read_at > UNREADABLE_S:
                raise MarlRayError(f"the log of run {run.name!r} cannot be read: {one_line(error)}") from error
            time.sleep(POLL_S)
            continue
        read_at = time.monotonic()
        lines = content.decode(errors="replace").split("\n")[:-1]
        yield from lines[yielded_lines:]
        yielded_lines = len(lines)
        if not (follow and alive):
            return
        time.sleep(POLL_S)


def _is_alive(run: StoredRun) -> bool:
    owner = run.owner()
    return owner is not None and owner.is_alive(time.time())
