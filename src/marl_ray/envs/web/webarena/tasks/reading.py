"""Files of web tasks in either format, and their splits."""

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from marl_ray.envs.text.base import is_held_out
from marl_ray.envs.web.webarena.tasks.schema import WebTask
from marl_ray.envs.web.webarena.tasks.verified import VerifiedRecord, verified_task
from marl_ray.envs.web.webarena.tasks.webarena import WebArenaRecord, webarena_task
from marl_ray.errors import MarlRayError
from marl_ray.stored_files.record_files import FileRow, read_bytes, read_record, read_records

_BETWEEN: Any = re.compile(r"[ \t\r\n,]*")


@lru_cache(maxsize=8)
def read_web_tasks(path: str) -> tuple[WebTask, ...]:
    """Return the tasks of a file of WebArena, or of WebArena-Verified, whose records have the key `start_urls`.

    The file is an array (.json) or has a record a line (.jsonl), perhaps in gzip. Raises MarlRayError naming file, line
    and field of the first mistake, or if there is no task, or an id comes twice.
    """
    data = read_bytes(path)
    tasks: dict[str, WebTask] = {}
    for number, row in enumerate(read_records(path, data)):
        try:
            task = web_task(row)
            if task.task_id in tasks:
                raise MarlRayError(f"{row.where}: task_id {task.task_id} is already that of an earlier task")
        except MarlRayError as error:
            # An array's element has no line yet, and finding it out for each of 812 would double the time of reading.
            message = str(error).removeprefix(row.where)
            raise MarlRayError(f"{_with_line(path, row, data, number)}{message}") from error
        tasks[task.task_id] = task
    if not tasks:
        raise MarlRayError(f"{path}: expected at least one task")
    return tuple(tasks.values())


def web_task(row: FileRow) -> WebTask:
    """Return the task of a record in either format. Raises MarlRayError naming the record and the field."""
    if isinstance(row.values, dict) and "start_urls" in row.values:
        return verified_task(read_record(VerifiedRecord, row))
    return webarena_task(read_record(WebArenaRecord, row))


def split_by_template(tasks: Iterable[WebTask], held_out: float) -> tuple[tuple[WebTask, ...], tuple[WebTask, ...]]:
    """Return the training and held-out tasks, where about the share `held_out` of the templates is held out.

    Tasks of one template are on one side: they differ in words alone, so that one of them gives the others away.
    """
    sides = [(task, is_held_out(f"template {task.template}", held_out)) for task in tasks]
    return tuple(task for task, test in sides if not test), tuple(task for task, test in sides if test)


def tasks_of_sites(tasks: Iterable[WebTask], sites: Sequence[str]) -> tuple[WebTask, ...]:
    """Return the tasks that need no other site than these."""
    return tuple(task for task in tasks if set(task.sites) <= set(sites))


def _with_line(path: str, row: FileRow, data: bytes, number: int) -> str:
    """Return the place of a record with its line, which an element of an array does not have yet."""
    if not row.where.endswith("]"):
        return row.where
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    return f"{path}:{_line_of(text, number)}"


def _line_of(text: str, number: int) -> int:
    """Return the line on which element `number` of a JSON array begins."""
    decoder: Any = json.JSONDecoder()
    at = text.index("[") + 1
    for k in range(number + 1):
        at += len(_BETWEEN.match(text, at)[0])
        if k < number:
            _, at = decoder.raw_decode(text, at)
    return text.count("\n", 0, at) + 1
