"""`marl-ray runs` on folders that the parts of a run have written, without training."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes.command_line import keys_of, marl_ray
from pyarrow import fs
from toy_runs.runs import config, store_run

from marl_ray.cli.training.train import warn_of
from marl_ray.config import RunConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.runs import following
from marl_ray.runs.following import log_lines
from marl_ray.runs.naming import load_named, parse_named
from marl_ray.runs.stored import find_run
from marl_ray.stored_files.appended_file import content_of
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.stored_files.ownership.owners import read_owner
from marl_ray.training.checkpoints.manifest import FORMAT, CheckpointManifest, publish
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.run_checks import check_run

LOCAL = fs.LocalFileSystem()


def document(*arguments: str | Path) -> Any:
    done = marl_ray(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def find_config(storage: Path, *overrides: str) -> RunConfig:
    """The config of the run that is not finished."""
    return parse_config(RunConfig, find_run("other", str(storage)).record["given"], overrides)


def test_runs_are_listed_with_state_and_score(storage):
    rows = document("runs", "ls", "--storage", storage)
    assert [(row["name"], row["state"], row["algorithm"], row["steps"]) for row in rows] == [
        ("first", "finished", "mappo", 192),
        ("other", "unfinished", "ippo", 192),
        ("second", "finished", "mappo", 192),
    ]
    assert set(rows[0]) == keys_of("runs ls")
    assert rows[0]["score"] == {"value": 1.0, "low": 0.5, "high": 1.5, "episodes": "last evaluation"}
    assert rows == [row | {"storage": str(storage)} for row in document("runs", "ls", "--storage", storage.as_uri())]
    shown = marl_ray("runs", "ls", "--storage", storage).stdout.splitlines()
    assert re.match(r"first +finished +mappo +toys.envs:countdown +192 of 192 +1.000 \[0.500, 1.500\]", shown[1])
    assert marl_ray("runs", "ls", "--storage", storage / "none").stdout.startswith("no runs under")


@pytest.mark.parametrize(
    "line", ["{", '{"iteration": 3, "stgps": 288}', '{"iteration": 3, "steps": "x"}', '{"iteration": 3, "steps": null}']
)
def test_damaged_metrics_are_one_line_and_hide_no_other_run(storage, line):
    path = storage / "first" / "metrics.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    listed = marl_ray("runs", "ls", "--json", "--storage", storage)
    assert [row["name"] for row in json.loads(listed.stdout)] == ["other", "second"]
    error = f"marl-ray: {path}, line 4: expected a row of metrics as a JSON object\n"
    assert listed.stderr == marl_ray("runs", "show", "first", "--storage", storage).stderr == error


@pytest.mark.parametrize("content", ['{"config": {"nam', "{}", "[]"])
def test_a_damaged_record_is_one_line_and_hides_no_other_run(storage, content):
    path = storage / "first" / "run.json"
    path.write_text(content)
    listed = marl_ray("runs", "ls", "--json", "--storage", storage)
    assert [row["name"] for row in json.loads(listed.stdout)] == ["other", "second"]
    assert listed.returncode == 0
    assert listed.stderr == marl_ray("runs", "show", "first", "--storage", storage).stderr
    assert re.fullmatch(f"marl-ray: storage: {path} is not the record of a run: .*; without this .*\n", listed.stderr)


def test_a_storage_of_damaged_runs_is_not_called_empty(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{")
    listed = marl_ray("runs", "ls", "--storage", tmp_path)
    assert listed.stdout == f"no run under {str(tmp_path)!r} can be read\n"
    assert listed.stderr.startswith(f"marl-ray: storage: {tmp_path}/a/run.json is not the record of a run: ")


def stored_sweep(storage: Path) -> None:
    """A sweep's folder, as far as commands read it."""
    (storage / "many").mkdir()
    plan = {"run": {"env": {"id": "math"}}, "metric": [{"name": "eval/return"}], "budget": {"steps": None}}
    plan |= {"scheduler": {"kind": "asha"}, "search": {"kind": "random"}}
    records = {"status": "finished", "winner": 0, "trials": [{"played": 64, "objectives": [0.5]}], "config": plan}
    records |= {"format": 1}
    (storage / "many" / "sweep.json").write_text(json.dumps(records))


def test_a_sweep_is_listed_as_one(storage):
    stored_sweep(storage)
    row = {row["name"]: row for row in document("runs", "ls", "--storage", storage)}["many"]
    assert (row["kind"], row["algorithm"], row["env"], row["score"]["value"]) == ("sweep", "asha/random", "math", 0.5)
    assert "is a sweep, expected a run" in marl_ray("runs", "show", "many", "--storage", storage).stderr


@pytest.mark.parametrize("key", ["status", "config", "metric", "played"])
def test_damaged_records_of_a_sweep_are_one_line_and_hide_no_run(storage, key):
    stored_sweep(storage)
    path = storage / "many" / "sweep.json"
    path.write_text(path.read_text().replace(f'"{key}"', f'"{key[:-1]}_"'))
    listed = marl_ray("runs", "ls", "--json", "--storage", storage)
    assert [row["name"] for row in json.loads(listed.stdout)] == ["first", "other", "second"]
    assert re.fullmatch(f"marl-ray: {path} is not the record of a sweep: .*\n", listed.stderr)


def test_a_run_is_shown_with_its_files(storage):
    details = document("runs", "show", "second", "--storage", storage)
    assert set(details) == keys_of("runs show")
    assert details["model"] == "models:/second/1" and details["log"] == f"{storage}/second/run.log"
    assert details["config"]["seed"] == 2 and details["mlflow"]["run_id"] == "0123"
    shown = marl_ray("runs", "show", storage / "second").stdout
    assert "second: finished, mappo on toys.envs:countdown, seed 2" in shown and "score       2.000" in shown
    assert marl_ray("runs", "logs", "second", "--storage", storage).stdout.endswith("  training\n")
    assert (
        "continues   with `marl-ray runs resume other`, anew: no checkpoint has been written\n"
        in marl_ray("runs", "show", "other", "--storage", storage).stdout
    )
    assert "did you mean second?" in marl_ray("runs", "show", "secnd", "--storage", storage).stderr


def test_a_run_is_shown_by_the_keys_that_were_given_and_by_what_is_wrong_with_it(storage):
    store_run(storage, "bad", "hyper.lr=10", score=-1.0)
    shown = marl_ray("runs", "show", "bad", "--storage", storage).stdout.splitlines()
    assert "  warning     eval/return did not rise: 0.000 at step 0, -1.000 at step 192" in shown
    config_at = shown.index("  config      as given; --all shows the defaults too")
    assert "      lr: 10.0" in shown[config_at:] and not any("gae_lambda" in line for line in shown)
    output = marl_ray("runs", "show", "bad", "--storage", storage, "--all").stdout
    assert "lr: 10.0" in output and "gae_lambda" in output
    details = document("runs", "show", "bad", "--storage", storage)
    assert details["given"]["hyper"]["lr"] == 10 and len(details["warnings"]) == 1
    assert document("runs", "show", "first", "--storage", storage)["warnings"] == []


def test_training_ends_with_what_shows_a_collapse_and_not_with_a_return_that_did_not_rise_yet(storage, capsys):
    run_config = store_run(storage, "bad", "hyper.lr=10", score=-1.0)
    warn_of(run_config)
    assert capsys.readouterr().err == ""
    path = storage / "bad" / "metrics.jsonl"
    path.write_text(re.sub(r'"eval/return(_low|_high)?": [-.0-9]+', r'"eval/return\1": 3.0', path.read_text()))
    warn_of(run_config)
    assert capsys.readouterr().err.startswith("bad: warning: every episode returned 3.000: the reward does not depend")


def test_a_run_is_not_made_shorter_than_it_is(storage):
    (storage / "other" / "checkpoint_5").mkdir()
    publish(
        local_stored_folder(storage / "other" / "checkpoint_5"),
        CheckpointManifest(
            format=FORMAT, run="other", identity="1", iteration=5, steps=160, ranks=1, score=0.0, metrics={}, files={}
        ),
    )
    refused = marl_ray("runs", "resume", "other", "train.total_steps=128", "--storage", storage)
    assert refused.returncode == 2
    expected = "train.total_steps=128: run 'other' has played 160 steps already; expected more than that, or 192, with"
    assert refused.stderr.splitlines()[-1].startswith(f"marl-ray: {expected}")
    # A driver that was killed between the last checkpoint and the end has still to end.
    for steps in (191, 192):
        check_run(find_config(storage, f"train.total_steps={steps}"))


def test_a_finished_run_is_resumed_with_its_config(storage):
    record = json.loads((storage / "second" / "run.json").read_text())
    assert parse_config(RunConfig, record["given"]).resolve() == record["config"]
    result = document("runs", "resume", "second", "--storage", storage)
    assert set(result) == keys_of("runs resume") and result["trained"] is False
    refused = marl_ray("runs", "resume", "second", "hyper.lr=0.5", "--storage", storage)
    assert refused.returncode == 2 and "with another team.shared.hyper.lr" in refused.stderr


def test_a_run_is_deleted_only_if_it_is_not_alive(storage, monkeypatch):
    with Lease(LOCAL, str(storage / "first"), "run 'first'"):
        states = [row["state"] for row in document("runs", "ls", "--storage", storage)]
        assert states == ["running", "unfinished", "finished"]
        refused = marl_ray("runs", "rm", "first", "--storage", storage, "--yes")
        assert refused.returncode == 2 and f"is alive in process {os.getpid()}" in refused.stderr
        assert "is alive" in marl_ray("runs", "resume", "first", "--storage", storage).stderr
    deleted = document("runs", "rm", "first", "--storage", storage, "--yes")
    assert set(deleted) == keys_of("runs rm") and deleted["files"] == 5
    assert not (storage / "first").exists() and (storage / "second").exists()
    for answer, status in (("n", 1), ("y", 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}\n"))
        refusal = marl_ray("runs", "rm", "second", "--storage", storage)
        assert refusal.returncode == status and (storage / "second").exists() == (answer == "n")
        assert "4 files" in refusal.stderr


def test_a_run_is_not_deleted_while_its_owner_cannot_be_read(storage):
    with Lease(LOCAL, str(storage / "first"), "run 'first'") as lease:
        path = storage / "first" / "owner" / f"{lease.number}.json"
        path.write_bytes(path.read_bytes()[:40])
        refused = marl_ray("runs", "rm", "first", "--storage", storage, "--yes")
        assert refused.returncode == 2 and "run 'first' is owned by another process, whose last beat" in refused.stderr
    assert (storage / "first" / "run.json").exists()


def test_a_sweep_is_deleted_only_if_it_is_not_alive(storage, monkeypatch):
    stored_sweep(storage)
    (storage / "many" / "trials" / "0000").mkdir(parents=True)
    with Lease(LOCAL, str(storage / "many"), "sweep 'many'"):
        refused = marl_ray("runs", "rm", "many", "--storage", storage, "--yes")
        assert refused.returncode == 2 and f"sweep 'many' is alive in process {os.getpid()}" in refused.stderr
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    answer = marl_ray("runs", "rm", "many", "--storage", storage)
    assert answer.returncode == 1 and "Delete sweep many?" in answer.stderr and (storage / "many").exists()
    assert set(document("runs", "rm", "many", "--storage", storage, "--yes")) == keys_of("runs rm")
    assert not (storage / "many").exists() and (storage / "first").exists()
    assert "run or sweep 'many' is not under" in marl_ray("runs", "rm", "many", "--storage", storage).stderr


def test_a_driver_that_was_killed_is_known_at_once(storage):
    code = (
        "import sys, time; from pyarrow import fs; from marl_ray.stored_files.ownership.lease import Lease\n"
        "with Lease(fs.LocalFileSystem(), sys.argv[1], 'it'): print('alive', flush=True); time.sleep(60)"
    )
    folder = str(storage / "other")
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "alive\n"
        assert find_run("other", str(storage)).state() == "running"
        driver.send_signal(signal.SIGKILL)
        driver.wait(60)
    assert find_run("other", str(storage)).state() == "died"


def test_a_log_is_followed_until_the_driver_ends(storage):
    run, lines = find_run("other", str(storage)), list[str]()
    follower = threading.Thread(target=lambda: lines.extend(log_lines(run, follow=True)), daemon=True)
    with Lease(LOCAL, run.folder, "run 'other'"):
        follower.start()
        with (storage / "other" / "run.log").open("a") as log:
            log.write("and on\n")
    follower.join(60)
    assert not follower.is_alive() and lines[0].endswith("  training") and lines[1:] == ["and on"]


def test_a_log_that_is_followed_may_be_unreadable_for_a_while(storage, monkeypatch):
    run, contents = find_run("other", str(storage)), iter(["one\n", OSError("SlowDown"), "one\ntwo\n"])

    def look(*arguments):
        content = next(contents, OSError("away"))
        if isinstance(content, OSError):
            raise content
        (storage / "other" / "run.log").write_text(content)
        return content_of(*arguments)

    monkeypatch.setattr(following, "content_of", look)
    monkeypatch.setattr(following, "POLL_S", 0.01)
    monkeypatch.setattr(following, "UNREADABLE_S", 0.2)
    lines = list[str]()
    with (
        Lease(LOCAL, run.folder, "run 'other'"),
        pytest.raises(MarlRayError, match=r"^the log of run 'other' cannot be read: .*away"),
    ):
        lines += log_lines(run, follow=True)
    assert lines == ["one", "two"]


@pytest.mark.parametrize(("error", "state"), [(MarlRayError("no"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_an_attempt_leaves_how_it_ended(storage, error, state):
    with pytest.raises(type(error)), Lease(LOCAL, str(storage / "other"), "run 'other'"):
        raise error
    owner = read_owner(LOCAL, str(storage / "other"))
    assert owner is not None and owner.state == find_run("other", str(storage)).state() == state
    assert not owner.is_alive(time.time())


def test_a_run_without_a_name_gets_one_that_its_storage_does_not_have(tmp_path):
    file = tmp_path / "run.yaml"
    data = config(f"storage={tmp_path}").as_given()
    file.write_text(json.dumps({key: value for key, value in data.items() if key != "name"}))
    names = set()
    for _ in range(3):
        run, overrides = load_named(file, ["seed=3"])
        assert re.fullmatch(r"mappo-countdown-[a-z2-9]{4}", run.name) and run.seed == 3
        assert parse_config(RunConfig, json.loads(file.read_text()), overrides).name == run.name
        names.add(run.name)
    assert len(names) == 3
    assert load_named(file, ["name=mine"])[0].name == "mine"
    data = json.loads(file.read_text())
    assert parse_named(data, (), "config")[0].name.startswith("mappo-countdown-") and "name" not in data
