"""The files of a trial: however often its process is killed, each row is there once, in order."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from marl_ray.errors import MarlRayError
from marl_ray.stored_files import appended_file
from marl_ray.tuning.folder import ROWS_FILE, Folder, read_rows
from marl_ray.tuning.running import trial_files
from marl_ray.tuning.running.trial_files import Takeover, TrialState, TrialWriter, read_state, write_state

LAST, KEEP = 12, 2


class Killed(BaseException):
    """Ends a process at once."""


def folder_at(path: Path, remote: bool) -> Folder:
    folder = Folder(str(path), "trial")
    if remote:
        folder.filesystem = fs.SubTreeFileSystem("/", fs.LocalFileSystem())
    return folder


def train(writer: TrialWriter, every: int, dies_after: int | None) -> None:
    """Play from the trial's checkpoint to the end; killed after this many rows, checkpoints and halves of checkpoints."""
    start = int(writer.starts[0].rpartition("-")[2]) if writer.starts else 0
    writer.note_begin(start)
    remaining = LAST * 4 if dies_after is None else dies_after
    for iteration in range(start + 1, LAST + 1):
        writer.add_row({"iteration": iteration, "played": iteration, "value": iteration / 2})
        if iteration % every == 0 or iteration == LAST:
            with pytest.MonkeyPatch.context() as patch:
                if remaining == 1:  # after the rows and before the state

                    def killed(*arguments: Any) -> None:
                        raise Killed

                    patch.setattr(trial_files, "write_state", killed)
                name = f"{writer.place}/checkpoint-{iteration}"
                writer.folder.write(f"{name}/seed-0/state.json", b"{}")
                writer.note_checkpoint(name, iteration, iteration)
            remaining -= 1
        remaining -= 1
        if remaining <= 0:
            raise Killed


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 8), max_size=4), st.integers(1, 4), st.booleans(), st.integers(0, 30))
def test_each_row_is_there_once_however_often_the_process_is_killed(
    tmp_path_factory, deaths, every, remote, part_bytes
):
    path = tmp_path_factory.mktemp("trial")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(appended_file, "PART_BYTES", 100)
        for dies_after in [*deaths, None]:
            emitted: list[float] = []
            writer = TrialWriter(
                folder_at(path, remote), KEEP, [0], lambda row, emitted=emitted: emitted.append(row["iteration"]), print
            )
            try:
                train(writer, every, dies_after)
            except Killed:
                rows = path / "trial" / ROWS_FILE
                if part_bytes and rows.exists() and not remote:  # it died while it wrote the next row
                    with rows.open("ab") as stream:
                        stream.write(json.dumps({"iteration": 99, "exploits": 0}).encode()[:part_bytes])
        folder = folder_at(path, remote)
        checkpoints = (path / "trial").glob("attempt-*/checkpoint-*")
        assert sorted(str(place.relative_to(path / "trial")) for place in checkpoints) == sorted(
            read_state(folder).checkpoints
        )
        rows_read = read_rows(folder)
        assert (
            [row["iteration"] for row in rows_read] == list(range(1, LAST + 1)) == [row["played"] for row in rows_read]
        )
        state = read_state(folder)
        assert (state.attempts, state.steps, len(state.checkpoints)) == (
            len(deaths) + 1,
            LAST,
            min(KEEP, -(-LAST // every)),
        )


def test_a_process_that_was_cut_off_does_not_write_over_its_successor(tmp_path):
    folder = Folder(str(tmp_path), "trial")
    first = TrialWriter(folder, KEEP, [0], lambda row: None, print)
    second = TrialWriter(folder, KEEP, [0], lambda row: None, print)
    for writer in (second, first):
        writer.note_begin(0)
        writer.add_row({"iteration": 1, "played": 8})
    second.note_checkpoint("attempt-2/checkpoint-1", 8, 8)
    with pytest.raises(MarlRayError, match="another process has taken this trial over"):
        first.note_checkpoint("attempt-1/checkpoint-1", 8, 8)
    assert len(read_rows(folder)) == 1 and read_state(folder).checkpoints == ["attempt-2/checkpoint-1"]


NOT_JSON = "not JSON: "


@pytest.mark.parametrize(
    ("content", "mistake"),
    [
        ("", f"{NOT_JSON}EOF while parsing a value at line 1 column 0"),
        ("{", f"{NOT_JSON}EOF while parsing an object at line 1 column 1"),
        ("\0\0", f"{NOT_JSON}expected value at line 1 column 1"),
        ("[1]", "expected an object, got [1]"),
        ("3", "expected an object, got 3"),
        ("null", "expected an object, got nothing"),
        ('{"strange": 1}', "unknown key 'strange'"),
        ('{"attempts": "3"}', "attempts: expected a whole number, got '3'"),
        ('{"attempts": true}', "attempts: expected a whole number, got True"),
        ('{"seconds": "1"}', "seconds: expected a number, got '1'"),
        ('{"checkpoints": ["a", 4]}', "checkpoints.1: expected text, got 4"),
        ('{"exploits": [{"at": 8, "donor": 0}]}', "missing key 'exploits.0.values'"),
    ],
)
def test_a_state_of_something_else_is_named(tmp_path, content, mistake):
    folder = folder_at(tmp_path, False)
    folder.write("trial.json", content.encode())
    with pytest.raises(MarlRayError) as refusal:
        read_state(folder)
    assert str(refusal.value) == f"{tmp_path}/trial/trial.json is not the state of a trial: {mistake}"


@pytest.mark.parametrize("remote", [False, True])
def test_a_state_is_read_as_it_was_written(tmp_path, remote):
    folder = folder_at(tmp_path, remote)
    assert read_state(folder) == TrialState()
    state = TrialState(["attempt-1/checkpoint-2"], 1, 128, 64, 2.5, [Takeover(64, 3, {"hyper.lr": 0.1})])
    write_state(folder, state)
    assert read_state(folder) == state


@pytest.mark.parametrize("line", ["", "[1]", "3", "{", '{"iteration": 1e400}'])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    folder = folder_at(tmp_path, False)
    folder.open_lines(ROWS_FILE).append(['{"iteration": 1}', line, '{"iteration": 2}'])
    with pytest.raises(
        MarlRayError, match=r"^/.*/trial/rows.jsonl, line 2: expected a row of metrics as a JSON object$"
    ):
        read_rows(folder)
