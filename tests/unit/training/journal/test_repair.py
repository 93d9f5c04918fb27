"""The repair of a journal that something other than the run has changed."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from marl_ray.stored_files.appended_file import appended_file
from marl_ray.stored_files.json_files import write_json
from marl_ray.stored_files.tail import Tail
from marl_ray.training.journal.delivery import Mark, read_mark
from marl_ray.training.journal.follower import Follower
from marl_ray.training.journal.repair import repair_metrics, separate_rows
from marl_ray.training.journal.writer import Journal
from marl_ray.training.run_folder.metrics_file import METRICS_FILE, iteration_of, read_metrics

LOCAL = fs.LocalFileSystem()


def row(iteration: int) -> str:
    return json.dumps({"iteration": iteration, "steps": 32 * iteration})


def begin(root: Path, lines: Sequence[str], remote: bool = False, mark: Mark | None = None) -> tuple[Any, str]:
    """File system and folder of a run with these lines of metrics, and a sink with this mark."""
    filesystem, folder = (fs.SubTreeFileSystem(str(root), LOCAL), "run") if remote else (LOCAL, str(root / "run"))
    filesystem.create_dir(f"{folder}/sinks")
    file = appended_file(filesystem, f"{folder}/{METRICS_FILE}")
    file.append(lines)
    file.close()
    if mark is not None:
        write_json(filesystem, f"{folder}/sinks/mlflow.json", asdict(mark))
    return filesystem, folder


def mark_of(rows: int, iteration: int) -> Mark:
    return Mark(rows, "abc", iteration=iteration)


def iterations(filesystem: fs.FileSystem, folder: str) -> list[int]:
    return [iteration_of(record) for record in read_metrics(filesystem, folder)]


@pytest.mark.parametrize("remote", [False, True])
def test_rubbish_and_doubles_are_removed_and_named_and_sinks_are_asked_anew(tmp_path, remote):
    lines = [row(0), row(1), "\x00\x00{", row(2), row(2), "[]", row(3)]
    filesystem, folder = begin(tmp_path, lines, remote, mark_of(7, 3))
    path = f"{folder}/{METRICS_FILE}"
    assert repair_metrics(filesystem, folder, 3) == [
        f"{path}: lines 3 to 6, 3 of them were no rows, or some for the second time; removed"
    ]
    assert iterations(filesystem, folder) == [0, 1, 2, 3]
    assert read_mark(filesystem, folder, "mlflow") == Mark()
    assert repair_metrics(filesystem, folder, 3) == []


@pytest.mark.parametrize(
    "rubbish",
    [
        row(100_000),
        json.dumps({"iteration": 2}),
        json.dumps({"iteration": 2, "steps": 64, "return": "high"}),
        json.dumps({"iteration": 2, "steps": 64, "return": {}}),
        '{"iteration": 1e400, "steps": 3}',
        '{"iteration": NaN, "steps": 3}',
        "{}",
        "3",
    ],
)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_line_that_is_no_row_of_the_run_costs_no_other_line(tmp_path, rubbish, at):
    lines = [row(0), row(1), row(2), row(3)]
    lines.insert(at, rubbish)
    filesystem, folder = begin(tmp_path, lines)
    printed = repair_metrics(filesystem, folder, 3)
    if rubbish == row(100_000) and at == 4:  # the workers that continue from iteration 3 remove it
        assert printed == [] and iterations(filesystem, folder) == [0, 1, 2, 3, 100_000]
        return
    assert printed == [f"{folder}/{METRICS_FILE}: line {at + 1} was no row, or one for the second time; removed"]
    assert iterations(filesystem, folder) == [0, 1, 2, 3]


@given(st.lists(st.integers(-1, 9), max_size=12))
def test_as_many_rows_are_kept_as_are_in_order(numbers):
    lines = [row(number) if number >= 0 else json.dumps({"steps": 0}) for number in numbers]
    remaining, iterations_kept, removed = separate_rows(lines)
    assert remaining == [line for k, line in enumerate(lines, 1) if k not in removed]
    assert all(a < b or a == b == -1 for a, b in pairwise(iterations_kept))
    longest = [0] * len(numbers)
    for k, number in enumerate(numbers):
        before = [longest[j] for j in range(k) if numbers[j] < number or numbers[j] == number == -1]
        longest[k] = 1 + max(before, default=0)
    assert len(remaining) == max(longest, default=0)


@pytest.mark.parametrize(
    "stored",
    [
        {"rows": "3"},
        {"rows": -5},
        {"rows": 1.5},
        {"rows": True},
        {"rows": 1, "iteration": {}},
        {"rows": 1, "run_id": 7},
        {"ended": []},
        {"strange": 1},
        [1],
        "mark",
    ],
)
def test_a_mark_of_something_else_is_that_of_a_new_sink(tmp_path, stored):
    filesystem, folder = begin(tmp_path, [row(0), row(1)])
    write_json(filesystem, f"{folder}/sinks/mlflow.json", stored)
    assert repair_metrics(filesystem, folder, 1) == []
    assert read_mark(filesystem, folder, "mlflow") == Mark()


def test_rows_that_are_lost_are_named_and_the_rows_after_them_reach_the_sinks(tmp_path):
    filesystem, folder = begin(tmp_path, [row(0), row(1)], mark=mark_of(9, 8))
    (line,) = repair_metrics(filesystem, folder, 7)
    assert line == f"{folder}/{METRICS_FILE} lacks the rows of iterations 2 to 7, which are not played again"
    assert read_mark(filesystem, folder, "mlflow") == Mark()
    write_json(filesystem, f"{folder}/sinks/mlflow.json", asdict(mark_of(2, 1)))
    assert repair_metrics(filesystem, folder, 7) == [line]
    assert read_mark(filesystem, folder, "mlflow") == mark_of(2, 1)  # it fits the lines that there are


def test_a_file_that_is_gone_is_named(tmp_path):
    filesystem, folder = begin(tmp_path, [], mark=mark_of(4, 3))
    (line,) = repair_metrics(filesystem, folder, 2)
    assert line.endswith("lacks the rows of iterations 1 and 2, which are not played again")
    assert read_mark(filesystem, folder, "mlflow") == Mark()


@pytest.mark.parametrize(
    ("rows", "stored", "last", "fits"),
    [
        ([0, 1, 2], mark_of(3, 2), 2, True),
        ([0, 1, 2], mark_of(6, 5), 2, True),  # workers removed three rows that the sink has, and will write them again
        ([], mark_of(3, 2), None, True),  # the run begins anew
        ([0, 1, 2], mark_of(1000, 2), 2, False),
        ([0, 1, 2], mark_of(2, 2), 2, False),
        ([-1, -1, 0, 1], mark_of(3, 0), 1, True),
        ([1, 2, 3], mark_of(3, 3), 3, True),  # a run without evaluations
    ],
)
def test_a_mark_stays_that_fits_the_rows(tmp_path, rows, stored, last, fits):
    lines = [row(each) if each >= 0 else json.dumps({"steps": 0, "warm_start/epoch": 1.0}) for each in rows]
    filesystem, folder = begin(tmp_path, lines, mark=stored)
    assert repair_metrics(filesystem, folder, last) == []
    assert read_mark(filesystem, folder, "mlflow") == (stored if fits else Mark())


def test_a_run_that_began_from_another_lacks_none_of_the_others_iterations(tmp_path):
    filesystem, folder = begin(tmp_path, [row(40), row(41)])
    assert repair_metrics(filesystem, folder, 41, has_origin=True) == []
    (line,) = repair_metrics(filesystem, folder, 43, has_origin=True)
    assert "iterations 42 and 43" in line


@pytest.mark.parametrize("remote", [False, True])
def test_readers_and_workers_pass_rubbish_that_comes_while_a_run_goes_on(tmp_path, remote):
    filesystem, folder = begin(tmp_path, [row(0), row(1)], remote)
    name = "000000000000" if remote else ""
    with (tmp_path / "run" / METRICS_FILE / name).open("ab") as stream:
        stream.write(b"\xff\xfe{\n" + row(2).encode() + b"\n")
    assert len(Tail(filesystem, f"{folder}/{METRICS_FILE}").read(0)) == 4
    journal = Journal(filesystem, folder)
    journal.begin(2)
    journal.write_row({"iteration": 3, "steps": 96})
    journal.close()
    (line,) = repair_metrics(filesystem, folder, 3)
    assert "line 3 was no row" in line
    assert iterations(filesystem, folder) == [0, 1, 2, 3]


def test_rubbish_in_the_events_is_not_shown(tmp_path):
    from toy_runs.runs import config

    class Silent:
        def phase(self, text: str) -> None:
            printed.append(text)

        say = phase

        def write(self, *texts: str) -> None:
            pass

    printed: list[str] = []
    filesystem, folder = begin(tmp_path, [])
    (tmp_path / "run" / "events.jsonl").write_bytes(b"\xff\n")
    follower = Follower(config(), filesystem, folder, Silent())
    with (tmp_path / "run" / "events.jsonl").open("ab") as stream:
        stream.write(b"\xfe{\n" + json.dumps({"phase": "training"}).encode() + b"\n")
    follower.close()
    assert printed == ["training"]
