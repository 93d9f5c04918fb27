"""The files that a run leaves in its folder: log, picture, the link to the best bundle. Metrics are in test_journal.py."""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TextIO

import pytest
from pyarrow import fs
from toy_runs.runs import config

from marl_ray.errors import MarlRayError
from marl_ray.training.run_folder.bundle_link import LINK_NAME, link_bundle, linked_bundle
from marl_ray.training.run_folder.metrics_file import history_of
from marl_ray.training.run_folder.run_log import LOG_FILE, RunLog
from marl_ray.training.tracking.curve_plot import panels_of, plot_run, title_of
from marl_ray.training.tracking.progress_bar import ProgressBar, iteration_line
from marl_ray.training.tracking.summary import run_summary

LOCAL = fs.LocalFileSystem()


def away(root: Path) -> fs.FileSystem:
    """A file system that is not the local one, as an object store is not."""
    return fs.SubTreeFileSystem(str(root), LOCAL)


def test_the_link_leads_to_the_last_bundle_that_was_linked(tmp_path):
    assert linked_bundle(LOCAL, str(tmp_path)) is None
    for name in ("checkpoint_1", "checkpoint_2"):
        (tmp_path / "toy" / name / LINK_NAME).mkdir(parents=True)
        link_bundle(LOCAL, str(tmp_path / "toy"), name, "not read")
    assert linked_bundle(LOCAL, str(tmp_path / "toy")) == str(tmp_path / "toy" / LINK_NAME)
    moved = (tmp_path / "toy").rename(tmp_path / "moved")
    assert (moved / LINK_NAME).resolve() == moved / "checkpoint_2" / LINK_NAME
    (moved / "checkpoint_2" / LINK_NAME).rmdir()
    assert linked_bundle(LOCAL, str(moved)) is None


def test_a_copy_of_the_bundle_in_the_place_of_the_link_does_not_stay(tmp_path):
    """A copy that followed the links left it there; a run would register these weights as its best ones for ever."""
    (tmp_path / LINK_NAME).mkdir()
    (tmp_path / LINK_NAME / "bundle.json").write_text("old")
    (tmp_path / "checkpoint_2" / LINK_NAME).mkdir(parents=True)
    link_bundle(LOCAL, str(tmp_path), "checkpoint_2", "not read")
    assert (tmp_path / LINK_NAME).resolve() == tmp_path / "checkpoint_2" / LINK_NAME


def test_on_remote_storage_the_link_is_a_file_with_the_uri(tmp_path):
    remote = away(tmp_path)
    remote.create_dir("run")
    for name in ("checkpoint_1", "checkpoint_2"):
        link_bundle(remote, "run", name, "s3://bucket/run")
    assert linked_bundle(remote, "run") == "s3://bucket/run/checkpoint_2/bundle"


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\xff\xfe\n", b"s3://bucket/run\n", b"s3://b/run/checkpoint_2/bundlf\n"]
)
def test_a_file_of_something_else_in_the_place_of_the_link_is_no_link(tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LINK_NAME).write_bytes(content)
    assert linked_bundle(LOCAL, str(tmp_path / "run")) is None and linked_bundle(away(tmp_path), "run") is None


def test_the_log_has_the_lines_of_before_its_folder_and_how_the_run_ended(tmp_path, capsys):
    run = config(f"storage={tmp_path}")
    path = tmp_path / "toy" / LOG_FILE
    with pytest.raises(MarlRayError), RunLog(run) as console:  # noqa: PT012  the log is of a run that fails
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


def pipe_without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def full_disk() -> TextIO:
    return Path("/dev/full").open("w", buffering=1)


def closed_file() -> TextIO:
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize(
    ("stream_of", "error"),
    [(pipe_without_reader, BrokenPipeError), (full_disk, OSError), (closed_file, ValueError)],
)
def test_lines_that_nobody_takes_end_no_run_and_are_in_the_log(tmp_path, stream_of, error, monkeypatch):
    """`marl-ray train ... 2>&1 | head -1`, or with a log on a full disk."""
    (tmp_path / "toy").mkdir()
    run, stream = config(f"storage={tmp_path}"), stream_of()
    with pytest.raises(error):
        stream.write("a line\n")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    with RunLog(run) as console:
        console.open()
        console.phase("registering the best bundle")
        console.say("a note")
    with ProgressBar(run, [].append) as progress:
        progress.show({"iteration": 6, "steps": 192})
    with contextlib.suppress(error):
        stream.close()
    lines = (tmp_path / "toy" / LOG_FILE).read_text().splitlines()
    assert [line.split("  ")[-1] for line in lines] == ["registering the best bundle", "a note"]


def test_without_progress_a_phase_is_in_the_log_alone(tmp_path, capsys):
    (tmp_path / "toy").mkdir()
    with RunLog(config(f"storage={tmp_path}", "tracking.progress=false")) as console:
        console.open()
        console.phase("starting Ray")
    assert capsys.readouterr().err == "" and "starting Ray" in (tmp_path / "toy" / LOG_FILE).read_text()


def test_the_picture_of_a_run_names_its_algorithms_and_shows_intervals(tmp_path):
    team = "team={one: {agents: [a], algorithm: ippo}, two: {agents: [b]}}"
    assert title_of(config("seed=3")) == "toy: mappo, seed 3\ntoys.envs:countdown"
    assert title_of(config(team)) == "toy: one ippo, two mappo, seed 0\ntoys.envs:countdown"
    rows = [{"iteration": i, "steps": 32 * i, "return": 1.0 + i} for i in range(4)]
    rows[2] |= {"eval/return": 2.0, "eval/return_low": 1.5, "eval/return_high": 2.5}
    (panel,) = panels_of(config(), lambda key: history_of(rows, key))
    assert (
        panel.evaluation_points == [(64, 2.0)]
        and panel.intervals == [(64, 1.5, 2.5)]
        and len(panel.training_points) == 4
    )
    assert plot_run([panel], tmp_path / "return.png", title_of(config())).read_bytes().startswith(b"\x89PNG")


def test_the_summary_says_whose_episodes_a_return_is_of_and_what_greedy_actions_earn():
    evaluation = {"steps": 96, "eval/return": 0.94, "eval/greedy_return": 0.98, "entropy": 0.285}
    assert run_summary(config(), evaluation | {"best/return": 0.938}, evaluation) == [
        "best    return 0.938 at step 96, on fresh episodes",
        "last    return 0.940 (greedy 0.980), entropy 0.28 at step 96, in its evaluation, the same weights",
    ]
    best, last = run_summary(config(), {"steps": 32, "best/return": 0.9}, {"steps": 96, "return": 0.8})
    assert (
        best.endswith("at step 32, on fresh episodes") and last == "last    return 0.800 at step 96 (training episodes)"
    )


def test_the_progress_line_says_of_which_step_the_evaluation_is():
    evaluation = {"steps": 32, "return": 0.5, "eval/return": 0.25, "eval/greedy_return": 0.25}
    assert iteration_line(config(), evaluation, evaluation) == "return 0.500  evaluated 0.250"
    assert iteration_line(config(), {"steps": 96}, evaluation) == "return -  evaluated 0.250 at step 32"
