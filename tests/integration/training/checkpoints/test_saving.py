"""Writing checkpoints beside the training: what is written, what an error does, and what a death leaves."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes.two_workers import FORKS, two_workers
from safetensors import SafetensorError
from toy_runs.runs import config, timeless, weights

from marl_ray.policies.agreement import all_gather_values
from marl_ray.stored_files.temporary_files import temporary_path
from marl_ray.training.checkpoints import saving
from marl_ray.training.checkpoints.index import checkpoint_name, checkpoints_in, find_newest, remove_unneeded
from marl_ray.training.checkpoints.learner_tensors import tensors_of
from marl_ray.training.checkpoints.manifest import publish, read_manifest
from marl_ray.training.checkpoints.storage import UnwritableCheckpointError, local_stored_folder
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.callbacks import RunCallbacks
from marl_ray.training.loop.iterations import CheckpointKeeping, run_worker
from marl_ray.training.loop.run import Run
from marl_ray.training.loop.start import RunStart
from marl_ray.training.single_process import process_group, train_alone


@pytest.fixture
def run():
    with process_group():
        run = build_run(config(), torch.device("cpu"))
        run.step()
        yield run
        run.close()


def full(folder: Path, name: str) -> None:
    """Let a file of a checkpoint lie on a disk that is full."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to("/dev/full")


@pytest.mark.parametrize("copied_after_s", [0.0, 0.5])
def test_a_checkpoint_holds_the_state_of_its_moment(run, tmp_path, copied_after_s):
    take = run.saver.copy.take

    def slow() -> Callable[[], None]:
        copy = take()

        def copy_late() -> None:
            time.sleep(copied_after_s)
            copy()

        return copy_late

    run.saver.copy.take = slow  # a thread that gets no core for a while: the next update waits for it
    before = {name: value.full_tensor().clone() for name, value in tensors_of(run.team.learners).items() if value.ndim}  # type: ignore[attr-defined]  # DTensor's
    run.save(local_stored_folder(tmp_path / "now"))
    for _ in range(3):
        run.step()
    run.saver.wait()
    again = build_run(config(), torch.device("cpu"), RunStart([local_stored_folder(tmp_path / "now")]))
    assert again.state.iteration == 1
    for name, value in tensors_of(again.team.learners).items():
        if value.ndim:
            assert torch.equal(value.full_tensor(), before[name]), name  # type: ignore[attr-defined]  # DTensor's
    again.close()


def test_the_manifest_names_every_file_and_who_wrote_it(run, tmp_path):
    run.save(local_stored_folder(tmp_path / "now"))
    run.saver.wait()
    manifest = read_manifest(local_stored_folder(tmp_path / "now"))
    assert manifest is not None
    assert (manifest.run, manifest.iteration, manifest.steps, manifest.ranks) == ("toy", 1, 32, 1)
    assert manifest.score == manifest.metrics["score"] and manifest.metrics["steps"] == 32
    written = {str(path.relative_to(tmp_path / "now")) for path in (tmp_path / "now").rglob("*") if path.is_file()}
    assert written == {*manifest.files, "manifest.json"}
    assert {"state.json", "envs-0.json", "weights/.metadata", "weights/__0_0.distcp", "bundle/bundle.json"} <= written


@pytest.mark.parametrize(
    "name", ["weights/__0_0.distcp", "weights/.metadata", "envs-0.json", "state.json", "manifest.json"]
)
def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(run, tmp_path, name):
    run.save(local_stored_folder(tmp_path / "checkpoint_1"))
    written = temporary_path(f"checkpoint_2/{name}") if name == "manifest.json" else f"checkpoint_2/{name}"
    full(tmp_path, written)  # the manifest is written beside its place
    run.step()
    run.save(local_stored_folder(tmp_path / "checkpoint_2"))
    with pytest.raises(UnwritableCheckpointError) as caught:
        run.saver.wait()
    text = str(caught.value)
    assert name in text and "No space left on device" in text and "\n" not in text
    assert [place.path for place in checkpoints_in(local_stored_folder(tmp_path))] == [str(tmp_path / "checkpoint_1")]
    run.step()
    run.save(local_stored_folder(tmp_path / "checkpoint_3"))  # an error is raised once
    run.saver.wait()


def test_a_full_disk_is_one_line_while_safetensors_writes_the_bundle(run, tmp_path, monkeypatch):
    def full_disk(*arguments: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("marl_ray.policies.bundles.actor_critic.save_file", full_disk)
    run.save(local_stored_folder(tmp_path / "checkpoint_1"))
    with pytest.raises(UnwritableCheckpointError, match=r"checkpoint_1/bundle cannot be written: .*No space left"):
        run.saver.wait()


def test_the_next_checkpoint_waits_for_the_last_and_gets_its_error(run, tmp_path):
    full(tmp_path / "checkpoint_1", "state.json")
    run.save(local_stored_folder(tmp_path / "checkpoint_1"))
    with pytest.raises(UnwritableCheckpointError, match=r"state\.json cannot be written: "):
        run.save(local_stored_folder(tmp_path / "checkpoint_2"))
    assert not (tmp_path / "checkpoint_2").exists()


def test_a_run_ends_with_the_error_of_its_last_checkpoint(tmp_path):
    full(tmp_path / "6", "weights/__0_0.distcp")
    with pytest.raises(UnwritableCheckpointError, match=r"6/weights/__0_0\.distcp cannot be written: "):
        train_alone(config(), tmp_path)
    assert (tmp_path / "4" / "manifest.json").exists()


def test_a_storage_that_hangs_is_waited_for_until_a_deadline(run, tmp_path, monkeypatch):
    answers = threading.Event()

    def publish_late(*arguments: Any) -> None:
        assert answers.wait(60)
        publish(*arguments)

    monkeypatch.setattr(saving, "SAVE_S", 0.3)
    monkeypatch.setattr(saving, "publish", publish_late)
    run.save(local_stored_folder(tmp_path / "now"))
    with pytest.raises(UnwritableCheckpointError, match=r"now was not written within 0.3 s"):
        run.saver.wait()
    answers.set()
    assert run.saver.pending is not None
    run.saver.pending.result(60)
    assert (tmp_path / "now" / "manifest.json").exists()


def fails_to_copy_on_one(folder: str) -> list[str]:
    """Return what each of two workers raises if one of them cannot copy its weights."""
    run = build_run(config("resources.workers=2"), torch.device("cpu"))
    run.step()

    def fail() -> None:
        raise KeyError("weights")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(run.saver.copy, "take", lambda: fail)
        run.save(local_stored_folder(Path(folder, "now")))
    run.step()  # the weights may change: they are in no checkpoint
    with pytest.raises(UnwritableCheckpointError) as caught:
        run.saver.wait()
    run.close()
    return all_gather_values(str(caught.value))


def test_all_workers_raise_the_error_of_one_that_cannot_copy_its_weights(tmp_path):
    assert two_workers(fails_to_copy_on_one, str(tmp_path)) == ["worker 1: KeyError: 'weights'"] * 2
    assert checkpoints_in(local_stored_folder(tmp_path)) == []


def keeps_and_tidies(folder: str) -> None:
    """Train on this worker; what is done after a checkpoint takes its time."""
    place = local_stored_folder(Path(folder))

    def published() -> None:
        time.sleep(0.5)
        remove_unneeded(place, 10, None, 1)

    keeping = CheckpointKeeping(lambda number: place / checkpoint_name(number, 1), published=published)
    run_worker(config("resources.workers=2"), torch.device("cpu"), keeping=keeping)


def test_no_worker_writes_its_next_checkpoint_while_the_first_tidies_up(tmp_path):
    two_workers(keeps_and_tidies, str(tmp_path))
    checkpoints = checkpoints_in(local_stored_folder(tmp_path))
    assert len(checkpoints) >= 2
    for place in checkpoints:
        manifest = read_manifest(place)
        assert manifest is not None and [name for name in manifest.files if not Path(place.path, name).exists()] == []


def dies(folder: str, iteration: int, published: bool) -> None:
    """Train, and end without a word while the checkpoint of `iteration` is published: just before or just after."""

    def publish_and_die(place: Any, manifest: Any) -> None:
        ends = manifest.iteration == iteration
        if published or not ends:
            publish(place, manifest)
        if ends:
            os._exit(9)

    saving.publish = publish_and_die  # type: ignore[attr-defined]
    keep = local_stored_folder(Path(folder))
    with process_group():
        keeping = CheckpointKeeping(lambda number: keep / f"checkpoint_{number}_1")
        run_worker(config(), torch.device("cpu"), keeping=keeping)


def test_a_run_that_fails_closes_its_environments(tmp_path, monkeypatch):
    closed: list[str] = []

    def fail(run: Run) -> Any:
        close = run.env.close

        def note_and_close() -> None:
            closed.append("environment")
            close()

        monkeypatch.setattr(run.env, "close", note_and_close)
        raise ValueError("the first error")

    monkeypatch.setattr(Run, "step", fail)
    with process_group(), pytest.raises(ValueError, match="the first error"):
        run_worker(config(), torch.device("cpu"), keeping=CheckpointKeeping(lambda _: local_stored_folder(tmp_path)))
    assert closed == ["environment"]


@pytest.mark.parametrize("published", [False, True])
def test_a_death_beside_the_manifest_loses_what_is_not_published_and_nothing_else(tmp_path, published):
    uninterrupted = train_alone(config(), tmp_path / "whole")
    folder = local_stored_folder(tmp_path / "run")
    process = FORKS.Process(target=dies, args=(folder.path, 4, published))
    process.start()
    process.join(120)
    assert process.exitcode == 9
    assert (tmp_path / "run" / "checkpoint_4_1" / "weights" / ".metadata").exists()
    last = find_newest(folder)
    assert last is not None and last.manifest.iteration in ((4,) if published else (2, 3))
    rows: list[dict[str, float]] = []
    with process_group():
        keeping = CheckpointKeeping(
            lambda number: folder / f"checkpoint_{number}_2", published=lambda: remove_unneeded(folder, 10, None, 2)
        )
        run_worker(
            config(), torch.device("cpu"), RunStart(checkpoints_in(folder)[::-1]), RunCallbacks(rows.append), keeping
        )
    assert timeless(rows) == timeless([row for row in uninterrupted if row["iteration"] > last.manifest.iteration])
    best = max(int(bundle.parent.name) for bundle in (tmp_path / "whole").glob("*/bundle"))
    (same,) = (tmp_path / "run").glob(f"checkpoint_{best}_*")
    for name, value in weights(tmp_path / "whole" / str(best)).items():
        assert torch.equal(value, weights(same)[name])
    assert (tmp_path / "run" / "checkpoint_4_1").exists() == published  # what is unfinished is removed
    states = [json.loads((tmp_path / at / "state.json").read_text()) for at in ("whole/6", "run/checkpoint_6_2")]
    for state in states:
        state["metrics"] = timeless([state["metrics"]])
        state.pop("seconds")
    assert states[0] == states[1]
