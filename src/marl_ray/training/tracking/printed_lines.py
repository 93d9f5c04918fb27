"""Lines of runs and sweeps on the standard streams."""

import contextlib
from typing import TextIO


def print_line(line: str, stream: TextIO) -> None:
    """Print a line at once; it is lost where nobody can take it.

    A pipe whose reader has gone, or a file on a full disk, is no reason to end a run.
    """
    with contextlib.suppress(OSError, ValueError):  # of a stream that is closed
        print(line, file=stream, flush=True)
