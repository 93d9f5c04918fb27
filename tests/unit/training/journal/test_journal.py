"""The journal of a run: what workers write, what is left when they start again, and who reads it meanwhile."""

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs
from toy_runs.runs import config
from waiting import until

from marl_ray.errors import MarlRayError
from marl_ray.stored_files import appended_file as files
from marl_ray.stored_files.appended_file import appended_file, content_of, parts_of
from marl_ray.stored_files.tail import Tail
from marl_ray.training.journal.deliveries import find_incomplete_sinks
from marl_ray.training.journal.delivery import Delivery
from marl_ray.training.journal.follower import Follower
from marl_ray.training.journal.writer import FAILURES_FILE, Journal, write_failure
from marl_ray.training.run_folder.metrics_file import METRICS_FILE, iteration_of, read_metrics
from marl_ray.training.run_folder.run_log import RunLog

LOCAL = fs.LocalFileSystem()


def away(root: Path) -> fs.FileSystem:
    """A file system that is not the local one, as an object store is not."""
    return fs.SubTreeFileSystem(str(root), LOCAL)


class ListSink:
    """Takes rows into a list."""

    def __init__(self, rows):
        self.rows = rows

    def log(self, rows):
        self.rows.extend(rows)

    def end(self, status):
        pass


def row(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "steps": 32 * iteration, "return": iteration / 2}


def write(journal: Journal, after: int | None, *rows: dict[str, Any]) -> None:
    """Write as a group of workers does that continues after a checkpoint."""
    journal.begin(after)
    for each in rows:
        journal.write_row(each)


def iterations(filesystem: fs.FileSystem, folder: str) -> list[int]:
    return [iteration_of(record) for record in read_metrics(filesystem, folder)]


@given(st.lists(st.integers(0, 6), max_size=6))
@settings(max_examples=30, deadline=None)
def test_groups_of_workers_that_start_again_leave_every_iteration_once(tmp_path_factory, checkpoints):
    folder = str(tmp_path_factory.mktemp("run"))
    done = -1
    for last in (None, *checkpoints):
        if last is not None and last > done:
            continue  # there is no such checkpoint yet
        first = 0 if last is None else last + 1
        journal = Journal(LOCAL, folder)
        write(journal, last, *(row(iteration) for iteration in range(first, first + 3)))
        done = first + 2
        assert iterations(LOCAL, folder) == list(range(done + 1))


def test_a_run_that_begins_anew_repeats_no_epoch_of_its_warm_start(tmp_path):
    journal = Journal(LOCAL, str(tmp_path))
    epochs = [{"steps": 0.0, "warm_start/epoch": epoch, "warm_start/log_likelihood": -1.0} for epoch in (1.0, 2.0)]
    write(journal, None, *epochs)
    write(journal, None, *epochs, row(0), row(1))
    assert iterations(LOCAL, str(tmp_path)) == [-1, -1, 0, 1]
    write(journal, 0, row(1))  # from the checkpoint after the warm start
    assert iterations(LOCAL, str(tmp_path)) == [-1, -1, 0, 1]


def test_rows_are_json_without_numbers_that_are_not_finite(tmp_path):
    Journal(LOCAL, str(tmp_path)).write_row(row(1) | {"loss": float("nan"), "kl": float("inf"), "entropy": 0.25})
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    stored = json.loads(line)
    assert stored.pop("timestamp") > 1.7e9
    assert stored == {"iteration": 1, "steps": 32, "return": 0.5, "entropy": 0.25}
    assert line.startswith('{"iteration": 1, "steps": 32, "timestamp": ')


def test_a_line_that_was_cut_is_not_read_and_goes_with_the_next_start(tmp_path):
    folder = str(tmp_path)
    write(Journal(LOCAL, folder), None, row(1), row(2))
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    assert iterations(LOCAL, folder) == [1]
    write(Journal(LOCAL, folder), 1, row(2))
    assert iterations(LOCAL, folder) == [1, 2]
    path.write_text('{"steps": 0}\n[1]\n')
    with pytest.raises(MarlRayError, match=rf"^{path}, line 2: expected a row of metrics as a JSON object$"):
        read_metrics(LOCAL, folder)
    assert read_metrics(LOCAL, str(tmp_path / "none")) == []


def test_on_remote_storage_the_file_is_whole_after_its_end_and_goes_on_from_there(tmp_path):
    remote = away(tmp_path)
    remote.create_dir("run")
    for last, steps in ((None, range(3)), (1, range(2, 5))):
        journal = Journal(remote, "run")
        write(journal, last, *map(row, steps))
        journal.close()
    assert iterations(remote, "run") == list(range(5))


def test_a_disk_that_is_full_leaves_no_half_of_a_line(tmp_path):
    path = tmp_path / "file"
    file, limits = appended_file(LOCAL, str(path)), resource.getrlimit(resource.RLIMIT_FSIZE)
    file.append(["first"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match=f"{path} could not be written; is the disk full"):
            file.append(["second"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.append(["third"])
    assert path.read_text() == "first\nthird\n"


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.booleans()), min_size=1, max_size=8), st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_readers_get_every_line_once_however_often_workers_start_again(tmp_path_factory, groups, remote):
    """Each group continues after a checkpoint, which may lie before lines that were read already."""
    root = tmp_path_factory.mktemp("run")
    filesystem, path = (away(root), "rows") if remote else (LOCAL, str(root / "rows"))
    tails = Tail(filesystem, path), Tail(filesystem, path)
    taken: tuple[list[str], list[str]] = [], []
    done, generation = 0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PART_BYTES", 60)
        for count, more, reads in groups:
            count, generation = min(count, done), generation + 1
            file = appended_file(filesystem, path)
            file.keep(count)
            for number in range(count, count + more):
                file.append([f"{number} {'x' * generation}"])  # a line that is played again has another length
                if number % 3 == 0:
                    file.flush()
            file.close()
            done = count + more
            for tail, lines in zip(tails[: 1 + reads], taken, strict=False):
                while new := tail.read(len(lines), max_lines=7):
                    lines += new
            expected = [str(number) for number in range(done)]
            assert [line.split()[0] for line in content_of(filesystem, path).decode().splitlines()] == expected
            assert [line.split()[0] for line in taken[0]][:done] == expected
    assert Tail(filesystem, path).count() == done
    if remote:
        assert all(info.size <= 60 for info in parts_of(filesystem, path))


def test_a_flush_to_an_object_store_writes_the_last_part_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    file = appended_file(away(tmp_path), "rows")
    for number in range(100):
        file.append([f"{number:049d}"])
    file.flush()
    parts = sorted((tmp_path / "rows").iterdir())
    assert [part.name for part in parts] == [f"{first:012d}" for first in range(0, 100, 20)]
    for part in parts[:-1]:
        part.chmod(0o400)
        part.rename(part.with_suffix(".kept"))
    file.append(["more"])
    file.close()
    assert [part.name for part in sorted((tmp_path / "rows").iterdir()) if part.name.isdigit()] == [
        f"{first:012d}" for first in (80, 100)
    ]


def test_another_rank_writes_nothing(tmp_path):
    journal = Journal(LOCAL, str(tmp_path), rank=1)
    write(journal, None, row(1))
    journal.phase("training")
    journal.write_transcripts(1, [{"text": "hello"}])
    journal.flush()
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_was_lost_cannot_write_where_another_has_taken_its_place_and_not_written(tmp_path):
    lost, following = Journal(LOCAL, str(tmp_path)), Journal(LOCAL, str(tmp_path))
    write(lost, None, row(1), row(2))
    write(following, 2)  # all rows stay
    lost.write_row(row(3))
    following.write_row(row(3))
    following.flush()
    assert iterations(LOCAL, str(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("remote", [False, True])
def test_a_worker_that_was_lost_and_comes_back_cannot_write(tmp_path, remote):
    (tmp_path / "run").mkdir()
    filesystem, folder = (away(tmp_path), "run") if remote else (LOCAL, str(tmp_path / "run"))
    lost = Journal(filesystem, folder)
    write(lost, None, row(1), row(2))
    lost.flush()
    following = Journal(filesystem, folder)
    write(following, 1, row(2))
    following.flush()
    lost.write_row(row(3))
    with pytest.raises(OSError, match=r"metrics.jsonl was changed by another process; only one may write it"):
        lost.flush()
    following.write_row(row(3))
    following.flush()
    assert iterations(filesystem, folder) == [1, 2, 3]


def test_a_group_that_begins_and_ends_between_two_looks_is_no_restart(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    folder, run = str(tmp_path / "run"), config("storage=" + str(tmp_path))
    follower = Follower(run, LOCAL, folder, RunLog(run))
    # The thread of the follower looks twice a second, so all of this falls between two looks.
    Journal(LOCAL, folder).begin(None)
    write_failure(LOCAL, folder, {0: ConnectionError("lost")})
    Journal(LOCAL, folder).begin(7)
    write_failure(LOCAL, folder, {0: ConnectionError("lost again")})
    follower.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("its workers start again from the checkpoint of iteration 7: worker 0: ConnectionError: lost")


def test_storage_that_is_away_for_a_while_costs_no_line(tmp_path, monkeypatch):
    shown: list[str] = []
    console = SimpleNamespace(phase=shown.append, say=shown.append, write=lambda *texts: None)
    follower = Follower(config("tracking.progress=false"), LOCAL, str(tmp_path), console)
    for tail in follower.tails.values():
        tail.poll_s = 0.01
    failures, refused = follower.tails[FAILURES_FILE], []

    def refuse(after):
        refused.append(after)
        raise OSError("SlowDown")

    with monkeypatch.context() as patch:
        patch.setattr(failures, "read", refuse)
        for line, after in (("one", None), ("two", 7)):
            journal = Journal(LOCAL, str(tmp_path))
            journal.begin(after)
            journal.say(line)
            journal.close()
            write_failure(LOCAL, str(tmp_path), {0: ConnectionError("lost")})
        seen = len(refused)
        until(lambda: len(refused) > seen + 1, "a look that reads the events alone")
    until(lambda: "two" in shown, "the last line")
    follower.close()
    again = "its workers start again from the checkpoint of iteration 7: worker 0: ConnectionError: lost"
    assert shown == ["one", again, "two"]


def open_files(folder: Path) -> list[str]:
    """Names of the files below a folder that this process has open."""
    targets = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return [target for target in targets if target.startswith(str(folder))]


def test_readers_of_a_journal_that_have_ended_leave_no_file_open(tmp_path):
    run = config(f"storage={tmp_path}", "tracking.progress=false")
    folder = tmp_path / run.name
    folder.mkdir()
    journal = Journal(LOCAL, str(folder))
    write(journal, None, row(1))
    journal.close()
    with RunLog(run) as console:
        follower = Follower(run, LOCAL, str(folder), console)
        follower.close()
    assert find_incomplete_sinks(run, LOCAL, str(folder)) == ["mlflow"]
    rows: list[dict[str, Any]] = []
    delivery = Delivery("own", lambda: ListSink(rows), LOCAL, str(folder), lambda line: None)
    delivery.end("FAILED", lambda sink: None)
    delivery.thread.join(30)
    delivery.leave()
    assert [each["iteration"] for each in rows] == [1] and open_files(tmp_path) == []
