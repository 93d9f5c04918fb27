"""The metrics of a run as lines of JSON: `NAME/metrics.jsonl`.

A row is one object of numbers. An iteration's row has `iteration`, `steps` (environment steps so far), `timestamp` (seconds
since 1970 at which the driver got it) and its metrics; the row of iteration 0 is the evaluation before training. An epoch of
a warm start has `steps` 0, `warm_start/epoch` and no `iteration`. Values that are not finite are left out.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyarrow import fs

from marl_ray.errors import MarlRayError
from marl_ray.training.run_folder.appended_file import AppendedFile
from marl_ray.training.tracking.other_sinks import numbers
from marl_ray.training.tracking.rows_to_driver import STARTS_AFTER

METRICS = "metrics.jsonl"
"""Name of the file in a run's folder."""


class MetricsFile:
    """Appends rows to a run's file; a sink.

    A group of workers that goes on from a checkpoint says so by a row with STARTS_AFTER. The rows that follow that
    checkpoint are then removed, because the group plays these iterations again.
    """

    def __init__(self, filesystem: fs.FileSystem, folder: str):
        self.file = AppendedFile(filesystem, f"{folder}/{METRICS}")

    def log(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows, all or none of those between two marks; raises OSError."""
        lines: list[str] = []
        for row in rows:
            if STARTS_AFTER not in row:
                lines.append(_line(row))
                continue
            self.file.append(lines)
            lines = []
            last = row[STARTS_AFTER]
            self.file.keep(lambda line, last=last: last is not None and iteration_of(json.loads(line)) <= last)  # type: ignore[misc]
        self.file.append(lines)

    def end(self, status: str) -> None:
        self.file.close()


def iteration_of(row: Mapping[str, float]) -> int:
    """The iteration of a row; -1 for an epoch of a warm start, which comes before all iterations."""
    return int(row.get("iteration", -1))


def _line(row: Mapping[str, float]) -> str:
    place = {key: int(row[key]) for key in ("iteration", "steps") if key in row}
    return json.dumps(place | {"timestamp": round(time.time(), 3)} | {k: v for k, v in numbers(row) if k not in place})


def read_metrics(filesystem: fs.FileSystem, folder: str) -> list[dict[str, float]]:
    """The rows of a run's folder, in the order of its iterations; empty where there is no file yet.

    A line that is being written is left out. Raises MarlRayError, which names file and line, for lines that are no rows.
    """
    path = f"{folder}/{METRICS}"
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return []
    with filesystem.open_input_stream(path) as stream:
        *lines, _ = stream.read().decode().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            iteration_of(row)
        except (ValueError, TypeError, AttributeError) as error:
            raise MarlRayError(f"{path}, line {number}: expected a row of metrics as a JSON object") from error
        rows.append(row)
    return rows


def history_of(rows: Sequence[Mapping[str, float]], key: str) -> list[tuple[int, float]]:
    """The (environment steps, value) of a metric in the rows of iterations, in their order."""
    return [(int(row["steps"]), row[key]) for row in rows if key in row and iteration_of(row) >= 0]
