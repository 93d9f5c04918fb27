"""The metrics of a run as lines of JSON, in `NAME/metrics.jsonl`.

The first of the workers writes them (journal/writer.py). A row is one object of numbers. An iteration's row has
`iteration`, `steps` (environment steps so far), `timestamp` (seconds since 1970 at which it was written) and its
metrics; the row of iteration 0 is the evaluation before training. An epoch of a warm start has `steps` 0,
`warm_start/epoch` and no `iteration`. Values that are not finite are left out.
"""

import json
import time
from collections.abc import Mapping, Sequence

from pyarrow import fs

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.appended_file import lines_of
from marl_ray.training.tracking.sinks import finite_metrics

METRICS_FILE = "metrics.jsonl"
"""Name of the file in a run's folder."""


def iteration_of(row: Mapping[str, float]) -> int:
    """Return the iteration of a row; -1 for an epoch of a warm start, which comes before all iterations."""
    return int(row.get("iteration", -1))


def row_of(line: str) -> dict[str, float] | None:
    """Return the row of a line; None for a line that is no row."""
    try:
        row: dict[str, float] = json.loads(line)
        iteration_of(row)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None
    return row


def is_metrics(row: Mapping[str, object]) -> bool:
    """Return True if a row is one of a run's: its values are numbers, and the steps are among them.

    A sink that refuses another would wait for ever at it.
    """
    return "steps" in row and all(type(value) in (int, float) for value in row.values())


def line_of(row: Mapping[str, float]) -> str:
    """Return a row of metrics as a line of the file, with the time of now."""
    place = {key: int(row[key]) for key in ("iteration", "steps") if key in row}
    return json.dumps(
        place | {"timestamp": round(time.time(), 3)} | {k: v for k, v in finite_metrics(row) if k not in place}
    )


def read_metrics(filesystem: fs.FileSystem, folder: str) -> list[dict[str, float]]:
    """Return the rows of a run's folder, in the order of its iterations.

    The list is empty where there is no file yet. A line that is being written is left out. Raises MarlRayError, which
    names file and line, for lines that are no rows.
    """
    path = f"{folder}/{METRICS_FILE}"
    rows = []
    for number, line in enumerate(lines_of(filesystem, path), 1):
        row = row_of(line)
        if row is None or not is_metrics(row):
            raise MarlRayError(f"{path}, line {number}: expected a row of metrics as a JSON object")
        rows.append(row)
    return rows


def history_of(rows: Sequence[Mapping[str, float]], key: str) -> list[tuple[int, float]]:
    """Return the (environment steps, value) of a metric in the rows of iterations, in their order."""
    return [(int(row["steps"]), row[key]) for row in rows if key in row and iteration_of(row) >= 0]
