"""Several seeds as one trial, and what a trial takes over from another, without Ray."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from toys.runs import config, short

from marl_ray.cluster import jobs
from marl_ray.config import RunConfig
from marl_ray.config.sweep import MetricConfig
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.statistics import iqm
from marl_ray.training.errors import Diverged
from marl_ray.training.single_process import process_group, train_alone
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.running.seeds_as_one import SeedsAsOne, run_leg

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
        trained = SeedsAsOne(configs, RETURN, torch.device("cpu"), start, foreign)
        run_leg(trained, until, rows.append, keep, foreign)
        trained.close()
    return rows


@pytest.mark.parametrize("name", ["objectives.json", "seed-0/state.json", "seed-0/weights/__0_0.distcp"])
def test_a_damaged_checkpoint_of_a_trial_is_named(tmp_path: Path, name: str):
    train(seeds(1), 64, None, tmp_path / "c")
    (tmp_path / "c" / name).write_bytes(b"\0\0")
    with pytest.raises(MarlRayError, match=name):
        train(seeds(1), None, tmp_path / "c", tmp_path / "d")


def test_seeds_side_by_side_learn_what_they_learn_alone_and_count_by_their_iqm(tmp_path: Path):
    configs = seeds(5)
    rows = train(configs, None, None, tmp_path / "c")
    alone = [train_alone(one) for one in configs]
    assert rows[0]["steps"] == 0 and "eval/return" in rows[0] and "return" not in rows[0]
    alone = [[row for row in run if row["steps"]] for run in alone]
    for number, row in enumerate(row for row in rows if row["steps"]):
        returns = [run[number]["return"] for run in alone]
        assert [row[f"seed-{seed}/return"] for seed in range(5)] == returns
        assert row["return"] == iqm(np.array(returns))
        window = [np.mean([run[k]["return"] for k in range(max(0, number - 1), number + 1)]) for run in alone]
        assert row["objective/return"] == pytest.approx(iqm(np.array(window)))
        assert row["played"] == 5 * row["steps"]


def test_legs_that_are_joined_equal_one_that_was_never_parted(tmp_path: Path):
    whole = train(seeds(2), None, None, tmp_path / "whole")
    first = train(seeds(2), 70, None, tmp_path / "first")
    second = train(seeds(2), None, tmp_path / "first", tmp_path / "second")
    assert first[-1]["steps"] == 96
    # The first leg is judged where it ends, the whole one is not; no clock and no evaluation is a part of training.
    assert "eval/return" in first[-1] and "eval/return" in second[-1]
    left_out = ("time/", "steps_per_second", "score", "eval/", "best/", "seed-")
    for one, other in zip(whole, first + second, strict=True):
        one, other = ({k: v for k, v in row.items() if not k.startswith(left_out)} for row in (one, other))
        assert one == other


@pytest.mark.parametrize("algorithm", ["ppo", "ppo_lagrangian", "pid_lagrangian"])
def test_weights_are_taken_over_but_hyper_parameters_are_the_takers_own(tmp_path: Path, algorithm: str):
    settings = ["hyper.lr=0.03", "hyper.entropy_coef=0.5", "hyper.adam_eps=0.001"]
    settings += {"ppo_lagrangian": ["hyper.multiplier_lr=0.7"], "pid_lagrangian": ["hyper.pid_kp=0.7"]}.get(
        algorithm, []
    )
    train([short(algorithm)], 64, None, tmp_path / "donor")
    with process_group():
        donor = SeedsAsOne([short(algorithm)], RETURN, torch.device("cpu"), tmp_path / "donor")
        taker = SeedsAsOne(
            [short(algorithm, *settings)], RETURN, torch.device("cpu"), tmp_path / "donor", own_hyper=True
        )
        theirs, ours = (trained.runs[0].team.learners["shared"] for trained in (donor, taker))
        for a, b in zip(
            theirs.policy.model.state_dict().values(), ours.policy.model.state_dict().values(), strict=True
        ):
            assert torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(theirs.policy.optimizer.state.values(), ours.policy.optimizer.state.values(), strict=True):
            assert torch.equal(a["exp_avg_sq"].full_tensor(), b["exp_avg_sq"].full_tensor())
            assert torch.equal(a["step"], b["step"]) and a["step"] > 0
        assert {group["lr"] for group in ours.policy.optimizer.param_groups} == {0.03}
        assert {group["initial_lr"] for group in ours.policy.optimizer.param_groups} == {0.03}
        assert {group["eps"] for group in ours.policy.optimizer.param_groups} == {0.001}
        assert ours.state.entropy_coef == 0.5
        for old, new in zip(theirs.state.multipliers, ours.state.multipliers, strict=True):
            assert getattr(new, "lr", getattr(new, "kp", None)) == 0.7
            kept = {"value", "updates", "integral", "costs", "error"} & set(vars(new))
            assert {key: vars(new)[key] for key in kept} == {key: vars(old)[key] for key in kept}
        donor.close()
        taker.close()


def test_a_seed_that_diverges_and_a_metric_that_is_not_there_are_named(tmp_path: Path):
    poison = 'env={"id": "toys.envs:poisoned", "kwargs": {"after": 7}}'
    with pytest.raises(Diverged, match=r"seed 0: policy 'shared', iteration \d"):
        train(seeds(2, poison, "evaluation.every=0"), None, None, tmp_path / "c")
    with process_group():
        trained = SeedsAsOne(seeds(1), [MetricConfig(name="retrun")], torch.device("cpu"), None)
        with pytest.raises(MarlRayError, match=r"metric 'retrun' is never reported; a run reports .*policy_loss"):
            trained.step()
        trained.close()


def test_a_file_is_written_in_whole_or_not_at_all(tmp_path: Path):
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
def test_a_bad_sweep_is_refused_before_the_cluster_is_asked(tmp_path: Path, text: str, message: str):
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "x", "env": {"id": "toys.envs:countdown"}}))
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(MarlRayError) as error:
        jobs.submit("sweep", tmp_path / "sweep.yaml", address="http://cluster.invalid:8265")
    assert message in str(error.value)
