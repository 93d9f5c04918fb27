"""The listener of whoever follows a job: it gets the job's log and what happens to the job."""

from collections.abc import Callable
from typing import NamedTuple


class JobListener(NamedTuple):
    """Two functions that are called while a job is followed, from any thread."""

    write_log: Callable[[str], object]
    """Gets a part of the job's log, with its line breaks, as soon as it is there."""
    say: Callable[[str], object]
    """Gets one line about the job, which begins with its name."""
