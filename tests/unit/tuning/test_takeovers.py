"""Takeovers of weights: what values follow, what the driver copies, and what it says of a trial without a donor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.folder import trial_folder
from marl_ray.tuning.records import SweepRecords, TrialRecord, identity_of
from marl_ray.tuning.running.sweep_legs import copy_weights
from marl_ray.tuning.running.trial_files import TrialState, read_state, write_state
from marl_ray.tuning.search.plan import SweepPlan
from marl_ray.tuning.search.schedulers import Exploit, TrialStanding, TrialVerdicts, make_scheduler

VALUES = {"hyper.lr": 0.03}
VERDICTS = TrialVerdicts(continuing=frozenset({1}), exploits={1: Exploit(0, VALUES)})


@pytest.fixture
def waiting(tmp_path: Path) -> tuple[SweepConfig, SweepRecords]:
    """Return a sweep of two trials that wait at 250 steps; the first has a checkpoint."""
    data: dict[str, Any] = {
        "name": "s",
        "storage": str(tmp_path),
        "run": {"env": {"id": "toys.envs:countdown"}, "train": {"total_steps": 1000}},
        "space": {"hyper.lr": {"loguniform": [0.001, 0.1]}},
        "search": "random",
        "scheduler": {"kind": "pbt", "interval": 250},
        "budget": {"trials": 2},
    }
    config = parse_config(SweepConfig, data)
    trials = [TrialRecord(number, {"hyper.lr": 0.01}, "waiting", scores={250: -number}) for number in range(2)]
    donor = trial_folder(config.storage, config.name, 0)
    donor.write("checkpoint-250/weights", b"best")
    write_state(donor, TrialState(["checkpoint-250"]))
    return config, SweepRecords(config.name, config.resolve(), identity_of(config), trials=trials)


def test_a_takeover_is_copied_and_said_once(waiting):
    config, records = waiting
    lines: list[str] = []
    for _ in range(2):  # again, as after the death of the driver
        assert copy_weights(config, records, VERDICTS, lines.append) == {}
    recipient = trial_folder(config.storage, config.name, 1)
    assert recipient.read("exploit-250/weights") == b"best"
    assert [(each.at, each.donor, each.values) for each in read_state(recipient).exploits] == [(250, 0, VALUES)]
    assert lines == ["trial 0001 takes over 0000 at 250 steps: lr=0.03"]


@pytest.mark.parametrize(
    ("number", "state", "reason"),
    [
        (0, "{bad", "/s/trials/0000/trial.json is not the state of a trial: "),
        (1, "{bad", "/s/trials/0001/trial.json is not the state of a trial: "),
        (0, "{}", "/s/trials/0000/trial.json names no checkpoint"),
    ],
)
def test_a_damaged_state_fails_the_recipient_alone(waiting, number, state, reason):
    config, records = waiting
    trial_folder(config.storage, config.name, number).write("trial.json", state.encode())
    failures = copy_weights(config, records, VERDICTS, print)
    assert failures.keys() == {1} and failures[1].startswith(f"exploit of trial 0000: {config.storage}{reason}")


def test_a_trial_whose_folder_cannot_be_written_fails_with_the_reason_and_the_others_go_on(waiting, tmp_path):
    config, records = waiting
    Path(trial_folder(config.storage, config.name, 1).path).write_text("a file stands where the folder is to be")
    lines: list[str] = []
    failures = copy_weights(config, records, VERDICTS, lines.append)
    assert failures.keys() == {1} and lines == []
    assert failures[1].startswith("exploit of trial 0000: ") and "Not a directory" in failures[1]
    plan = SweepPlan(config, records)
    plan.apply_verdicts(TrialVerdicts(continuing=frozenset({0, 1}), exploits=VERDICTS.exploits), failures)
    assert [(record.state, record.status) for record in records.trials] == [("running", ""), ("ended", "failed")]
    assert records.trials[1].error == failures[1] and records.trials[1].exploits == []
    assert [record.number for record in plan.take_changes()] == [1, 0]
    assert plan.next_step() is records.trials[0]


@pytest.mark.parametrize(
    ("value", "expected"), [(0, {-1, 1}), (1, {0, 2}), (-1, {-2, 0}), (9, {7, 11}), (-30, {-36, -24})]
)
def test_a_whole_number_changes_by_one_where_a_factor_is_too_weak(value, expected):
    space = {"hyper.epochs": {"int": [-50, 50]}}
    scheduler = {"kind": "pbt", "interval": 250, "resample": 0}
    data = {"name": "s", "run": {"env": {"id": "toys.envs:countdown"}}, "space": space, "search": "random"}
    sweep = parse_config(SweepConfig, data | {"scheduler": scheduler, "budget": {"trials": 2}})
    pbt: Any = make_scheduler(sweep, 1000)
    donor = {0: TrialStanding(0, "waiting", {}, {"hyper.epochs": value})}
    rng = np.random.default_rng(0)
    assert {pbt.explore(donor, 0, 250, rng)["hyper.epochs"] for _ in range(100)} == expected
