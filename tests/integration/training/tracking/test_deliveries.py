"""Sinks that are dead, slow, full or interrupted: each gets every row once and in order in the end, and delays nobody."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_runs.runs import config
from toy_serving.gateways import make_bundle
from toys.trackers import read_iterations
from waiting import until

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.training.journal import deliveries, delivery
from marl_ray.training.journal.deliveries import MLFLOW, BestBundle, Deliveries, find_incomplete_sinks
from marl_ray.training.journal.delivery import Mark, read_mark
from marl_ray.training.journal.mlflow_sink import MlflowSink
from marl_ray.training.journal.writer import Journal
from marl_ray.training.run_folder.record import record_of
from marl_ray.training.run_result import RunResult, deliver_rest, read_finished_result, store_result
from marl_ray.training.tracking import mlflow_run
from marl_ray.training.tracking.mlflow_run import MlflowRun

LOCAL = fs.LocalFileSystem()


def run_of(storage: Path, *trackers: str) -> tuple[RunConfig, str]:
    """A run with these trackers, and its folder."""
    also = ", ".join(f'"toys.trackers:{name}"' if name[0].isupper() else name for name in trackers)
    (storage / "toy").mkdir(parents=True, exist_ok=True)
    return config(f"storage={storage}", f"tracking.also=[{also}]"), str(storage / "toy")


def write(journal: Journal, first: int, last: int, generation: float = 0.0) -> None:
    for iteration in range(first, last + 1):
        journal.write_row(
            {"iteration": iteration, "steps": 32 * iteration, "return": iteration / 2, "time/rollout": generation}
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "RETRY_S", 0.2)
    monkeypatch.setattr(delivery, "LOG_EVERY_S", 0.1)
    monkeypatch.setattr(delivery, "SILENT_S", 2.0)
    monkeypatch.setattr(deliveries, "REGISTERED_S", 1.0)


def delivering(
    run: RunConfig, folder: str, run_id: str = "id", lines: list[str] | None = None, **more: Any
) -> Deliveries:
    """The sinks of a run, without MLflow unless `names` has it."""
    say = [].append if lines is None else lines.append
    return Deliveries(run, run_id, LOCAL, folder, say, {}, names=more.pop("names", run.tracking.also), **more)


def test_no_sink_delays_another_or_the_end(tmp_path):
    run, folder = run_of(tmp_path, "Lines", "Dead", "Hanging", "Slow")
    lines: list[str] = []
    sinks, journal = delivering(run, folder, lines=lines), Journal(LOCAL, folder)
    for iteration in range(20):
        write(journal, iteration, iteration)
        time.sleep(0.02)
    until(lambda: read_iterations(tmp_path, "Lines") == list(range(20)) and bool(lines), "all rows in Lines")

    def slow_has_all_rows() -> bool:
        sinks.watch()
        return len(lines) > 1 and read_iterations(tmp_path, "Slow") == list(range(20))

    until(slow_has_all_rows, "all rows in Slow")
    began = time.monotonic()
    sinks.close("FINISHED", wait_s=5)
    assert time.monotonic() - began < 15
    assert read_iterations(tmp_path, "Lines") == read_iterations(tmp_path, "Slow") == list(range(20))
    assert read_iterations(tmp_path, "Dead") == read_iterations(tmp_path, "Hanging") == []
    assert (tmp_path / "Slow.ended").read_text() == "FINISHED" and not (tmp_path / "Dead.ended").exists()
    assert lines == [
        "toys.trackers:Dead: nobody answers; its rows wait in the run's folder",
        "toys.trackers:Hanging: it has not answered for 2 s; its rows wait in the run's folder",
        "20 rows are not in toys.trackers:Dead yet (nobody answers); the same command delivers them",
        "20 rows are not in toys.trackers:Hanging yet (it has not answered for 2 s); the same command delivers them",
    ]
    assert find_incomplete_sinks(run, LOCAL, folder) == [MLFLOW, "toys.trackers:Dead", "toys.trackers:Hanging"]


def test_a_run_begins_when_its_sinks_are_open_each_on_the_thread_that_gives_it_rows(tmp_path):
    run, folder = run_of(tmp_path, "Lines", "Database")
    lines: list[str] = []
    sinks, journal = delivering(run, folder, lines=lines, is_new_run=True), Journal(LOCAL, folder)
    sinks.check_open(20.0)
    write(journal, 0, 4)
    sinks.close("FINISHED")
    assert read_iterations(tmp_path, "Lines") == read_iterations(tmp_path, "Database") == list(range(5)) and lines == []


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Stuck", "it has not opened within 2 s"),
        ("Shut", "nobody answers"),
    ],
)
def test_a_sink_that_does_not_open_refuses_a_run_that_begins(tmp_path, name, error, monkeypatch):
    monkeypatch.setattr(deliveries, "SAY_AFTER_S", 0.5)
    run, folder = run_of(tmp_path, "Lines", name)
    lines: list[str] = []
    began = time.monotonic()
    sinks = delivering(run, folder, lines=lines, is_new_run=True)
    with pytest.raises(MarlRayError, match=f"^tracking.also: toys.trackers:{name} cannot be used: {error}$"):
        sinks.check_open(2)
    sinks.close("FAILED")
    assert time.monotonic() - began < 15 and (tmp_path / "Lines.ended").read_text() == "FAILED"
    assert lines == ["waiting for toys.trackers:Stuck to open, for 2 s at most"] * (name == "Stuck")


def test_a_driver_that_owns_the_run_no_more_calls_no_sink(tmp_path):
    run, folder = run_of(tmp_path, "Lines")
    owner = [True]
    lines: list[str] = []
    sinks, journal = delivering(run, folder, lines=lines, owns=lambda: owner[0]), Journal(LOCAL, folder)
    write(journal, 0, 4)
    until(lambda: read_iterations(tmp_path, "Lines") == list(range(5)), "five rows in Lines")
    owner[0] = False
    write(journal, 5, 9)
    until(lambda: not sinks.deliveries[0].thread.is_alive(), "the end of the first delivery")
    assert read_iterations(tmp_path, "Lines") == list(range(5)) and not (tmp_path / "Lines.ended").exists()
    sinks.close("FINISHED", wait_s=5)
    assert lines == []  # the other owner delivers the rest


def test_a_run_of_mlflow_whose_id_was_not_noted_is_taken_over(tmp_path, monkeypatch):
    run, folder = run_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            mlflow_run, "dotted_keys", lambda data: 1 / 0
        )  # the process ends between the run and its parameters
        with pytest.raises(MarlRayError):
            MlflowSink(run, None, LOCAL, folder)
    sink = MlflowSink(run, None, LOCAL, folder)
    runs = sink.mlflow_run.client.search_runs(["1"])
    assert [each.info.run_id for each in runs] == [sink.run_id] and runs[0].data.params["name"] == "toy"
    assert MlflowSink(run, None, LOCAL, f"{folder}-2").run_id != sink.run_id
    assert MlflowSink(config(f"storage={tmp_path}", "seed=3"), None, LOCAL, folder).run_id != sink.run_id
    sink.log([{"iteration": 0, "steps": 0, "return": 0.5}])
    assert MlflowSink(run, None, LOCAL, folder).run_id != sink.run_id  # its rows are not this run's


def test_a_sink_that_is_back_gets_what_it_missed(tmp_path):
    run, folder = run_of(tmp_path, "Full")
    lines: list[str] = []
    sinks, journal = delivering(run, folder, lines=lines), Journal(LOCAL, folder)
    write(journal, 0, 9)
    until(lambda: bool(lines), "a line about the full disk")
    (tmp_path / "room").touch()
    write(journal, 10, 19)
    until(lambda: read_iterations(tmp_path, "Full") == list(range(20)), "all rows in Full")
    (tmp_path / "room").unlink()
    write(journal, 20, 29)
    sinks.close("FINISHED", wait_s=20)
    assert lines[:2] == [
        "toys.trackers:Full: [Errno 28] No space left on device; its rows wait in the run's folder",
        "toys.trackers:Full takes rows again",
    ]
    assert "10 rows are not in toys.trackers:Full yet" in lines[-1]
    (tmp_path / "room").touch()  # the same command again
    delivering(run, folder).close("FINISHED", wait_s=30)
    assert read_iterations(tmp_path, "Full") == list(range(30)) and find_incomplete_sinks(run, LOCAL, folder) == [
        MLFLOW
    ]


def test_rows_that_workers_play_again_are_not_given_again(tmp_path):
    run, folder = run_of(tmp_path, "Lines")
    sinks = delivering(run, folder)
    for first, after in ((0, None), (4, 3), (7, 6), (0, None)):
        journal = Journal(LOCAL, folder)
        journal.begin(after)
        write(journal, first, first + 6, generation=first)
        until(lambda last=first + 6: read_iterations(tmp_path, "Lines")[-1:] >= [last], "the newest row in Lines")
    write(journal, 7, 15)
    sinks.close("FINISHED", wait_s=30)
    assert read_iterations(tmp_path, "Lines") == list(range(16))


def test_rows_that_were_taken_and_not_noted_are_not_given_when_they_are_played_again(tmp_path, monkeypatch):
    """The mark could not be written, as on a full disk; the next workers begin before the sink answers."""
    monkeypatch.setenv("TRACKED", str(tmp_path))
    run, folder = run_of(tmp_path, "Moody")
    (tmp_path / "toy.jsonl").write_text("".join(f'{{"iteration": {k}}}\n' for k in range(4)))
    journal = Journal(LOCAL, folder)
    sinks = delivering(run, folder)
    write(journal, 0, 1)
    until(lambda: read_mark(LOCAL, folder, "toys.trackers:Moody").rows == 2, "two rows in Moody")
    write(journal, 2, 9)
    sinks.close("FINISHED", wait_s=20)
    assert read_iterations(tmp_path, "toy") == list(range(10))


def test_what_was_written_before_a_kill_and_not_noted_is_not_written_twice(tmp_path):
    run, folder = run_of(tmp_path, "tensorboard")
    journal, names = Journal(LOCAL, folder), [MLFLOW, "tensorboard"]
    sink = MlflowSink(run, None, LOCAL, folder)
    epochs = [{"steps": 0, "warm_start/epoch": epoch, "warm_start/loss": -epoch} for epoch in (1.0, 2.0)]
    for epoch in epochs:
        journal.write_row(epoch)
    write(journal, 0, 9)
    for last in (9, 19, 20):
        write(journal, last, last) if last == 20 else None
        sinks = delivering(run, folder, sink.run_id, names=names)
        until(
            lambda last=last: all(read_mark(LOCAL, folder, name).rows == last + 3 for name in names),
            "the newest rows everywhere",
        )
        sinks.close("KILLED", wait_s=30)
        for name in names:  # as if the driver had been killed before it noted the last rows
            (tmp_path / "toy" / "sinks" / f"{name}.json").write_text('{"rows": 7, "ended": ""}')
        if last == 9:
            write(journal, 10, 19)
    delivering(run, folder, sink.run_id, names=names).close("FINISHED", wait_s=60)
    expected = [(32 * iteration, iteration / 2) for iteration in range(21)]
    tracker = MlflowRun(run, sink.run_id)
    history = tracker.client.get_metric_history(sink.run_id, "return")
    assert [(point.step, point.value) for point in history] == expected
    assert len(tracker.client.get_metric_history(sink.run_id, "warm_start/loss")) == 2
    events = EventAccumulator(str(tmp_path / "toy" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("return")] == expected
    assert len(events.Scalars("warm_start/loss")) == 2
    assert read_mark(LOCAL, folder, MLFLOW) == Mark(23, sink.run_id, "FINISHED", 20)


def test_a_bundle_is_registered_by_the_same_command_when_mlflow_is_back(tmp_path):
    run, folder = run_of(tmp_path)
    sink = MlflowSink(run, None, LOCAL, folder)
    write(Journal(LOCAL, folder), 0, 4)
    bundle = BestBundle(make_bundle(tmp_path / "bundles", 1), 0.5)
    (tmp_path / "toy" / "sinks").mkdir()
    (tmp_path / "toy" / "sinks" / ".mlflow.json.999").touch()  # of a process that was killed while it wrote
    database = tmp_path / "mlflow.db"
    database.rename(tmp_path / "away.db")
    database.mkdir()  # in the way of the database
    lines: list[str] = []
    assert delivering(run, folder, sink.run_id, lines, names=[MLFLOW]).close("FINISHED", bundle, wait_s=20) == ""
    assert lines[-1].startswith("5 rows are not in mlflow yet (")
    database.rmdir()
    (tmp_path / "away.db").rename(database)
    assert find_incomplete_sinks(run, LOCAL, folder) == [MLFLOW]
    again = delivering(run, folder, sink.run_id, names=[MLFLOW])
    assert again.close("FINISHED", bundle, wait_s=60) == "models:/toy/1"
    assert find_incomplete_sinks(run, LOCAL, folder) == []
    assert [path.name for path in (tmp_path / "toy" / "sinks").iterdir()] == ["mlflow.json"]
    assert MlflowRun(run, sink.run_id).history("return") == [(32 * n, n / 2) for n in range(5)]


def test_a_bundle_whose_name_in_the_registry_was_not_noted_keeps_that_name(tmp_path):
    run, folder = run_of(tmp_path)
    sink = MlflowSink(run, None, LOCAL, folder)
    write(Journal(LOCAL, folder), 0, 4)
    bundle = BestBundle(make_bundle(tmp_path / "bundles", 1), 0.5)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    result = RunResult("toy", "", bundle.place, None, uri, sink.run_id, 0.5, {}, [])
    store_result(run, record_of(run), result, bundle.score)
    # The driver is killed when MLflow has all, while another sink is closed.
    assert delivering(run, folder, sink.run_id, names=[MLFLOW]).close("FINISHED", bundle) == "models:/toy/1"
    assert find_incomplete_sinks(run, LOCAL, folder) == []
    before = read_finished_result(run)
    assert before is not None and before.model == ""
    assert deliver_rest(run, before).model == "models:/toy/1"
    assert read_finished_result(run) == replace(before, model="models:/toy/1")
    client = sink.mlflow_run.client
    assert [version.version for version in client.search_model_versions("name = 'toy'")] == [1]
    assert client.get_run(sink.run_id).info.status == "FINISHED" and sink.mlflow_run.history("return")[-1] == (128, 2.0)


def test_a_request_to_mlflow_has_a_limit_of_its_own(monkeypatch, tmp_path):
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT

    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    client = MlflowRun(config(f"storage={tmp_path}")).client
    settings = (MLFLOW_HTTP_REQUEST_TIMEOUT, MLFLOW_HTTP_REQUEST_MAX_RETRIES)
    seen: list[list[int]] = []
    monkeypatch.setattr(client._client, "get_run", lambda run_id: seen.append([each.get() for each in settings]))  # type: ignore[attr-defined]  # noqa: SLF001  MLflow's
    client.get_run("")
    assert seen == [[15, 1]] and [each.get() for each in settings] == [120, 7]
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the user's word counts
    client.get_run("")
    assert seen[1] == [15, 3]
