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
from toy_runs.runs import config, mark_delivered

import marl_ray as api
from marl_ray.cli.training.train import warn_of
from marl_ray.config import RunConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.runs.comparison import compare, student_interval
from marl_ray.runs.following import log_lines
from marl_ray.runs.naming import load_named, parse_named
from marl_ray.runs.plot import group_line, legend_line, legend_title
from marl_ray.runs.stored import find_run
from marl_ray.training.checkpoints.manifest import FORMAT, CheckpointManifest, publish
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.journal.writer import Journal
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_folder.lease import Lease
from marl_ray.training.run_folder.owners import read_owner
from marl_ray.training.run_folder.record import filesystem_of, record_of, write_record
from marl_ray.training.run_folder.run_log import RunLog

LOCAL = fs.LocalFileSystem()


def store_run(storage: Path, name: str, *overrides: str, score: float = 1.0, finished: bool = True) -> RunConfig:
    """A run as its driver leaves it, of three evaluations that end with a score."""
    run_config = config(f"name={name}", f"storage={storage}", *overrides)
    stored = {"name": name, "model": f"models:/{name}/1", "bundle": f"{storage}/{name}/bundle", "curve": None}
    stored |= {
        "tracking_uri": "sqlite:///mlflow.db",
        "run_id": "0123",
        "best_return": score,
        "metrics": {},
        "summary": [],
    }
    done = {"finished": {"total_steps": 192, "outcome": stored}} if finished else {}
    write_record(run_config, record_of(run_config) | {"mlflow_run_id": "0123"} | done)
    filesystem, folder = filesystem_of(run_config)
    rows = [
        {"iteration": n, "steps": 96 * n, "eval/return": score * n / 2, "eval/return_low": score * n / 2 - 0.5}
        | {"eval/return_high": score * n / 2 + 0.5}
        for n in range(3)
    ]
    journal = Journal(filesystem, folder)
    for row in rows:
        journal.write_row(row)
    if finished:
        mark_delivered(run_config, len(rows))
    with RunLog(run_config) as log:
        log.open()
        log.write("training")
    return run_config


def document(*arguments: str | Path) -> Any:
    done = marl_ray(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def find_config(storage: Path, *overrides: str) -> RunConfig:
    """The config of the run that is not finished."""
    return parse_config(RunConfig, find_run("other", str(storage)).record["given"], overrides)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    store_run(tmp_path, "first", "seed=1", score=1.0)
    store_run(tmp_path, "second", "seed=2", score=2.0)
    store_run(tmp_path, "other", "algorithm=ippo", score=3.0, finished=False)
    (tmp_path / "mlartifacts").mkdir()
    return tmp_path


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
    # Without `config` it is a folder of something else.
    line = "" if key == "config" else f"marl-ray: {path} is not the record of a sweep: .*\n"
    assert re.fullmatch(line, listed.stderr)


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
        "import sys, time; from pyarrow import fs; from marl_ray.training.run_folder.lease import Lease\n"
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


@pytest.mark.parametrize(("error", "state"), [(MarlRayError("no"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_an_attempt_leaves_how_it_ended(storage, error, state):
    with pytest.raises(type(error)), Lease(LOCAL, str(storage / "other"), "run 'other'"):
        raise error
    owner = read_owner(LOCAL, str(storage / "other"))
    assert owner is not None and owner.state == find_run("other", str(storage)).state() == state
    assert not owner.is_alive(time.time())


def test_runs_are_compared_by_seeds(storage):
    picture = storage / "all.png"
    arguments = ("runs", "compare", "first", "second", "other", "--storage", storage, "--out", picture)
    compared = document(*arguments)
    assert set(compared) == keys_of("runs compare") and compared["metric"] == "eval/return"
    assert [[run["seed"] for run in group["runs"]] for group in compared["groups"]] == [[0], [1, 2]]
    both = compared["groups"][1]["score"]
    assert both["value"] == 1.5 and [both["low"], both["high"]] == pytest.approx([1.5 - 6.353, 1.5 + 6.353], abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = marl_ray(*arguments).stdout.splitlines()
    assert lines[5:7] == ["other: algorithm=ippo", "second and 1 more: algorithm at its default"] or lines[5:7] == [
        "other: algorithm=ippo",
        "first and 1 more: algorithm at its default",
    ]
    assert len(lines) == 8 and lines[-1] == f"eval/return over environment steps: {picture}"


def test_a_longer_run_is_of_another_group_and_no_seed_counts_twice(storage):
    store_run(storage, "longer", "seed=1", "train.total_steps=640", score=3.0)
    store_run(storage, "again", "seed=1", score=2.0)
    groups = compare([find_run(name, str(storage)) for name in ("first", "second", "longer", "again")])
    assert sorted(sorted(curve.name for curve in group.runs) for group in groups) == [
        ["again"],
        ["first", "second"],
        ["longer"],
    ]
    assert next(g for g in groups if g.runs[0].name == "longer").differences["train.total_steps"] == 640


def test_a_picture_is_not_written_into_a_folder_that_is_missing(storage):
    out = storage / "pictures" / "all.png"
    with pytest.raises(MarlRayError, match=r"^out: '.*all\.png' cannot be written: there is no folder '.*pictures'$"):
        api.compare(["first"], storage=storage).plot(out)
    assert not out.parent.exists()


def test_the_legend_is_below_the_axes_and_short(storage):
    store_run(storage, "fast", "seed=1", "hyper.lr=10", "train.horizon=16", "checkpoint.every=3", score=-1.0)
    groups = compare([find_run(name, str(storage)) for name in ("first", "second", "fast")])
    assert [legend_line(group) for group in groups] == ["first and 1 more: 1.5 [-4.85, 7.85]", "fast: -1 [-1.5, -0.5]"]
    assert legend_title(groups[1:]) == "band: 95 % interval of each point; number: last evaluation [95 % interval]"
    assert legend_title(groups[:1]) == ("thin: each seed, thick: their mean; number: mean over 2 seeds [95 % interval]")


def test_what_differs_is_in_the_line_of_a_group(storage):
    store_run(storage, "fast", "seed=1", "hyper.lr=10", "train.horizon=16", score=-1.0)
    runs = [find_run(name, str(storage)) for name in ("first", "fast")]
    first, fast = compare(runs)
    assert first.differences == {"hyper.lr": 0.01, "train.horizon": 8}
    assert fast.differences == {"hyper.lr": 10, "train.horizon": 16}
    assert group_line(fast) == "fast: mappo, seed 1, hyper.lr=10.0, train.horizon=16, -1 [-1.5, -0.5]"


def test_a_metric_of_which_more_may_be_worse_ranks_nobody(storage):
    rows = "".join(json.dumps({"iteration": n, "steps": 96 * n, "entropy": 1.0 / n}) + "\n" for n in (1, 2))
    for name, text in (("first", rows), ("second", rows.replace("0.5", "0.7"))):
        (storage / name / "metrics.jsonl").write_text(text)
    picture = storage / "entropy.png"
    arguments = ("runs", "compare", "first", "second", "--storage", storage, "--out", picture)
    store_run(storage, "third", "seed=2", "hyper.lr=0.5")
    (storage / "third" / "metrics.jsonl").write_text(rows.replace("0.5", "0.7"))
    shown = marl_ray(*arguments[:3], "third", *arguments[4:], "--metric", "entropy").stdout.splitlines()
    assert shown[0].split()[4] == "VALUE" and [line.split()[0] for line in shown[1:3]] == ["first", "third"]
    wrong = marl_ray(*arguments, "--metric", "zzz").stderr
    assert "expected one of entropy" in wrong


def test_a_program_compares_runs_as_the_command_does(storage):
    compared = api.compare(["first", "other", "second"], storage=storage)
    assert [[run.name for run in group.runs] for group in compared.groups] == [["other"], ["first", "second"]]
    assert compared.metric == "eval/return" and compared.title == "toys.envs:countdown"
    first = next(row for row in compared.rows if row["run"] == "first")
    assert (first["seed"], first["score"], first["low"], first["algorithm"]) == (1, 1.0, 0.5, "mappo")
    assert str(compared).startswith("other: ippo, seed 0, 3 [") and compared._repr_png_()[1:4] == b"PNG"
    with pytest.raises(MarlRayError, match=r"^runs: expected a list of names, got 'first'$"):
        api.compare("first", storage=storage)
    with pytest.raises(
        MarlRayError, match=r"^out: '/proc/no/x\.png' cannot be written: there is no folder '/proc/no'$"
    ):
        compared.plot("/proc/no/x.png")


def test_runs_of_different_metrics_are_not_compared(storage):
    store_run(storage, "elsewhere", "env={id: 'toys.envs:fragile', kwargs: {marker: x, at: 5}}")
    (storage / "other" / "metrics.jsonl").write_text('{"iteration": 1, "steps": 32, "return": 1.0}\n')
    for names, expected in (
        (("first", "elsewhere"), "elsewhere plays toys.envs:fragile, whose returns are different metrics"),
        (("first", "other"), "first is measured by eval/return and other is not"),
        (("first", "second", "--metric", "eval/retrun"), "first has no metric 'eval/retrun'; did you mean eval/return"),
        (("first", "first"), "expected runs of different names"),
    ):
        done = marl_ray("runs", "compare", *names, "--storage", storage, "--out", storage / "no.png")
        assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (storage / "no.png").exists()


def test_students_interval_is_that_of_the_tables():
    assert student_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)


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
