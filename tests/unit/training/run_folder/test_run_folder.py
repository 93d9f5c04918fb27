"""A run's folder before anything starts and afterwards, and the exit of a process that is interrupted."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_runs.runs import config, mark_delivered

from marl_ray.cli import main
from marl_ray.config import RunConfig
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.errors import MarlRayError
from marl_ray.runs.stored import find_run, list_stored
from marl_ray.runs.summary import summary_of
from marl_ray.training.checkpoints.index import checkpoint_name, kept_line, resume_line
from marl_ray.training.checkpoints.loading import UnreadableCheckpointError
from marl_ray.training.checkpoints.manifest import FORMAT, CheckpointManifest, publish
from marl_ray.training.checkpoints.storage import UnwritableCheckpointError, local_stored_folder
from marl_ray.training.driver import train
from marl_ray.training.loop.start import RunStart
from marl_ray.training.machines.interruption import interrupt_handler, run_within
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_folder.record import (
    RESULT_KEY,
    filesystem_of,
    identity_hash,
    record_of,
    write_record,
)
from marl_ray.training.run_folder.tracebacks import traceback_of, write_traceback
from marl_ray.training.run_result import RunResult, read_finished_result
from marl_ray.training.single_process import process_group
from marl_ray.training.worker import REFUSED_KEY, train_in_worker

STORED = {
    "name": "toy",
    "model": "models:/toy/1",
    "bundle": "/there/bundle",
    "curve": "/there/return.png",
    "tracking_uri": "sqlite:///there/mlflow.db",
    "run_id": "0123",
    "best_return": 4.5,
    "metrics": {"return": 4.25},
    "summary": ["best    return 4.500 at step 160", "last    return 4.250 at step 192"],
}


def end_run(run_config: RunConfig) -> None:
    """The folder of a run that has played all its steps has its result."""
    done = {"total_steps": run_config.train.total_steps, RESULT_KEY: STORED}
    write_record(run_config, record_of(run_config) | {"mlflow_run_id": "0123", "finished": done})
    mark_delivered(run_config, 0)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_finished_run_says_so_without_ray_and_a_longer_one_goes_on(tmp_path, scheme):
    keys = (f"storage={scheme}{tmp_path}", f"tracking.uri=sqlite:///{tmp_path}/there.db")
    run_config = config(*keys)
    assert read_finished_result(run_config) is None
    end_run(run_config)
    result = read_finished_result(run_config)
    assert result == RunResult(**STORED | {"curve": Path("/there/return.png")}, trained=False)
    assert read_finished_result(config(*keys, "resources.workers=2", "train.total_steps=64")) == result
    assert train(run_config) == result  # though there is no Ray here
    assert read_finished_result(config(*keys, "train.total_steps=256")) is None
    for look in (read_finished_result, check_run):
        with pytest.raises(
            MarlRayError,
            match=r"^name: run 'toy' exists under .* with another team.shared.hyper.lr \(0.01, not 0.5\); ",
        ):
            look(config(*keys, "hyper.lr=0.5"))


@pytest.mark.parametrize(
    ("typo", "line"),
    [
        ("env.id=toys.envs:countdwn", "env.id: 'countdwn' of 'toys.envs:countdwn' is not in the module; did you mean"),
        ("env.id=MultiGrid-Emtpy-5x5-v0", "env.id: 'MultiGrid-Emtpy-5x5-v0' is unknown; did you mean"),
        ("env.kwargs.lenght=4", "env.kwargs.lenght: toys.envs:countdown has no such argument; did you mean length"),
        (
            "env.kwargs.length=4",
            "name: run 'toy' exists under .* with another env.kwargs.length \\(none, not 4\\); choose",
        ),
    ],
)
def test_a_name_in_use_with_a_typo_in_the_environment_names_the_typo(tmp_path, typo, line):
    keys = (f"storage={tmp_path}", f"tracking.uri=sqlite:///{tmp_path}/there.db")
    end_run(config(*keys))
    with pytest.raises(MarlRayError, match=f"^{line}"):
        read_finished_result(config(*keys, typo))


def test_the_command_ends_well_with_the_summary_of_a_finished_run(tmp_path, capsys):
    run_config = config(f"storage={tmp_path}")
    (tmp_path / "run.yaml").write_text(json.dumps(run_config.as_given()))
    end_run(run_config)
    with pytest.raises(SystemExit) as caught:
        main(["train", str(tmp_path / "run.yaml")])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("toy: is finished, and nothing was trained; raise train.total_steps")
    assert lines[1:3] == ["toy: best return 4.500, models:/toy/1", "  best    return 4.500 at step 160"]
    assert lines[4] == "  bundle  /there/bundle"
    with pytest.raises(SystemExit) as caught:
        main(["train", str(tmp_path / "run.yaml"), "hyper.lr=0.5"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("marl-ray: name: run 'toy' exists under ")


def test_a_record_that_is_none_is_one_line(tmp_path):
    for content in ("{", "[]", "{}"):
        (tmp_path / "toy").mkdir(exist_ok=True)
        (tmp_path / "toy" / "run.json").write_text(content)
        with pytest.raises(MarlRayError, match=r"^storage: .*/toy/run.json is not the record of a run: .*; without"):
            check_run(config(f"storage={tmp_path}"))


def test_a_record_of_which_one_bit_was_turned_is_one_line_for_every_command(tmp_path):
    run_config = config(f"storage={tmp_path}")
    end_run(run_config)
    path = tmp_path / "toy" / "run.json"
    written, message = path.read_bytes(), r"^storage: .*/toy/run.json is not the record of a run: .*; without"
    for at in range(0, len(written), 61):
        damaged = bytearray(written)
        damaged[at] ^= 1 << at % 5  # the next bit makes 1E-05 of 1e-05
        path.write_bytes(damaged)
        for look in (lambda: read_finished_result(run_config), lambda: find_run("toy", str(tmp_path))):
            with pytest.raises(MarlRayError, match=message):
                look()
        (listed,) = list_stored(str(tmp_path))
        with pytest.raises(MarlRayError, match=message):
            summary_of(listed)


def manifest(iteration: int, steps: int, identity: str = "1") -> CheckpointManifest:
    return CheckpointManifest(
        format=FORMAT,
        run="toy",
        identity=identity,
        iteration=iteration,
        steps=steps,
        ranks=1,
        score=0.0,
        metrics={},
        files={},
    )


def test_what_is_kept_is_the_last_whole_checkpoint(tmp_path):
    run_config = config(f"storage={tmp_path}")
    assert resume_line(run_config) == "no checkpoint had been written, so the same command begins anew"
    assert kept_line(run_config) == "no checkpoint had been written"
    for number, content in enumerate(("", "{", "[]", "{}")):
        folder = tmp_path / "toy" / f"checkpoint_{number + 20}"
        folder.mkdir(parents=True)
        if content:
            (folder / "manifest.json").write_text(content)
        assert resume_line(run_config).startswith("no checkpoint")
    for number, steps in ((6, 1728), (12, 3456)):
        (tmp_path / "toy" / f"checkpoint_{number:02}").mkdir()
        publish(local_stored_folder(tmp_path / "toy" / f"checkpoint_{number:02}"), manifest(number, steps))
    where = f"{tmp_path}/toy/checkpoint_12"
    assert resume_line(run_config) == f"kept iteration 12, step 3,456 in {where}; the same command continues from there"
    assert kept_line(run_config) == f"its last checkpoint is kept: {where}"


def test_tracebacks_lie_by_rank(tmp_path):
    run_config = config(f"storage={tmp_path}")
    assert traceback_of(run_config, [0, 1]) == ""
    write_traceback(run_config, "worker-3", "Traceback three")
    write_traceback(run_config, "worker-1", "Traceback one")
    assert traceback_of(run_config, [0, 1, 3]) == f"{tmp_path}/toy/errors/worker-1.txt"
    assert Path(traceback_of(run_config, [3])).read_text() == "Traceback three"
    assert not write_traceback(config("storage=/proc"), "worker-0", "a disk that cannot be written hides no error")


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_what_an_own_environment_raises_in_the_checks_is_one_line_and_a_file(tmp_path, monkeypatch, error):
    monkeypatch.delitem(sys.modules, "hasty", raising=False)
    (tmp_path / "hasty.py").write_text(f"def make():\n    raise {error}('no licence\\nask for one')\n")
    monkeypatch.syspath_prepend(tmp_path)
    where = f"{tmp_path}/runs/toy/errors/driver.txt"
    run_config = config(f"storage={tmp_path}/runs", "env={id: 'hasty:make'}")
    with pytest.raises(MarlRayError) as caught:
        check_run(run_config)
    assert str(caught.value) == f"run 'toy' failed before it began: {error}: no licence; its traceback is in {where}"
    text = Path(where).read_text()
    assert "hasty.py" in text and "ask for one" in text


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["ctrl-c", "term"]
)
def test_an_interrupt_is_answered_at_once_and_a_second_one_disturbs_nothing(number, raised):
    before, lines = signal.getsignal(number), list[str]()
    with pytest.raises(raised), interrupt_handler(lambda: lines.append("kept")):  # noqa: PT012  what a run does then
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            os.kill(os.getpid(), number)  # while it cleans up
            lines.append("cleaned up")
    assert lines == ["kept", "cleaned up"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "raised", "status"), [
    (signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143),
])  # fmt: skip
def test_an_interrupted_block_raises_so_whatever_a_library_raises_instead(number, raised, status):
    with pytest.raises(raised) as caught, interrupt_handler(lambda: None):  # noqa: PT012  what a run does then
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        except BaseException:
            raise SystemExit(1) from None  # as Ray does while it waits
    assert getattr(caught.value, "code", None) == status


@pytest.mark.parametrize("moment", ["checks", "ray"])
def test_the_command_answers_before_ray_has_started_too(moment, tmp_path, capsys, monkeypatch):
    def slow(*_: object) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        finally:  # the clean-up of a Ray that is half started takes many seconds
            printed.append(capsys.readouterr().err)

    printed = list[str]()
    (tmp_path / "run.yaml").write_text(json.dumps(config(f"storage={tmp_path}", "tracking.progress=false").as_given()))
    at = "training.run_checks.check_run" if moment == "checks" else "api.training.ray_of_call"
    monkeypatch.setattr(f"marl_ray.{at}", slow)
    with pytest.raises(SystemExit) as caught:
        main(["train", str(tmp_path / "run.yaml")])
    assert caught.value.code == 130
    assert printed == ["toy: interrupted; no checkpoint had been written, so the same command begins anew\n"]


def test_a_server_that_does_not_answer_holds_nobody_up():
    assert run_within(5.0, lambda: None)
    assert not run_within(0.05, threading.Event().wait)
    assert not run_within(0.05, lambda: 1 / 0)


def work(monkeypatch: pytest.MonkeyPatch, folder: Path, body: Callable[..., Any]) -> Any:
    """The answer of a worker on Ray Train, but without Ray, whose run does no more than `body`."""
    import ray.train
    import ray.train.torch

    monkeypatch.setenv(TRACKING_URI, "")
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 1))
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: None)
    monkeypatch.setattr("marl_ray.training.loop.iterations.run_worker", body)
    payload = {
        "config": config().as_given(),
        "run_id": "0",
        "tracking_uri": "",
        "folder": str(folder),
        "origin": None,
        "lease": 1,
    }
    with process_group():
        return train_in_worker(payload)


@pytest.mark.parametrize("known", [True, False])
def test_relative_paths_of_a_config_count_from_the_drivers_folder(tmp_path, monkeypatch, known):
    """Ray Train starts workers in its own folder: data of a run, bundles and the storage would be looked for there."""
    elsewhere, rays = tmp_path / "theirs", tmp_path / "rays"
    for folder in (elsewhere, rays):
        folder.mkdir()
    monkeypatch.chdir(rays)
    answer = work(monkeypatch, elsewhere if known else tmp_path / "elsewhere", lambda *arguments, **more: Path.cwd())
    assert answer == (elsewhere if known else rays)


@pytest.mark.parametrize("kind", [UnwritableCheckpointError, UnreadableCheckpointError])
def test_a_checkpoint_that_cannot_be_written_or_read_is_an_answer_and_no_reason_to_start_again(
    tmp_path, monkeypatch, kind
):
    """Ray Train restarts workers that raise, and these would meet the full disk again."""

    def fails(*arguments: Any, **more: Any) -> None:
        raise kind("checkpoint_1/state.json cannot be written: No space left on device")

    monkeypatch.chdir(tmp_path)
    answer = work(monkeypatch, tmp_path, fails)
    assert answer == {REFUSED_KEY: "checkpoint_1/state.json cannot be written: No space left on device"}


def test_a_worker_goes_on_from_checkpoints_of_its_own_run_alone(tmp_path, monkeypatch):
    """A folder that was copied from a run of the same name has whole checkpoints, of other weights."""
    monkeypatch.chdir(tmp_path)
    _, folder = filesystem_of(config())

    def put(iteration: int, identity: str) -> str:
        place = Path(folder, checkpoint_name(iteration, 1))
        place.mkdir(parents=True)
        publish(local_stored_folder(place), manifest(iteration, 32, identity))
        return str(place)

    def places(run: RunConfig, device: Any, start: RunStart, *more: Any) -> list[str]:
        return [place.path for place in start.checkpoints]

    other = put(20, identity_hash(config("seed=7")))
    answer = work(monkeypatch, tmp_path, places)
    assert answer == {
        REFUSED_KEY: f"no checkpoint can be used: {other} is a checkpoint of another run, 'toy' with another config"
    }
    of_run = put(10, identity_hash(config("resources.workers=2", "train.total_steps=64", "checkpoint.every=3")))
    assert work(monkeypatch, tmp_path, places) == [of_run]
