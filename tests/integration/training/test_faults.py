"""Runs whose processes are killed or cut off at generated lines, whose checkpoints are damaged and whose trackers are dead
or slow: the same command ends with the journal, the state and the sinks of a run that met nothing."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import mlflow
import pytest
from hypothesis import HealthCheck, Phase, currently_in_test_context, given, settings
from hypothesis import note as note_example
from hypothesis import strategies as st
from processes.plain_train import KILL, STOP, Ended, Fault, Start, plain_train
from pyarrow import fs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys.object_store import object_store
from toys.runs import mlflow_database, timeless
from toys.trackers import taken

from marl_ray.config import RunConfig, parse_config
from marl_ray.policies.bundles.actor_critic import load_bundle
from marl_ray.training.checkpoints.index import best, published
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.journal.all_sinks import local_copy
from marl_ray.training.run_folder.bundle_link import linked_bundle
from marl_ray.training.run_folder.metrics_file import iteration_of, read_metrics
from marl_ray.training.run_folder.owners import OWNER
from marl_ray.training.run_folder.record import filesystem_of, read_json, write_json

ITERATIONS = 6
EVERY = list(range(ITERATIONS + 1))
NAMES = re.compile(
    r"run\.json|starts|metrics\.jsonl|events\.jsonl|failures\.jsonl|run\.log|return\.png|bundle|owner|sinks|tensorboard|errors"
    r"|checkpoint_\d{8}_\d{13}"
)
"""All that may lie in the folder of a finished run."""
OWNED = re.compile(r"error: name: run '.*' is owned by process \d+ of .*, whose last beat is \d+ s old; ")


@dataclass(frozen=True)
class Damage:
    """Damage to the newest checkpoint while the run is down."""

    file: int
    """Number of the file that is damaged; the manifest is one of them."""
    how: str


@dataclass(frozen=True)
class Event:
    """A start of the command, and what happens afterwards."""

    start: Start
    damage: Damage | None
    half_a_line: bool
    mood: Mapping[str, float]


RUN = "training/loop/run.py"
"""A file of the product whose lines a worker runs in every iteration."""
NUMBERS = count()
"""Numbers of all runs, because those of several benches share their trackers."""


class Bench:
    """Starts runs of one size, each with a name of its own."""

    def __init__(
        self,
        root: Path,
        storage: str,
        start: Callable[[Mapping[str, Any], Start], Ended],
        workers: int,
        keys: Mapping[str, Any] | None = None,
    ):
        """`keys` of their configs that differ from those of `run`."""
        self.root, self.storage, self.start, self.workers, self.keys = root, storage, start, workers, keys or {}
        self.sleeps = False
        self.calm = self.run("calm")
        ended = self.start(self.calm.given(), Start())
        assert (ended.status, ended.groups) == (0, 1), ended.said
        self.lines = ended.lines
        self.result = Result(self.calm)

    def begin(self, run: RunConfig, how: Start) -> Ended:
        """Start the command, again and again while a driver that sleeps does not count as lost yet."""
        deadline = time.monotonic() + 30
        while (ended := self.start(run.given(), how)).status == 1 and OWNED.search(ended.said):
            assert self.sleeps and time.monotonic() < deadline, ended.said
            time.sleep(0.3)
        self.sleeps = ended.status is None
        return ended

    def run(self, name: str) -> RunConfig:
        data = {
            "name": f"{name}-{self.workers}-{next(NUMBERS)}",
            "env": {"id": "MultiGrid-Empty-5x5-v0", "kwargs": {"agents": 2}},
            "train": {"total_steps": 32 * ITERATIONS, "env_copies": 4, "horizon": 8},
            "checkpoint": {"every": 2},
            "evaluation": {"episodes": 2, "every": 3},
            "hyper": {"lr": 0.01, "epochs": 2, "minibatches": 2},
            "resources": {"workers": self.workers},
            "storage": self.storage,
        }
        data["tracking"] = {
            "uri": f"sqlite:///{self.root}/mlflow/mlflow.db",
            "experiment": data["name"],
            "also": ["tensorboard", "toys.trackers:Moody"],
            "progress": False,
        }
        return parse_config(RunConfig, data | self.keys)


class Result:
    """All that a finished run has left."""

    def __init__(self, run: RunConfig):
        self.run = run
        self.filesystem, self.folder = filesystem_of(run)
        self.rows = [
            {key: value for key, value in row.items() if key != "timestamp" and not key.startswith("system/")}
            for row in timeless(read_metrics(self.filesystem, self.folder))
        ]
        last = published(StoredFolder(self.filesystem, self.folder))[-1]
        # torch writes an id of its own into the index.
        parts = (name for name in last.manifest.files if name.startswith(("weights/__", "envs")))
        self.files = {name: last.manifest.files[name] for name in parts}
        with self.filesystem.open_input_stream(f"{last.place}/state.json") as stream:
            self.state = json.loads(stream.read())
        for key in ("seconds", "mlflow_run_id", "run", "identity"):  # the identity is of the name too
            self.state.pop(key)
        self.state["metrics"] = timeless([self.state["metrics"]])
        with local_copy(str(linked_bundle(self.filesystem, self.folder))) as bundle:
            self.policies = load_bundle(bundle).manifest.policies

    def check_sinks(self, tracked: Path) -> None:
        """Each sink has each iteration once."""
        assert taken(tracked, self.run.name) == EVERY
        with local_copy(f"{self.run.storage}/{self.run.name}/tensorboard") as events:
            points = EventAccumulator(str(events)).Reload().Scalars("iteration")
        assert [int(point.value) for point in points] == EVERY
        client = mlflow.MlflowClient(tracking_uri=self.run.tracking.uri)
        experiment = client.get_experiment_by_name(self.run.name)
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "iteration")
        assert [int(point.value) for point in history] == EVERY and run.info.status == "FINISHED"
        assert len(client.search_model_versions(f"name = '{self.run.name}'")) == 1

    def check_folder(self) -> None:
        """Nothing lies about."""
        infos = self.filesystem.get_file_info(fs.FileSelector(self.folder, recursive=True))
        paths = [info.path.removeprefix(f"{self.folder}/") for info in infos]
        tops = {path for path in paths if "/" not in path}
        assert [name for name in tops if not NAMES.fullmatch(name)] == []
        assert [path for path in paths if path.startswith(f"{OWNER}/") and not path.endswith(".json")] == []
        assert len([path for path in paths if path.startswith(f"{OWNER}/")]) == 1
        assert [path for path in paths if path.startswith("sinks/") and not path.endswith(".json")] == []
        checkpoints = {name for name in tops if name.startswith("checkpoint_")}
        complete = {name for name in checkpoints if f"{name}/manifest.json" in paths}
        assert all(f"{name}/damaged/manifest.json" in paths for name in checkpoints - complete)
        assert len(complete) <= 3  # two of the newest, and the best
        assert [path for path in paths if path.endswith((".new", ".tmp")) or "/.bundle-" in path] == []


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


def faults(lines: Mapping[str, int], ranks: int = 1) -> st.SearchStrategy[Fault]:
    """A fault before one of these lines, by file."""
    return st.sampled_from(sorted(lines)).flatmap(
        lambda file: st.builds(
            Fault,
            st.just(file),
            st.integers(1, lines[file]),
            st.sampled_from([KILL, KILL, STOP]),
            st.integers(0, ranks - 1),
        )
    )


def events(bench: Bench) -> st.SearchStrategy[Event]:
    start = st.builds(
        Start,
        st.none() | faults(bench.lines["driver"]),
        st.lists(faults(bench.lines["worker"], bench.workers), max_size=2).map(tuple),
        st.sampled_from([0.0, 0.5, 1.5]),
    )
    damage = st.builds(Damage, st.integers(0, 20), st.sampled_from(["flip", "cut", "delete"]))
    mood = st.fixed_dictionaries({"fails": st.integers(0, 4), "takes_s": st.sampled_from([0.0, 0.0, 0.3])})
    return st.builds(Event, start, st.none() | damage, st.booleans(), mood)


def note(text: str) -> None:
    """Show a line where the test fails."""
    (note_example if currently_in_test_context() else print)(text)


def harm(run: RunConfig, damage: Damage, harmed: set[str]) -> None:
    """Damage the newest checkpoint of a run that goes on, if there is another that was never damaged."""
    place = StoredFolder(*filesystem_of(run))
    if "finished" in (read_json(place.filesystem, f"{place}/run.json") or {}):
        return
    undamaged = [each for each in published(place) if each.name not in harmed]
    names = sorted(
        info.base_name for info in place.filesystem.get_file_info(fs.FileSelector(place.path, allow_not_found=True))
    )
    if len(undamaged) < 2 or undamaged[-1].name != max(name for name in names if name.startswith("checkpoint_")):
        return
    last = undamaged[-1]
    harmed.add(last.name)
    files = [*sorted(last.manifest.files), "manifest.json"]
    path = (last.place / files[damage.file % len(files)]).path
    note(f"{damage.how} {path}")
    if damage.how == "delete":
        place.filesystem.delete_file(path)
        return
    with place.filesystem.open_input_stream(path) as stream:
        content = bytearray(stream.read())
    if damage.how == "cut":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 0xFF
    with place.filesystem.open_output_stream(path) as stream:
        stream.write(bytes(content))


def survives(bench: Bench, plan: list[Event]) -> None:
    """Let a run meet the plan; what it has in the end must be what the calm run has."""
    run, harmed = bench.run("run"), set[str]()
    mood = bench.root / "tracked" / f"{run.name}.mood"
    for event in plan:
        mood.write_text(json.dumps(event.mood))
        ended = bench.begin(run, event.start)
        note(f"{run.name}: status {ended.status}, {ended.groups} groups: {ended.said}")
        assert ended.status in ((0,) if event.start.driver is None else (0, -9, None))
        if event.half_a_line and "://" not in run.storage and ended.status != 0:
            for name in ("metrics.jsonl", "events.jsonl"):
                path = Path(run.storage, run.name, name)
                if path.exists():
                    path.write_bytes(path.read_bytes() + b'{"iteration": 3, "st')
        if event.damage is not None and ended.status != 0:
            harm(run, event.damage, harmed)
    mood.unlink(missing_ok=True)
    ended = bench.begin(run, Start())
    note(f"{run.name}: at last status {ended.status}, {ended.groups} groups: {ended.said}")
    assert ended.status == 0 and "Traceback" not in ended.said
    assert "not in" not in ended.said and "not complete" not in ended.said
    result = Result(run)
    assert [iteration_of(row) for row in result.rows] == EVERY
    assert result.rows == bench.result.rows
    assert result.files == bench.result.files and result.state == bench.result.state
    assert result.policies == bench.result.policies
    result.check_sinks(bench.root / "tracked")
    result.check_folder()


MANY = settings(deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.slow
@pytest.mark.parametrize("linger_s", [0.5, 1.5])
@pytest.mark.parametrize("second", [None, Fault("training/run_folder/owners.py", 4, STOP)])
def test_workers_that_sleep_in_a_checkpoint_complete_it_in_vain(
    local: Bench, remote: Bench, second: Fault | None, linger_s: float
):
    for bench in (local, remote):
        asleep = Fault("training/checkpoints/tensor_files.py", 48, STOP)
        survives(bench, [Event(Start(None, (asleep, second), linger_s), None, False, {})])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.data())
@settings(MANY, max_examples=30)
def test_a_run_that_dies_anywhere_is_in_the_end_as_if_nothing_had_happened(local: Bench, data: st.DataObject):
    survives(local, data.draw(st.lists(events(local), min_size=1, max_size=3)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.data())
@settings(MANY, max_examples=15)
def test_a_run_of_two_workers_that_dies_anywhere_is_as_if_nothing_had_happened(both: Bench, data: st.DataObject):
    survives(both, data.draw(st.lists(events(both), min_size=1, max_size=3)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.data())
@settings(MANY, max_examples=10)
def test_a_run_on_an_object_store_that_dies_anywhere_is_as_if_nothing_had_happened(remote: Bench, data: st.DataObject):
    survives(remote, data.draw(st.lists(events(remote), min_size=1, max_size=3)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", ["teams", "remote_teams"])
@given(st.data())
@settings(MANY, max_examples=6)
def test_a_team_of_two_policies_that_dies_anywhere_is_as_if_nothing_had_happened(
    request: pytest.FixtureRequest, place: str, data: st.DataObject
):
    bench = request.getfixturevalue(place)
    survives(bench, data.draw(st.lists(events(bench), min_size=1, max_size=3)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_dies_and_goes_on_with_other_numbers_of_workers_learns_the_same(teams: Bench):
    run = teams.run("other-workers")
    deadly = teams.lines["worker"][RUN] // 3
    for workers, last in ((1, False), (4, False), (2, False), (1, True)):
        run = parse_config(RunConfig, run.given() | {"resources": {"workers": workers, "max_failures": 0}})
        how = Start() if last else Start(groups=(Fault(RUN, deadly),))
        ended = teams.begin(run, how)
        # Of two workers the one that lives may be the first to say that the other is gone.
        assert (ended.status == 0 or " failed: worker " in ended.said) and "Traceback" not in ended.said, ended.said
        if ended.status == 0:
            break
    result = Result(run)
    assert [iteration_of(row) for row in result.rows] == EVERY
    for row, calm in zip(result.rows, teams.result.rows, strict=True):
        assert row == pytest.approx(calm, rel=1e-3, abs=1e-5)
    result.check_sinks(teams.root / "tracked")
    result.check_folder()


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [1000, 1300, 1500])
def test_a_run_whose_disk_was_full_is_as_if_it_had_not_been(local: Bench, tmp_path: Path, kilobytes: int):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk]).returncode:
        pytest.skip("only root can make a small disk here")
    try:
        run = parse_config(RunConfig, local.run("full").given() | {"storage": str(disk)})
        ended = local.begin(run, Start())
        assert ended.status == 1 and "No space left on device" in ended.said and "Traceback" not in ended.said, (
            ended.said
        )
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        ended = local.begin(run, Start())
        assert ended.status == 0 and "Traceback" not in ended.said, ended.said
        result = Result(run)
        assert result.rows == local.result.rows and result.files == local.result.files
        assert result.state == local.result.state and result.policies == local.result.policies
        result.check_sinks(local.root / "tracked")
        result.check_folder()
    finally:
        subprocess.run(["umount", disk], check=True)


def reopened(bench: Bench, name: str) -> tuple[RunConfig, StoredFolder]:
    """A run that has ended, and whose driver was killed before it noted that; and its folder."""
    run = bench.run(name)
    ended = bench.begin(run, Start())
    assert ended.status == 0, ended.said
    place = StoredFolder(*filesystem_of(run))
    record = read_json(place.filesystem, f"{place}/run.json")
    del record["finished"]
    write_json(place.filesystem, f"{place}/run.json", record)
    return run, place


@pytest.mark.slow
def test_a_folder_that_was_being_removed_after_the_last_checkpoint_is_removed_by_the_next_workers(local: Bench):
    run, place = reopened(local, "removed")
    Path(place.path, "checkpoint_00000002_0000000001000", "weights").mkdir(parents=True)
    assert local.begin(run, Start()).status == 0
    Result(run).check_folder()


@pytest.mark.slow
def test_marks_of_something_else_and_a_picture_that_cannot_be_written_end_no_run(local: Bench):
    run, place = reopened(local, "strange")
    for mark in Path(place.path, "sinks").iterdir():
        mark.write_text(json.dumps({"rows": "x", "run_id": 3, "ended": [], "iteration": {}}))
    Path(place.path, "return.png").unlink()
    Path(place.path, "return.png").mkdir()
    ended = local.begin(run, Start())
    assert ended.status == 0 and "Traceback" not in ended.said, ended.said
    assert "return.png cannot be written: " in ended.said
    Result(run).check_sinks(local.root / "tracked")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["all are gone", "the best is gone", "the best is flipped"])
def test_a_run_whose_bundles_are_lost_makes_another(local: Bench, how: str):
    run, place = reopened(local, "lost")
    everything = published(place)
    chosen = best(everything)
    assert chosen is not None and everything[-1].has_bundle == (chosen == everything[-1])
    lost = [each for each in everything if each.has_bundle] if how == "all are gone" else [chosen]
    for each in lost:
        file = Path(f"{each.place}/bundle/bundle.json")
        file.write_bytes(file.read_bytes()[::-1]) if "flipped" in how else file.unlink()
    ended = local.begin(run, Start())
    for each in lost:
        assert f"{each.place}/bundle/bundle.json" in ended.said
    if "flipped" in how:  # which is seen when training has ended
        assert ended.status == 1 and "; the same command makes one of the last weights" in ended.said
        ended = local.begin(run, Start())
    assert ended.status == 0 and "Traceback" not in ended.said
    left = best(published(place))
    assert left is not None and left.name not in {each.name for each in lost}
    assert str(linked_bundle(*place)) == f"{place}/bundle"
    assert load_bundle(f"{place}/bundle").manifest.lineage.run == run.name
    assert taken(local.root / "tracked", run.name) == EVERY


@pytest.mark.slow
def test_a_copy_of_a_run_that_began_from_another_goes_on_without_it(local: Bench, tmp_path: Path):
    longer = {"train": local.calm.given()["train"] | {"total_steps": 32 * (ITERATIONS + 4)}}
    keys = longer | {"resume_from": local.calm.name, "resources": {"max_failures": 0}}
    run = parse_config(RunConfig, local.run("next").given() | keys)
    ended = local.begin(run, Start(groups=(Fault(RUN, local.lines["worker"][RUN] // 2),)))
    assert ended.status == 1 and "The actor died" in ended.said, ended.said
    shutil.copytree(f"{run.storage}/{run.name}", tmp_path / run.name, symlinks=True)
    copy = run.model_copy(update={"storage": str(tmp_path)})  # where the other run is not
    (kept, *_) = reversed(published(StoredFolder(*filesystem_of(copy))))
    assert ITERATIONS <= kept.manifest.iteration < ITERATIONS + 4
    for each in (run, copy):
        ended = local.begin(each, Start())
        assert ended.status == 0 and ended.groups == 1, ended.said
    rows = [Result(each).rows for each in (run, copy)]
    assert rows[0] == rows[1] and [iteration_of(row) for row in rows[0]] == list(range(ITERATIONS, ITERATIONS + 5))
    assert load_bundle(f"{tmp_path}/{run.name}/bundle").manifest.lineage.origin is not None


@pytest.mark.slow
def test_a_run_that_is_copied_to_an_object_store_and_back_is_as_if_it_had_stayed(remote: Bench, tmp_path: Path):
    run = remote.run("copied")
    lines = remote.lines["worker"][RUN]
    places = (str(tmp_path / "first"), remote.storage, str(tmp_path / "last"))
    for place, following, deadly in zip(places, (*places[1:], None), (lines // 2, lines // 4, None), strict=True):
        run = parse_config(RunConfig, run.given() | {"storage": place, "resources": {"max_failures": 0}})
        ended = remote.begin(run, Start(groups=() if deadly is None else (Fault(RUN, deadly),)))
        assert ended.status == (0 if deadly is None else 1) and "Traceback" not in ended.said, ended.said
        assert deadly is None or "The actor died" in ended.said, ended.said
        if following is not None:
            old, new = filesystem_of(run), filesystem_of(run.model_copy(update={"storage": following}))
            new[0].create_dir(new[1])
            fs.copy_files(old[1], new[1], old[0], new[0])
    result = Result(run)
    assert result.rows == remote.result.rows and result.files == remote.result.files
    assert result.state == remote.result.state and result.policies == remote.result.policies
    result.check_sinks(remote.root / "tracked")
    result.check_folder()
