"""Several seeds as one trial, and what a trial takes over from another, without Ray."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_runs.runs import config, short
from toys import texts

from marl_ray.cli.cluster import PRINTER
from marl_ray.cluster import jobs
from marl_ray.config import RunConfig
from marl_ray.config.sweep import MetricConfig
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.statistics import iqm
from marl_ray.training.errors import DivergedError, PassMemoryError
from marl_ray.training.loop.pass_sizes import SIZES_FILE
from marl_ray.training.single_process import process_group, train_alone
from marl_ray.tuning.folder import Folder, read_rows, trial_folder
from marl_ray.tuning.running import worker_group
from marl_ray.tuning.running.trial_files import Leg, TrialState, TrialWriter, read_state, write_state
from marl_ray.tuning.running.trial_seeds import TrialSeeds, run_leg
from marl_ray.tuning.running.trials import run_trial_leg

RETURN = [MetricConfig(name="return", window=2)]


def seeds(count: int, *overrides: str) -> list[RunConfig]:
    return [config(f"seed={seed}", *overrides) for seed in range(count)]


def train(
    configs: list[RunConfig], until: int | None, start: Path | None, out: Path, foreign: bool = False
) -> list[dict[str, float]]:
    """A leg; its rows, and its last checkpoint in `out`."""
    rows: list[dict[str, float]] = []

    def keep(folder: Path) -> None:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder, out)

    with process_group():
        trained = TrialSeeds(configs, RETURN, torch.device("cpu"), start, foreign)
        run_leg(trained, until, rows.append, keep, foreign)
        trained.close()
    return rows


def test_a_leg_that_fails_closes_its_environments_and_raises_its_own_error(monkeypatch):
    closed: list[int] = []

    def fail() -> None:
        raise OSError("the environment does not close")

    def note_and_close(seed: int, close: Callable[[], None]) -> None:
        closed.append(seed)
        close()

    with process_group():
        trained = TrialSeeds(seeds(2), RETURN, torch.device("cpu"), None)
        for seed, seed_run in trained.runs.items():
            monkeypatch.setattr(seed_run.env, "close", partial(note_and_close, seed, seed_run.env.close))
            monkeypatch.setattr(seed_run.collector, "close", fail)
        with pytest.raises(DivergedError, match="the first error"), trained.close_after():
            raise DivergedError("the first error")
    assert closed == [0, 1]


@pytest.mark.parametrize("name", ["objectives.json", "seed-0/state.json", "seed-0/weights/__0_0.distcp"])
def test_a_damaged_checkpoint_of_a_trial_is_named(tmp_path, name):
    train(seeds(1), 64, None, tmp_path / "c")
    (tmp_path / "c" / name).write_bytes(b"\0\0")
    with pytest.raises(MarlRayError, match=name):
        train(seeds(1), None, tmp_path / "c", tmp_path / "d")


def test_seeds_side_by_side_learn_what_they_learn_alone_and_count_by_their_iqm(tmp_path):
    configs = seeds(5)
    rows = train(configs, None, None, tmp_path / "c")
    alone = [train_alone(run) for run in configs]
    assert rows[0]["steps"] == 0 and "eval/return" in rows[0] and "return" not in rows[0]
    alone = [[row for row in run if row["steps"]] for run in alone]
    for number, row in enumerate(row for row in rows if row["steps"]):
        returns = [run[number]["return"] for run in alone]
        assert [row[f"seed-{seed}/return"] for seed in range(5)] == returns
        assert row["return"] == iqm(np.array(returns))
        window = [np.mean([run[k]["return"] for k in range(max(0, number - 1), number + 1)]) for run in alone]
        assert row["objective/return"] == pytest.approx(iqm(np.array(window)))
        assert row["played"] == 5 * row["steps"]


def test_legs_that_are_joined_equal_one_that_was_never_parted(tmp_path):
    uninterrupted = train(seeds(2), None, None, tmp_path / "whole")
    first = train(seeds(2), 70, None, tmp_path / "first")
    second = train(seeds(2), None, tmp_path / "first", tmp_path / "second")
    assert first[-1]["steps"] == 96
    # The first leg is judged where it ends, the whole one is not.
    assert "eval/return" in first[-1] and "eval/return" in second[-1]
    assert timeless(uninterrupted) == timeless(first + second)


LEFT_OUT = ("time/", "timestamp", "steps_per_second", "score", "eval/", "best/", "seed-")


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The rows without what a clock or an evaluation says, both of which are no part of training."""
    return [{key: value for key, value in row.items() if not key.startswith(LEFT_OUT)} for row in rows]


@pytest.mark.parametrize(
    "name",
    [
        "objectives.json",
        "seed-1/manifest.json",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("seed-1/weights/__0_0.distcp", "")),
    ],
)
def test_a_trial_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path, name, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")

    lines: list[str] = []

    def play(sweep: str, until: int | None) -> None:
        configs = [run.as_given() for run in seeds(2, "checkpoint.keep=3", "checkpoint.every=1", "evaluation.every=0")]
        metrics = [metric.model_dump() for metric in RETURN]
        facts = {
            "storage": str(tmp_path),
            "has_worker_group": False,
            "use_gpu": False,
            "cpus": 1.0,
            "folder": str(tmp_path),
        }
        leg = Leg(sweep=sweep, number=0, leg=1, configs=configs, metrics=metrics, until=until, tracking_uri="", **facts)
        run_trial_leg(leg, lambda row: None, lines.append)

    calm, trial = trial_folder(str(tmp_path), "calm", 0), trial_folder(str(tmp_path), "damaged", 0)
    play("calm", None)
    play("damaged", 70)
    state = read_state(trial)
    damaged = Path(trial.path, state.checkpoints[-1])
    if name:
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(content[: len(content) // 2])
    else:
        shutil.rmtree(damaged)
    assert lines == []
    play("damaged", None)
    (line,) = lines
    assert name in line and str(damaged) in line and f"continues from {trial.uri}/{state.checkpoints[-2]}" in line
    assert timeless(read_rows(trial)) == timeless(read_rows(calm))
    assert not damaged.exists()
    assert (read_state(trial).played, read_state(trial).steps) == (read_state(calm).played, read_state(calm).steps)


def test_a_trial_does_not_go_back_before_a_takeover(tmp_path):
    folder = Folder(str(tmp_path), "trial")
    write_state(folder, TrialState(checkpoints=["attempt-1/checkpoint-2", "exploit-64", "attempt-2/checkpoint-4"]))
    assert TrialWriter(folder, 3, [0], lambda row: None, print).starts == ["attempt-2/checkpoint-4", "exploit-64"]


@pytest.mark.parametrize("algorithm", ["ppo", "ppo_lagrangian", "pid_lagrangian"])
def test_weights_are_taken_over_but_hyper_parameters_are_the_takers_own(tmp_path, algorithm):
    settings = ["hyper.lr=0.03", "hyper.entropy_coef=0.5", "hyper.adam_eps=0.001"]
    settings += {"ppo_lagrangian": ["hyper.multiplier_lr=0.7"], "pid_lagrangian": ["hyper.pid_kp=0.7"]}.get(
        algorithm, []
    )
    train([short(algorithm)], 64, None, tmp_path / "donor")
    with process_group():
        donor = TrialSeeds([short(algorithm)], RETURN, torch.device("cpu"), tmp_path / "donor")
        taker = TrialSeeds(
            [short(algorithm, *settings)], RETURN, torch.device("cpu"), tmp_path / "donor", own_hyper=True
        )
        donated, taken = (trained.runs[0].team.learners["shared"] for trained in (donor, taker))
        for a, b in zip(
            donated.policy.model.state_dict().values(), taken.policy.model.state_dict().values(), strict=True
        ):
            assert torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(donated.policy.optimizer.state.values(), taken.policy.optimizer.state.values(), strict=True):
            assert torch.equal(a["exp_avg_sq"].full_tensor(), b["exp_avg_sq"].full_tensor())
            assert torch.equal(a["step"], b["step"]) and a["step"] > 0
        assert {group["lr"] for group in taken.policy.optimizer.param_groups} == {0.03}
        assert {group["initial_lr"] for group in taken.policy.optimizer.param_groups} == {0.03}
        assert {group["eps"] for group in taken.policy.optimizer.param_groups} == {0.001}
        assert taken.state.entropy_coef == 0.5
        for old, new in zip(donated.state.multipliers, taken.state.multipliers, strict=True):
            assert getattr(new, "lr", getattr(new, "kp", None)) == 0.7
            own_state = {"value", "updates", "integral", "costs", "error"} & set(vars(new))
            assert {key: vars(new)[key] for key in own_state} == {key: vars(old)[key] for key in own_state}
        donor.close()
        taker.close()


def test_the_first_weights_count_where_no_later_ones_are_better(tmp_path):
    still = "train.total_steps=512", "hyper.lr=1e-30", "evaluation.episodes=2", "evaluation.max_steps=8"
    with process_group():
        trained = TrialSeeds(seeds(2, *still), [MetricConfig(name="best/return")], torch.device("cpu"), None)
        rows: list[dict[str, float]] = []
        run_leg(trained, None, rows.append, lambda folder: None, False)
        later = [row for row in rows[1:] if "best/return" in row]
        assert trained.done and later == []
        assert trained.objectives() == [rows[0]["best/return"]] == [rows[-1]["objective/best/return"]]
        trained.close()


def test_a_trial_adds_scores_to_its_own_rows_alone_and_keeps_them_in_its_checkpoints(tmp_path):
    with process_group():
        trained = TrialSeeds(seeds(2, "evaluation.every=0"), RETURN, torch.device("cpu"), None)
        while "score" not in (row := trained.step()):
            continue
        assert all("score" not in run.state.metrics for run in trained.runs.values())
        trained.save(tmp_path)
        continued = TrialSeeds(seeds(2, "evaluation.every=0"), RETURN, torch.device("cpu"), tmp_path)
        assert continued.rows == trained.rows
        assert row["score"] == iqm(np.array([seed_row["score"] for seed_row in continued.rows.values()]))
        trained.close()
        continued.close()


def test_a_seed_that_diverges_and_a_metric_that_is_not_there_are_named(tmp_path):
    poison = 'env={"id": "toys.envs:poisoned", "kwargs": {"after": 7}}'
    with pytest.raises(DivergedError, match=r"seed 0: policy 'shared', iteration \d"):
        train(seeds(2, poison, "evaluation.every=0"), None, None, tmp_path / "c")
    with process_group():
        trained = TrialSeeds(seeds(1), [MetricConfig(name="retrun")], torch.device("cpu"), None)
        with pytest.raises(MarlRayError, match=r"metric 'retrun' is never reported; a run reports .*policy_loss"):
            trained.step()
        trained.close()


def test_a_file_is_written_in_whole_or_not_at_all(tmp_path):
    folder = Folder(str(tmp_path), "a", "b")
    folder.write_json("x.json", {"k": 1})
    with pytest.raises(TypeError):
        folder.write_json("x.json", {"k": object()})
    assert folder.read_json("x.json") == {"k": 1}
    assert folder.read_json("none.json") is None
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: s\nrun: run.yaml\nspace: {hyper.lrr: {gird: [1]}}\n", "unknown key 'space.hyper.lrr.gird'"),
        ("name: s\nrun: run.yaml\nspace: {hyper.lr: {grid: [1]}}\n", "storage='runs' is relative to the job's"),
    ],
)
def test_a_bad_sweep_is_refused_before_the_cluster_is_asked(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "x", "env": {"id": "toys.envs:countdown"}}))
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(MarlRayError) as error:
        jobs.submit("sweep", tmp_path / "sweep.yaml", address="http://cluster.invalid:8265", listener=PRINTER)
    assert message in str(error.value)


def test_a_worker_of_a_trial_without_room_for_a_pass_ends_and_the_next_halves_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a worker works in the sweep's folder
    monkeypatch.setenv(TRACKING_URI, "")
    crowded = texts.config(
        "train.micro_batch=4", "train.total_steps=8", "algorithm=toy_runs.short_memory:CROWDED"
    ).as_given()
    leg = Leg("sweep", str(tmp_path), 0, 1, [crowded], [{"name": "return"}], None, True, False, 1, "", str(tmp_path))
    payload = asdict(leg) | {"place": "attempt-1", "starts": []}
    with process_group():
        with pytest.raises(
            PassMemoryError, match=r"^policy 'speaker', iteration 1, step 0: out of memory in a pass of 4 "
        ):
            worker_group.train_leg(payload, torch.device("cpu"))
        assert json.loads((tmp_path / "sweep/trials/0000" / SIZES_FILE).read_text()) == {"speaker": 2}
        assert worker_group.train_leg(payload, torch.device("cpu"))["done"]


@pytest.mark.parametrize("shared", [True, False])
def test_an_error_of_one_worker_alone_ends_its_process_and_that_of_all_is_a_result(tmp_path, monkeypatch, shared):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TRACKING_URI, "")
    leg = Leg("sweep", str(tmp_path), 0, 1, [short("ippo").as_given()], [], None, True, False, 1, "", str(tmp_path))
    failure = MarlRayError("no room")
    failure.shared = shared

    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(worker_group, "run_leg", fail)
    with process_group(), nullcontext() if shared else pytest.raises(MarlRayError, match="no room"):
        result = worker_group.train_leg(asdict(leg) | {"place": "attempt-1", "starts": []}, torch.device("cpu"))
        assert result == {"failed": "no room"}
