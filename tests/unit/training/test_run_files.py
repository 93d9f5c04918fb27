"""The files that a run leaves in its folder: metrics, log, the link to the best bundle."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs
from toys.runs import config

from marl_ray.errors import MarlRayError
from marl_ray.training.run_folder.appended_file import AppendedFile
from marl_ray.training.run_folder.bundle_link import LINK, link_bundle, linked_bundle
from marl_ray.training.run_folder.metrics_file import METRICS, MetricsFile, history_of, iteration_of, read_metrics
from marl_ray.training.run_folder.run_log import LOG, RunLog
from marl_ray.training.tracking.curve_plot import panels_of, plot_run, title_of
from marl_ray.training.tracking.rows_to_driver import STARTS_AFTER

LOCAL = fs.LocalFileSystem()


def away(root: Path) -> fs.FileSystem:
    """A file system that is not the local one, as an object store is not."""
    return fs.SubTreeFileSystem(str(root), LOCAL)


def row(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "steps": 32 * iteration, "return": iteration / 2}


def iterations(filesystem: fs.FileSystem, folder: str) -> list[int]:
    return [iteration_of(row) for row in read_metrics(filesystem, folder)]


@given(st.lists(st.integers(0, 6), max_size=6))
@settings(max_examples=30, deadline=None)
def test_groups_of_workers_that_start_again_leave_every_iteration_once(tmp_path_factory: Any, checkpoints: list[int]):
    folder = str(tmp_path_factory.mktemp("run"))
    file, done = MetricsFile(LOCAL, folder), -1
    for last in (None, *checkpoints):
        if last is not None and last > done:
            continue  # there is no such checkpoint yet
        first = 0 if last is None else last + 1
        file.log([{STARTS_AFTER: last}, *(row(iteration) for iteration in range(first, first + 3))])
        done = first + 2
        assert iterations(LOCAL, folder) == list(range(done + 1))


def test_a_run_that_begins_anew_repeats_no_epoch_of_its_warm_start(tmp_path: Path):
    file = MetricsFile(LOCAL, str(tmp_path))
    epochs = [{"steps": 0.0, "warm_start/epoch": epoch, "warm_start/log_likelihood": -1.0} for epoch in (1.0, 2.0)]
    file.log([{STARTS_AFTER: None}, *epochs])
    file.log([{STARTS_AFTER: None}, *epochs, row(0), row(1)])
    assert iterations(LOCAL, str(tmp_path)) == [-1, -1, 0, 1]
    file.log([{STARTS_AFTER: 0}, row(1)])  # from the checkpoint after the warm start
    assert iterations(LOCAL, str(tmp_path)) == [-1, -1, 0, 1]


def test_rows_are_json_without_numbers_that_are_not_finite(tmp_path: Path):
    MetricsFile(LOCAL, str(tmp_path)).log([row(1) | {"loss": float("nan"), "kl": float("inf"), "entropy": 0.25}])
    (line,) = (tmp_path / METRICS).read_text().splitlines()
    stored = json.loads(line)
    assert stored.pop("timestamp") > 1.7e9
    assert stored == {"iteration": 1, "steps": 32, "return": 0.5, "entropy": 0.25}
    assert line.startswith('{"iteration": 1, "steps": 32, "timestamp": ')


def test_a_line_that_was_cut_is_not_read_and_goes_with_the_next_start(tmp_path: Path):
    folder = str(tmp_path)
    MetricsFile(LOCAL, folder).log([row(1), row(2)])
    path = tmp_path / METRICS
    path.write_bytes(path.read_bytes()[:-9])
    assert iterations(LOCAL, folder) == [1]
    file = MetricsFile(LOCAL, folder)
    file.log([{STARTS_AFTER: 1}, row(2)])
    assert iterations(LOCAL, folder) == [1, 2]
    path.write_text("{}\n[1]\n")
    with pytest.raises(MarlRayError, match=rf"^{path}, line 2: expected a row of metrics as a JSON object$"):
        read_metrics(LOCAL, folder)
    assert read_metrics(LOCAL, str(tmp_path / "none")) == []


def test_on_remote_storage_the_file_is_whole_after_its_end_and_goes_on_from_there(tmp_path: Path):
    remote = away(tmp_path)
    remote.create_dir("run")
    for last, steps in ((None, range(3)), (1, range(2, 5))):
        file = MetricsFile(remote, "run")
        file.log([{STARTS_AFTER: last}])
        for iteration in steps:
            file.log([row(iteration)])
        file.end("FINISHED")
    assert iterations(remote, "run") == list(range(5))


def test_a_disk_that_is_full_leaves_no_half_of_a_line(tmp_path: Path):
    path = tmp_path / "file"
    file, limits = AppendedFile(LOCAL, str(path)), resource.getrlimit(resource.RLIMIT_FSIZE)
    file.append(["first"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match=f"{path} could not be written; is the disk full"):
            file.append(["second"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.append(["third"])
    assert path.read_text() == "first\nthird\n"


def test_the_link_leads_to_the_last_bundle_that_was_linked(tmp_path: Path):
    assert linked_bundle(LOCAL, str(tmp_path)) is None
    for name in ("checkpoint_1", "checkpoint_2"):
        (tmp_path / "toy" / name / LINK).mkdir(parents=True)
        link_bundle(LOCAL, str(tmp_path / "toy"), name, "not read")
    assert linked_bundle(LOCAL, str(tmp_path / "toy")) == str(tmp_path / "toy" / LINK)
    moved = (tmp_path / "toy").rename(tmp_path / "moved")
    assert (moved / LINK).resolve() == moved / "checkpoint_2" / LINK
    (moved / "checkpoint_2" / LINK).rmdir()
    assert linked_bundle(LOCAL, str(moved)) is None


def test_on_remote_storage_the_link_is_a_file_with_the_uri(tmp_path: Path):
    remote = away(tmp_path)
    remote.create_dir("run")
    for name in ("checkpoint_1", "checkpoint_2"):
        link_bundle(remote, "run", name, "s3://bucket/run")
    assert linked_bundle(remote, "run") == "s3://bucket/run/checkpoint_2/bundle"


def test_the_log_has_the_lines_of_before_its_folder_and_how_the_run_ended(tmp_path: Path, capsys: Any):
    run = config(f"storage={tmp_path}")
    path = tmp_path / "toy" / LOG
    with pytest.raises(MarlRayError), RunLog(run) as console:
        console.phase("checking the run")
        assert not path.parent.exists()
        path.parent.mkdir()
        console.open()
        console.write("two\nlines")
        console.say("a note")
        raise MarlRayError("name: no good")
    lines = [line.split("  ", 1) for line in path.read_text().splitlines()]
    assert [text for _, text in lines] == ["0.0 s  checking the run", "two", "lines", "a note", "failed: name: no good"]
    assert all("T" in stamp for stamp, _ in lines)
    assert capsys.readouterr().err == "toy: 0.0 s  checking the run\ntoy: a note\n"


def test_without_progress_a_phase_is_in_the_log_alone(tmp_path: Path, capsys: Any):
    (tmp_path / "toy").mkdir()
    with RunLog(config(f"storage={tmp_path}", "tracking.progress=false")) as console:
        console.open()
        console.phase("starting Ray")
    assert capsys.readouterr().err == "" and "starting Ray" in (tmp_path / "toy" / LOG).read_text()


def test_the_picture_of_a_run_names_its_algorithms_and_shows_intervals(tmp_path: Path):
    team = "team={one: {agents: [a], algorithm: ippo}, two: {agents: [b]}}"
    assert title_of(config("seed=3")) == "toy: mappo, seed 3\ntoys.envs:countdown"
    assert title_of(config(team)) == "toy: one ippo, two mappo, seed 0\ntoys.envs:countdown"
    rows = [{"iteration": i, "steps": 32 * i, "return": 1.0 + i} for i in range(4)]
    rows[2] |= {"eval/return": 2.0, "eval/return_low": 1.5, "eval/return_high": 2.5}
    (panel,) = panels_of(config(), lambda key: history_of(rows, key))
    assert panel.evaluated == [(64, 2.0)] and panel.intervals == [(64, 1.5, 2.5)] and len(panel.training) == 4
    assert plot_run([panel], tmp_path / "return.png", title_of(config())).read_bytes().startswith(b"\x89PNG")
