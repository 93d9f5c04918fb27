"""The reader of the act log, which sorts what it reads by unit and time, on disk where it is large."""

import heapq
import logging
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Annotated, TypeVar

import orjson
import pyarrow as pa
from pyarrow import fs
from pydantic import Field, TypeAdapter, ValidationError

from marl_ray.errors import MarlRayError, one_line
from marl_ray.serving.logs.acts import COMPLETE_SUFFIX, PARTIAL_SUFFIX, LoggedRequest, whole_lines
from marl_ray.stored_files.storages import open_storage
from marl_ray.temporary_folders import temporary_folder

RUN_BYTES = 100_000_000
"""Bytes that sorting keeps in memory."""
ROW_BYTES = 200
"""Bytes that a row in memory takes besides its line."""
UNIT_AND_TIME = itemgetter(0, 1)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOGGED: TypeAdapter[LoggedRequest] = TypeAdapter(Annotated[LoggedRequest, Field(union_mode="left_to_right")])


def read_logged(folder: str, experiment: str) -> Iterator[LoggedRequest]:
    """Yield the logged requests of an experiment, sorted by unit and time.

    Units come in the order of their names, and each unit's requests in the order of time. A local folder's partial
    segments are read too, up to the last complete line. Memory is bounded: more than `RUN_BYTES` is sorted on disk, in
    the folder for temporary files. Raises MarlRayError if the folder or a segment cannot be read.
    """
    unreadable = 0

    def parse(line: bytes) -> tuple[str, float, LoggedRequest] | None:
        nonlocal unreadable
        try:
            # The parser of the library that wrote the line; pydantic's own reads JSON only up to about 200 levels.
            request = _LOGGED.validate_python(orjson.loads(line))
        except (ValidationError, orjson.JSONDecodeError):
            unreadable += 1
            return None
        return request.unit, request.at, request

    yield from sorted_by_unit(_lines(folder, experiment), parse)
    if unreadable:
        _log.error("%s: %d unreadable lines are left out", folder, unreadable)


def _lines(folder: str, experiment: str) -> Iterator[bytes]:
    filesystem, root = open_storage(folder, "decisions")
    try:
        selector = fs.FileSelector(f"{root}/{experiment}", allow_not_found=True)
        paths = {info.path for info in filesystem.get_file_info(selector)}
        for path in sorted(paths):
            complete = path.removesuffix(PARTIAL_SUFFIX) + COMPLETE_SUFFIX
            if path.endswith(COMPLETE_SUFFIX):
                yield from _lines_of_file(filesystem, path)
            elif path.endswith(PARTIAL_SUFFIX) and complete not in paths:
                try:
                    yield from _lines_of_file(filesystem, path)
                except FileNotFoundError:  # the segment was completed meanwhile
                    yield from _lines_of_file(filesystem, complete)
    except (OSError, pa.ArrowException) as error:
        raise MarlRayError(f"decisions: {folder!r} cannot be read: {one_line(error)}") from error


def _lines_of_file(filesystem: fs.FileSystem, path: str) -> list[bytes]:
    with filesystem.open_input_stream(path) as stream:  # it decompresses if the name ends in .zst
        return whole_lines(stream.read()).split(b"\n")[:-1]


def sorted_by_unit(
    lines: Iterable[bytes], parse: Callable[[bytes], tuple[str, float, T] | None], run_bytes: int = RUN_BYTES
) -> Iterator[T]:
    """Parse the lines and sort the results by the units and times that `parse` returns.

    Lines for which it returns None are left out. Sorted runs of `run_bytes` go to temporary files and are merged; then
    each line is parsed twice.
    """
    with temporary_folder("sort") as folder:
        runs: list[Iterator[tuple[str, float, T]]] = []
        run: list[tuple[str, float, bytes]] = []
        size = 0
        for line in lines:
            row = parse(line)
            if row is None:
                continue
            run.append((row[0], row[1], line))
            size += len(line) + ROW_BYTES
            if size >= run_bytes:
                path = folder / str(len(runs))
                run.sort(key=UNIT_AND_TIME)
                with path.open("wb") as file:
                    file.writelines(line + b"\n" for _, _, line in run)
                runs.append(filter(None, map(parse, _lines_of(path))))
                run = []
                size = 0
        run.sort(key=UNIT_AND_TIME)
        runs.append(filter(None, map(parse, (line for _, _, line in run))))
        for _, _, parsed_row in heapq.merge(*runs, key=UNIT_AND_TIME):
            yield parsed_row


def _lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            yield line[:-1]
