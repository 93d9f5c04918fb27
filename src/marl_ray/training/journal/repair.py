"""Mends `metrics.jsonl` before a run continues, where something other than the run has changed it."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from pyarrow import fs

from marl_ray.errors import MarlRayError, one_line
from marl_ray.stored_files.appended_file import lines_of, replace_lines, take_over_copy
from marl_ray.stored_files.json_files import read_json
from marl_ray.training.journal.delivery import MARKS_FOLDER, mark_of
from marl_ray.training.journal.writer import EVENTS_FILE, FAILURES_FILE
from marl_ray.training.run_folder.metrics_file import METRICS_FILE, is_metrics, iteration_of, row_of


def repair_metrics(filesystem: fs.FileSystem, folder: str, last: int | None, has_origin: bool = False) -> list[str]:
    """Remove the lines that are no rows, and rows that come twice.

    Returns lines for people about these, and about rows that are missing up to iteration `last`, that of the newest
    checkpoint. A run that `has_origin` begins with a later iteration than the first. The owner of the run calls it
    while nobody writes; raises MarlRayError for a file that cannot be read or mended.

    A sink goes by the numbers of lines, so a mark that no longer fits the lines is removed: the sink gets all rows
    again, or those that it does not have if it can tell.
    """
    path = f"{folder}/{METRICS_FILE}"
    try:
        for name in (METRICS_FILE, EVENTS_FILE, FAILURES_FILE):
            take_over_copy(filesystem, f"{folder}/{name}")
        remaining, iterations, removed = separate_rows(lines_of(filesystem, path))
        if removed:
            replace_lines(filesystem, path, remaining)
        first = iterations[0] if has_origin and iterations else 1
        missing = [] if has_origin and not iterations else sorted({*range(first, (last or 0) + 1)} - {*iterations})
        for info in filesystem.get_file_info(fs.FileSelector(f"{folder}/{MARKS_FOLDER}", allow_not_found=True)):
            if not _fits_rows(filesystem, info.path, iterations, bool(removed or missing)):
                filesystem.delete_file(info.path)
    except OSError as error:
        raise MarlRayError(f"storage: {path} cannot be mended: {one_line(error)}") from error
    lines = []
    if removed:
        single = len(removed) == 1
        reason = "was no row, or one for the second time" if single else "were no rows, or some for the second time"
        lines.append(f"{path}: {_line_numbers('line', removed)} {reason}; removed")
    if missing:
        lines.append(f"{path} lacks the rows of {_line_numbers('iteration', missing)}, which are not played again")
    return lines


def separate_rows(lines: Sequence[str]) -> tuple[list[str], list[int], list[int]]:
    """Separate the lines that are rows, in the order of iterations, from the others.

    Returns (the lines that are rows, their iterations, the numbers of the other lines from 1). Of all lines as many
    are kept as have iterations in order, so that one whose iteration is wrong costs no other.
    """
    iterations: dict[int, int] = {}
    """Index of each line that is a row -> its iteration."""
    lasts: list[int] = []
    ends: list[int] = []
    """For every length, the index of the line that ends a series of so many with the least iteration; and that iteration."""
    before: dict[int, int | None] = {}
    for index, line in enumerate(lines):
        row = row_of(line)
        if row is None or not is_metrics(row):
            continue
        iterations[index] = iteration = iteration_of(row)
        # Epochs of a warm start come before all iterations, and have none.
        length = bisect_right(ends, iteration) if iteration < 0 else bisect_left(ends, iteration)
        before[index] = lasts[length - 1] if length else None
        if length == len(lasts):
            lasts.append(index)
            ends.append(iteration)
        elif iteration < ends[length]:  # of two rows of one iteration the first stays
            lasts[length], ends[length] = index, iteration
    in_order: list[int] = []
    current = lasts[-1] if lasts else None
    while current is not None:
        in_order.append(current)
        current = before[current]
    in_order.reverse()
    removed = [index + 1 for index in range(len(lines)) if index not in {*in_order}]
    return [lines[index] for index in in_order], [iterations[index] for index in in_order], removed


def _fits_rows(filesystem: fs.FileSystem, path: str, iterations: Sequence[int], changed: bool) -> bool:
    """Return True if the mark in a file counts the rows of these iterations, or more.

    The mark may count more: a group of workers that starts again removes rows that sinks have taken, and writes them
    again.
    """
    try:
        mark = mark_of(read_json(filesystem, path))
        counted = min(mark.rows, len(iterations))
        if mark.rows == 0 or mark.iteration is None or counted == 0:
            return not changed or mark.rows == 0
        ahead = mark.iteration - iterations[counted - 1]
        return ahead == mark.rows - counted and not (changed and ahead)
    except ValueError:  # a file of something else: the sink gets all rows
        return True


def _line_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return `line 7`, `lines 3 and 5`, `lines 1 to 9`, `lines 3 to 90, 12 of them`."""
    first, last, count = numbers[0], numbers[-1], len(numbers)
    if count == 1:
        return f"{noun} {first:,}"
    if count == 2:
        return f"{noun}s {first:,} and {last:,}"
    return f"{noun}s {first:,} to {last:,}" + ("" if last - first + 1 == count else f", {count:,} of them")
