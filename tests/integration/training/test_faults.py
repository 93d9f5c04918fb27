"""Runs that meet faults end as runs that met none: with the same journal, state and sinks.

Processes are killed or cut off at generated lines or before chosen calls, checkpoints are damaged, and trackers are
dead or slow. The command that starts the run again is the same.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from processes.interrupted_runs import (
    EVERY,
    ITERATIONS,
    Bench,
    Event,
    Result,
    events,
    survives,
)
from processes.plain_processes import STOP, Fault
from processes.plain_train import Ended, Start, plain_train
from pyarrow import fs
from servers.object_store import object_store
from toy_runs.runs import mlflow_database
from toys.trackers import read_iterations

from marl_ray.config import RunConfig, parse_config
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.training.checkpoints.index import find_best, published_checkpoints
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.run_folder.bundle_link import linked_bundle
from marl_ray.training.run_folder.metrics_file import iteration_of
from marl_ray.training.run_folder.record import filesystem_of, record_of, write_record

STEP = "training/loop/run.py:Run.step"
"""The function of the product that a worker calls in every iteration."""
WRITE_INDEX = "training/checkpoints/tensor_files.py:TensorWriter.finish"
"""Called once a checkpoint, when its tensors and its bundle are written and its index and its manifest are not."""
WRITE_CHECKPOINT = "training/checkpoints/saving.py:write"
"""Called by each worker once a checkpoint, before its first file is written."""
DELIVER = "training/journal/mlflow_sink.py:MlflowSink.log"
"""Called by the driver with rows that MLflow has not got."""
CHECK_OWNER = "stored_files/ownership/lease.py:check_owned"
"""Called by a worker when it has taken its attempt's number and nothing else is done."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an MLflow database."""
    root = tmp_path_factory.mktemp("faults")
    mlflow_database(root / "mlflow")
    (root / "tracked").mkdir()
    (root / "runs").mkdir()
    return root


@pytest.fixture(scope="module")
def start(root: Path) -> Iterator[Callable[[Mapping[str, Any], Start], Ended]]:
    with plain_train(root / "machine", TRACKED=str(root / "tracked")) as start:
        yield start


@pytest.fixture(scope="module")
def local(root: Path, start: Any) -> Bench:
    return Bench(root, str(root / "runs"), start, 1)


@pytest.fixture(scope="module")
def both(root: Path, start: Any) -> Bench:
    return Bench(root, str(root / "runs"), start, 2)


@pytest.fixture(scope="module")
def remote(root: Path) -> Iterator[Bench]:
    with (
        object_store(f"bucket-{time.time_ns()}") as uri,  # whose address processes get with their environment
        plain_train(root / "remote", TRACKED=str(root / "tracked")) as start,
    ):
        yield Bench(root, f"{uri}/runs", start, 1)


TEAM = {
    "env": {"id": "MultiGrid-Empty-5x5-v0", "kwargs": {"agents": 4}},
    "team": {
        "red": {"agents": ["agent_0", "agent_2"], "algorithm": "mappo"},
        "blue": {"agents": ["agent_1", "agent_3"], "algorithm": "ippo", "hyper": {"lr": 0.003}},
    },
}
"""Two policies of two agents each, with algorithms of their own."""


@pytest.fixture(scope="module")
def teams(root: Path, start: Any) -> Bench:
    return Bench(root, str(root / "runs"), start, 2, TEAM)


@pytest.fixture(scope="module")
def remote_teams(root: Path, remote: Bench) -> Bench:
    return Bench(root, remote.storage, remote.start, 2, TEAM)


MANY = settings(deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(Start(groups=(Fault(WRITE_CHECKPOINT, 2, rank=1),)), id="a worker, in a checkpoint"),
        pytest.param(Start(driver=Fault(DELIVER, 1)), id="the driver, while workers train"),
    ],
)
def test_a_run_of_which_one_process_is_killed_is_as_if_nothing_had_happened(both, first):
    survives(both, [Event(first, None, False, {})])


@pytest.mark.slow
@pytest.mark.parametrize("linger_s", [0.5, 1.5])
@pytest.mark.parametrize("second", [None, Fault(CHECK_OWNER, 1, STOP)])
def test_workers_that_sleep_in_a_checkpoint_complete_it_in_vain(local, remote, second, linger_s):
    for bench in (local, remote):
        asleep = Fault(WRITE_INDEX, 1, STOP)
        survives(bench, [Event(Start(None, (asleep, second), linger_s), None, False, {})])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.data())
@settings(MANY, max_examples=30)
def test_a_run_that_dies_anywhere_is_in_the_end_as_if_nothing_had_happened(local, data):
    survives(local, data.draw(st.lists(events(local), min_size=1, max_size=3)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.data())
@settings(MANY, max_examples=15)
def test_a_run_of_two_workers_that_dies_anywhere_is_as_if_nothing_had_happened(both, data):
    survives(both, data.draw(st.lists(events(both), min_size=1, max_size=3)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.data())
@settings(MANY, max_examples=10)
def test_a_run_on_an_object_store_that_dies_anywhere_is_as_if_nothing_had_happened(remote, data):
    survives(remote, data.draw(st.lists(events(remote), min_size=1, max_size=3)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", ["teams", "remote_teams"])
@given(st.data())
@settings(MANY, max_examples=6)
def test_a_team_of_two_policies_that_dies_anywhere_is_as_if_nothing_had_happened(request, place, data):
    bench = request.getfixturevalue(place)
    survives(bench, data.draw(st.lists(events(bench), min_size=1, max_size=3)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_dies_and_goes_on_with_other_numbers_of_workers_learns_the_same(teams):
    run = teams.run("other-workers")
    for workers, last in ((1, False), (4, False), (2, False), (1, True)):
        run = parse_config(RunConfig, run.as_given() | {"resources": {"workers": workers, "max_failures": 0}})
        how = Start() if last else Start(groups=(Fault(STEP, 3),))
        ended = teams.begin(run, how)
        assert ended.met == ([] if last else [STEP])
        # Of two workers the one that lives may be the first to say that the other is gone.
        assert (ended.status == 0 or " failed: worker " in ended.output) and "Traceback" not in ended.output, (
            ended.output
        )
    result = Result(run)
    assert [iteration_of(row) for row in result.rows] == EVERY
    for row, calm in zip(result.rows, teams.result.rows, strict=True):
        assert row == pytest.approx(calm, rel=1e-3, abs=1e-5)
    result.check_sinks(teams.root / "tracked")
    result.check_folder()


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [1000, 1300, 1500])
def test_a_run_whose_disk_was_full_is_as_if_it_had_not_been(local, tmp_path, kilobytes):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk]).returncode:
        pytest.skip("only root can make a small disk here")
    try:
        run = parse_config(RunConfig, local.run("full").as_given() | {"storage": str(disk)})
        ended = local.begin(run, Start())
        assert ended.status == 1 and "No space left on device" in ended.output and "Traceback" not in ended.output, (
            ended.output
        )
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        ended = local.begin(run, Start())
        assert ended.status == 0 and "Traceback" not in ended.output, ended.output
        result = Result(run)
        assert result.rows == local.result.rows and result.files == local.result.files
        assert result.state == local.result.state and result.policies == local.result.policies
        result.check_sinks(local.root / "tracked")
        result.check_folder()
    finally:
        subprocess.run(["umount", disk], check=True)


def reopen(bench: Bench, name: str) -> tuple[RunConfig, StoredFolder]:
    """A run that has ended, and whose driver was killed before it noted that; and its folder."""
    run = bench.run(name)
    ended = bench.begin(run, Start())
    assert ended.status == 0, ended.output
    place = StoredFolder(*filesystem_of(run))
    record = record_of(run)
    del record["finished"]
    write_record(run, record)
    return run, place


@pytest.mark.slow
def test_the_next_workers_remove_a_folder_whose_removal_was_cut_short(local):
    run, place = reopen(local, "removed")
    Path(place.path, "checkpoint_00000002_0000000001000", "weights").mkdir(parents=True)
    assert local.begin(run, Start()).status == 0
    Result(run).check_folder()


@pytest.mark.slow
def test_marks_of_something_else_and_a_picture_that_cannot_be_written_end_no_run(local):
    run, place = reopen(local, "strange")
    for mark in Path(place.path, "sinks").iterdir():
        mark.write_text(json.dumps({"rows": "x", "run_id": 3, "ended": [], "iteration": {}}))
    Path(place.path, "return.png").unlink()
    Path(place.path, "return.png").mkdir()
    ended = local.begin(run, Start())
    assert ended.status == 0 and "Traceback" not in ended.output, ended.output
    assert "return.png cannot be written: " in ended.output
    Result(run).check_sinks(local.root / "tracked")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["all are gone", "the best is gone", "the best is flipped"])
def test_a_run_whose_bundles_are_lost_makes_another(local, how):
    run, place = reopen(local, "lost")
    everything = published_checkpoints(place)
    chosen = find_best(everything)
    assert chosen is not None and everything[-1].has_bundle == (chosen == everything[-1])
    lost = [each for each in everything if each.has_bundle] if how == "all are gone" else [chosen]
    for each in lost:
        file = Path(f"{each.place}/bundle/bundle.json")
        file.write_bytes(file.read_bytes()[::-1]) if "flipped" in how else file.unlink()
    ended = local.begin(run, Start())
    for each in lost:
        assert f"{each.place}/bundle/bundle.json" in ended.output
    if "flipped" in how:  # which is seen when training has ended
        assert ended.status == 1 and "; the same command makes one of the last weights" in ended.output
        ended = local.begin(run, Start())
    assert ended.status == 0 and "Traceback" not in ended.output
    remaining = find_best(published_checkpoints(place))
    assert remaining is not None and remaining.name not in {each.name for each in lost}
    assert str(linked_bundle(*place)) == f"{place}/bundle"
    assert load_bundle(f"{place}/bundle").manifest.lineage.run == run.name
    assert read_iterations(local.root / "tracked", run.name) == EVERY


@pytest.mark.slow
def test_a_copy_of_a_run_that_began_from_another_goes_on_without_it(local, tmp_path):
    longer = {"train": local.calm.as_given()["train"] | {"total_steps": 32 * (ITERATIONS + 4)}}
    keys = longer | {"resume_from": local.calm.name, "resources": {"max_failures": 0}}
    run = parse_config(RunConfig, local.run("next").as_given() | keys)
    ended = local.begin(run, Start(groups=(Fault(STEP, 3),)))
    assert ended.status == 1 and "The actor died" in ended.output and ended.met == [STEP], ended.output
    shutil.copytree(f"{run.storage}/{run.name}", tmp_path / run.name, symlinks=True)
    copy = run.model_copy(update={"storage": str(tmp_path)})  # where the other run is not
    (last, *_) = reversed(published_checkpoints(StoredFolder(*filesystem_of(copy))))
    assert ITERATIONS <= last.manifest.iteration < ITERATIONS + 4
    for each in (run, copy):
        ended = local.begin(each, Start())
        assert ended.status == 0 and ended.groups == 1, ended.output
    rows = [Result(each).rows for each in (run, copy)]
    assert rows[0] == rows[1] and [iteration_of(row) for row in rows[0]] == list(range(ITERATIONS, ITERATIONS + 5))
    assert load_bundle(f"{tmp_path}/{run.name}/bundle").manifest.lineage.origin is not None


@pytest.mark.slow
def test_a_run_that_is_copied_to_an_object_store_and_back_is_as_if_it_had_stayed(remote, tmp_path):
    run = remote.run("copied")
    places = (str(tmp_path / "first"), remote.storage, str(tmp_path / "last"))
    for place, following, deadly in zip(places, (*places[1:], None), (4, 2, None), strict=True):
        run = parse_config(RunConfig, run.as_given() | {"storage": place, "resources": {"max_failures": 0}})
        ended = remote.begin(run, Start(groups=() if deadly is None else (Fault(STEP, deadly),)))
        assert ended.status == (0 if deadly is None else 1) and "Traceback" not in ended.output, ended.output
        assert deadly is None or ("The actor died" in ended.output and ended.met == [STEP]), ended.output
        if following is not None:
            old, new = filesystem_of(run), filesystem_of(run.model_copy(update={"storage": following}))
            new[0].create_dir(new[1])
            fs.copy_files(old[1], new[1], old[0], new[0])
    result = Result(run)
    assert result.rows == remote.result.rows and result.files == remote.result.files
    assert result.state == remote.result.state and result.policies == remote.result.policies
    result.check_sinks(remote.root / "tracked")
    result.check_folder()
