"""The folder of an evaluation: its manifest, its report, and every result as soon as it is known.

evaluation.json   benchmark, data, samples, limits: they may not change when the evaluation is continued
results.jsonl     one line a sample, appended and synced; a line that a kill left incomplete is dropped
report.json, report.md
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from marl_ray.errors import FieldError, MarlRayError
from marl_ray.evaluation.scoring.local import JobKind, ResultRow
from marl_ray.json_types import JsonMapping
from marl_ray.stored_files.durability import create_local_folder
from marl_ray.stored_files.temporary_files import replace_file

MANIFEST_FILE, RESULTS_FILE = "evaluation.json", "results.jsonl"
PATH_KEYS = ("data", "samples")
"""Keys of the manifest that hold paths. If an evaluation continues with moved files, their digests must be equal."""
ResultKey = tuple[JobKind, str, int]
"""Kind of the scored job, task id of its problem and number of its sample."""


class ResultsFile:
    """Appends results to the file, and knows which results it holds."""

    def __init__(self, file: int, rows: dict[ResultKey, ResultRow]) -> None:
        self._file = file
        self.rows = rows

    def add(self, rows: Iterable[JsonMapping]) -> None:
        """Write results; when this returns they are on the disk."""
        new = [dict(row) for row in rows]
        data = b"".join(json.dumps(row).encode() + b"\n" for row in new)
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
        self.rows |= {key_of(row): row for row in new}


def key_of(row: JsonMapping) -> ResultKey:
    """Return the key of a result. Raises KeyError if the row lacks one of its parts."""
    return row["what"], row["task_id"], row["sample"]


@contextmanager
def open_results(folder: Path, manifest: JsonMapping) -> Iterator[ResultsFile]:
    """Open an evaluation's folder, to begin the evaluation or to continue it.

    Raises FieldError naming `out` if the folder holds another evaluation (naming the difference), or one that is
    running now.
    """
    try:
        create_local_folder(folder)
        file = os.open(folder / RESULTS_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise FieldError("out", f"{folder} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FieldError("out", f"{folder}: another evaluation is writing there") from error
        _check_manifest(folder, manifest, empty=os.fstat(file).st_size == 0)
        yield ResultsFile(file, _read_results(folder / RESULTS_FILE, file))
    finally:
        os.close(file)


def _check_manifest(folder: Path, manifest: JsonMapping, empty: bool) -> None:
    path = folder / MANIFEST_FILE
    if not path.exists():
        if not empty:
            raise FieldError("out", f"{folder} has {RESULTS_FILE} but no {MANIFEST_FILE}; choose another folder")
        replace_file(path, (json.dumps(manifest, indent=2) + "\n").encode())
        return
    try:
        before = json.loads(path.read_bytes())
    except ValueError as error:
        raise MarlRayError(f"{path}: not JSON; choose another folder") from error
    for key, value in manifest.items():
        if key in PATH_KEYS:
            continue
        stored = before.get(key) if isinstance(before, dict) else None
        if stored != value:
            raise FieldError(
                "out", f"{folder} holds an evaluation with {key} {stored!r}, not {value!r}; choose another"
            )


def _read_results(path: Path, file: int) -> dict[ResultKey, ResultRow]:
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):  # a killed process left the last line incomplete
        os.ftruncate(file, complete)
    results = {}
    for number, line in enumerate(data[:complete].split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            results[key_of(row)] = row
        except (ValueError, KeyError, TypeError) as error:
            raise MarlRayError(f"{path}:{number}: not a result; remove the line to have it measured again") from error
    return results
