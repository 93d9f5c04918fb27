"""The lines of a run that waits for its workers; the cluster is this process's own small one in the tests of runs."""

import errno
import re
import subprocess
import sys
import threading

import pytest
from toy_runs.runs import config
from toys import texts
from waiting import until

from marl_ray.errors import MarlRayError
from marl_ray.training.machines import worker_watch
from marl_ray.training.machines.full_disk import DiskFullError, find_full_disk
from marl_ray.training.machines.worker_watch import MAX_FAILED_STARTS, WAIT_S, WorkerWatch, exchange_s, follow_notes


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's answers, as one node of two is left."""
    monkeypatch.setattr(worker_watch, "alive_nodes", lambda: {"10.0.0.1"})
    monkeypatch.setattr(worker_watch, "free_resources", lambda: {"CPU": 1.0, "memory": 1e9})
    monkeypatch.setattr(worker_watch, "has_all_placement_groups", lambda: False)
    monkeypatch.setattr(worker_watch, "SAY_S", (0.1, 0.2, 0.3))
    monkeypatch.setattr(worker_watch, "POLL_S", 0.02)


def test_a_wait_names_who_is_missing_what_for_since_when_and_until_when(cluster, tmp_path):
    lines: list[str] = []
    with follow_notes(lines.append) as notes:
        watch = WorkerWatch(notes)
        watch.on_start_requested(2, {"CPU": 1.0, "GPU": 0})
        watch.on_started({0: "10.0.0.1", 1: "10.0.0.2"})
        watch.on_failure({1: ConnectionError("the node is gone")})
        watch.on_start_requested(2, {"CPU": 1.0, "GPU": 0})
        watch.on_start_requested(2, {"CPU": 1.0, "GPU": 0})  # Ray Train tries again and again
        until(lambda: len(lines) >= 4, "four lines")
        watch.on_started({0: "10.0.0.1", 1: "10.0.0.3"})
        until(lambda: lines[-1].startswith("its workers are there"), "the last line")
    assert 5 <= len(lines) <= 7 and re.fullmatch(r"its workers are there, after \d+ s", lines[-1])
    begin, free, lost = lines[0].split("; ")
    assert begin.startswith("waiting for 2 workers of 1 CPU each, since ") and " and at most until " in begin
    assert free == "the cluster has 1 CPU free on 1 node"
    assert lost == "worker 1 was lost on node 10.0.0.2, which is gone (ConnectionError: the node is gone)"


def test_workers_that_have_their_resources_are_said_to_start(cluster, tmp_path, monkeypatch):
    """Nothing is free then, because the workers have it: the cluster is not full."""
    monkeypatch.setattr(worker_watch, "has_all_placement_groups", lambda: True)
    monkeypatch.setattr(worker_watch, "free_resources", lambda: {"CPU": 0.0})
    lines: list[str] = []
    with follow_notes(lines.append) as notes:
        watch = WorkerWatch(notes)
        watch.on_start_requested(2, {"CPU": 1.0})
        until(lambda: lines, "a line")
        watch.on_started({0: "10.0.0.1", 1: "10.0.0.1"})
    assert lines[0].startswith("starting the processes of 2 workers of 1 CPU each, since ") and "free" not in lines[0]


def test_a_short_wait_is_not_said(cluster, tmp_path):
    lines: list[str] = []
    with follow_notes(lines.append) as notes:
        watch = WorkerWatch(notes)
        watch.on_start_requested(1, {"CPU": 1.0})
        watch.on_started({0: "10.0.0.1"})
        until(lambda: not any("_say_again" in thread.name for thread in threading.enumerate()), "the end of the thread")
    assert lines == [] and not any(thread.name == "notes" for thread in threading.enumerate())


def test_a_wait_that_is_over_ends_the_run(cluster, tmp_path):
    watch = WorkerWatch(tmp_path / "notes")
    watch.on_start_requested(1, {"CPU": 8.0})
    watch.since -= WAIT_S + 1
    with pytest.raises(MarlRayError, match=r"^gave up after 2160\d s: waiting for 1 worker of 8 CPU each, since"):
        watch.on_start_requested(1, {"CPU": 8.0})


def test_a_full_disk_and_workers_that_never_start_end_the_run(cluster, tmp_path):
    watch = WorkerWatch(tmp_path / "notes")
    watch.on_failure({0: ConnectionError("lost"), 1: DiskFullError("the disk of /data is full")})
    with pytest.raises(MarlRayError, match="worker 1: the disk of /data is full"):
        watch.on_start_requested(2, {"CPU": 1.0})
    watch = WorkerWatch(tmp_path / "notes")
    for _ in range(MAX_FAILED_STARTS):
        watch.on_start_requested(1, {"CPU": 1.0})
        watch.on_start_failed(ImportError("no module named x"))
    with pytest.raises(MarlRayError, match="its workers could not be started 5 times: ImportError: no module named x"):
        watch.on_start_requested(1, {"CPU": 1.0})


def test_a_full_disk_is_known_by_number_by_words_and_by_what_it_caused():
    by_number, by_words = OSError(errno.ENOSPC, "No space left on device"), RuntimeError("database or disk is full")
    caused = ValueError("a checkpoint is not complete")
    caused.__cause__ = by_number
    for error in (by_number, by_words, caused):
        full = find_full_disk(error, "/")
        assert full is not None and "and the same command continues when there is room" in str(full)
    assert find_full_disk(ValueError("no"), "/") is None


def test_an_error_that_is_its_own_cause_is_looked_at_once():
    error = OSError(errno.EACCES, "Permission denied")
    error.__cause__ = error
    assert find_full_disk(error, "/") is None


def test_a_worker_that_does_not_answer_is_named_once_and_again_when_it_answers(tmp_path):
    lines: list[str] = []
    with follow_notes(lines.append) as notes:
        watch = WorkerWatch(notes)
        watch.on_started({0: "10.0.0.1", 1: "10.0.0.2"})
        for seconds in (3.0, 11.0, 14.0):
            watch.on_silence({1: seconds})
        watch.on_silence({})
    assert len(lines) == 2 and lines[0].startswith(
        "worker 1 on node 10.0.0.2 has not answered for 11 s; it counts as lost at "
    )
    assert lines[1] == "worker 1 on node 10.0.0.2 answers again"


def test_an_exchange_has_a_deadline_that_leaves_time_for_engines(monkeypatch):
    words, engine = texts.config(), texts.config("team.speaker.generation.engine=vllm")
    assert [exchange_s(run) for run in (config(), words, engine)] == [300, 600, 1200]
    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", "7")
    assert exchange_s(engine) == 7


def test_a_watch_that_outlives_its_cluster_starts_none():
    script = """
import ray
from marl_ray.training.machines.cluster_state import alive_nodes, free_resources, has_all_placement_groups
for ask in (alive_nodes, free_resources, has_all_placement_groups):
    try:
        ask()
    except RuntimeError as error:
        print(error)
print(ray.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["this process is not connected to Ray"] * 3 + ["False"]
