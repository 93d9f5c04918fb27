"""Runs of one size that faults interrupt, and what such a run must have left in the end."""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import mlflow
from hypothesis import currently_in_test_context
from hypothesis import note as note_example
from hypothesis import strategies as st
from pyarrow import fs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_runs.runs import timeless
from toys.trackers import read_iterations

from marl_ray.config import RunConfig, parse_config
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.stored_files.folder_kinds import OWNER_FOLDER
from marl_ray.stored_files.json_files import read_json
from marl_ray.training.checkpoints.index import published_checkpoints
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.journal.deliveries import local_copy
from marl_ray.training.run_folder.bundle_link import linked_bundle
from marl_ray.training.run_folder.metrics_file import iteration_of, read_metrics
from marl_ray.training.run_folder.record import filesystem_of
from processes.plain_processes import KILL, STOP, Fault
from processes.plain_train import Ended, Start

ITERATIONS = 6
"""Iterations of a run, each with a checkpoint."""
EVERY = list(range(ITERATIONS + 1))
NAMES = re.compile(
    r"run\.json|starts|metrics\.jsonl|events\.jsonl|failures\.jsonl|run\.log|return\.png|bundle|owner|sinks|tensorboard|errors"
    r"|checkpoint_\d{8}_\d{13}"
)
"""All that may lie in the folder of a finished run."""
OWNED = re.compile(
    r"error: name: run '.*' is owned by (process \d+ of .*|another process), whose last beat is \d+ s old; "
)
UNNAMED_OWNER = "is owned by another process"
"""A driver was killed between the creation of its file and its first word in it; it counts as lost after LOST_S."""


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


NUMBERS = count()
"""Numbers of all runs, because those of several benches share their trackers."""


class Bench:
    """Starts runs of one size, each with its own name."""

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
        ended = self.start(self.calm.as_given(), Start())
        assert (ended.status, ended.groups) == (0, 1), ended.output
        self.lines = ended.lines
        self.result = Result(self.calm)

    def begin(self, run: RunConfig, how: Start) -> Ended:
        """Start the command, again and again while a driver that sleeps does not count as lost yet."""
        deadline = time.monotonic() + 30
        while (ended := self.start(run.as_given(), how)).status == 1 and OWNED.search(ended.output):
            assert (self.sleeps or UNNAMED_OWNER in ended.output) and time.monotonic() < deadline, ended.output
            time.sleep(0.3)
        self.sleeps = ended.status is None
        return ended

    def run(self, name: str) -> RunConfig:
        data: dict[str, Any] = {
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
        return parse_config(RunConfig, data | dict(self.keys))


class Result:
    """All that a finished run has left."""

    def __init__(self, run: RunConfig):
        self.run = run
        self.filesystem, self.folder = filesystem_of(run)
        self.rows = [
            {key: value for key, value in row.items() if key != "timestamp" and not key.startswith("system/")}
            for row in timeless(read_metrics(self.filesystem, self.folder))
        ]
        last = published_checkpoints(StoredFolder(self.filesystem, self.folder))[-1]
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

    def check_sinks(self, tracked: Path, asleep_in_call: bool = False) -> None:
        """Check that each sink has each iteration once.

        A tracker that keeps what it gets twice has the rows of one call twice where a driver may have slept
        in that call.
        """
        rows = read_iterations(tracked, self.run.name)
        assert (sorted(set(rows)) if asleep_in_call else rows) == EVERY
        with local_copy(f"{self.run.storage}/{self.run.name}/tensorboard") as event_files:
            points = EventAccumulator(str(event_files)).Reload().Scalars("iteration")
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
        assert [path for path in paths if path.startswith(f"{OWNER_FOLDER}/") and not path.endswith(".json")] == []
        assert len([path for path in paths if path.startswith(f"{OWNER_FOLDER}/")]) == 1
        assert [path for path in paths if path.startswith("sinks/") and not path.endswith(".json")] == []
        checkpoints = {name for name in tops if name.startswith("checkpoint_")}
        complete = {name for name in checkpoints if f"{name}/manifest.json" in paths}
        assert all(f"{name}/damaged/manifest.json" in paths for name in checkpoints - complete)
        assert len(complete) <= 3  # two of the newest, and the best
        assert [path for path in paths if path.endswith((".new", ".tmp")) or "/.bundle-" in path] == []


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
    damage = st.builds(Damage, st.integers(0, 20), st.sampled_from(["flip", "shorten", "delete"]))
    mood = st.fixed_dictionaries({"fails": st.integers(0, 4), "takes_s": st.sampled_from([0.0, 0.0, 0.3])})
    return st.builds(Event, start, st.none() | damage, st.booleans(), mood)


def note(text: str) -> None:
    """Show a line where the test fails."""
    (note_example if currently_in_test_context() else print)(text)


def harm(run: RunConfig, damage: Damage, harmed: set[str]) -> None:
    """Damage the newest checkpoint of a run that continues, if there is another that was never damaged."""
    place = StoredFolder(*filesystem_of(run))
    if "finished" in (read_json(place.filesystem, f"{place}/run.json") or {}):
        return
    undamaged = [each for each in published_checkpoints(place) if each.name not in harmed]
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
    if damage.how == "shorten":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 0xFF
    with place.filesystem.open_output_stream(path) as stream:
        stream.write(bytes(content))


def survives(bench: Bench, plan: list[Event]) -> None:
    """Let a run meet the plan, and compare what it has in the end with what the calm run has.

    Faults before a call must be met.
    """
    run, harmed = bench.run("run"), set[str]()
    mood = bench.root / "tracked" / f"{run.name}.mood"
    for event in plan:
        mood.write_text(json.dumps(event.mood))
        ended = bench.begin(run, event.start)
        note(f"{run.name}: status {ended.status}, {ended.groups} groups: {ended.output}")
        assert ended.status in ((0,) if event.start.driver is None else (0, -9, None))
        planned = [fault.place for fault in (event.start.driver, *event.start.groups) if fault is not None]
        assert [place for place in planned if ":" in place and place not in ended.met] == []
        if event.half_a_line and "://" not in run.storage and ended.status != 0:
            for name in ("metrics.jsonl", "events.jsonl"):
                path = Path(run.storage, run.name, name)
                if path.exists():
                    path.write_bytes(path.read_bytes() + b'{"iteration": 3, "st')
        if event.damage is not None and ended.status != 0:
            harm(run, event.damage, harmed)
    mood.unlink(missing_ok=True)
    ended = bench.begin(run, Start())
    note(f"{run.name}: at last status {ended.status}, {ended.groups} groups: {ended.output}")
    assert ended.status == 0 and "Traceback" not in ended.output
    assert "not in" not in ended.output and "not complete" not in ended.output
    result = Result(run)
    assert [iteration_of(row) for row in result.rows] == EVERY
    assert result.rows == bench.result.rows
    assert result.files == bench.result.files and result.state == bench.result.state
    assert result.policies == bench.result.policies
    slow = (event.start.driver for event in plan if event.mood.get("takes_s"))
    result.check_sinks(bench.root / "tracked", any(fault is not None and fault.how == STOP for fault in slow))
    result.check_folder()
