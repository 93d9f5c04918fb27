"""The environment variables of Ray Train: what the product sets, and what the user has set."""

import os

import pytest
from toy_runs.runs import config
from toys import texts

from marl_ray.errors import MarlRayError
from marl_ray.training.machines import ray_variables
from marl_ray.training.machines.ray_variables import (
    EXCHANGE_VARIABLE,
    INTERVAL_VARIABLE,
    SILENCE_VARIABLE,
    START_VARIABLE,
    exchange_s,
    give_up_silent_workers,
    lost_after_s,
    poll_often,
)
from marl_ray.training.run_checks import check_run


def test_looks_after_workers_are_rarer_the_more_there_are(monkeypatch):
    monkeypatch.setattr(ray_variables, "interval_set_here", None)
    monkeypatch.setenv(INTERVAL_VARIABLE, "x")
    monkeypatch.delenv(INTERVAL_VARIABLE)
    intervals = []
    for workers in (1, 100, 500, 1000, 100_000):  # a process drives one group after another
        poll_often(workers)
        intervals.append(os.environ[INTERVAL_VARIABLE])
    assert intervals == ["0.25", "0.25", "1.0", "2.0", "2.0"]
    monkeypatch.setenv(INTERVAL_VARIABLE, "7")
    poll_often(1)
    assert os.environ[INTERVAL_VARIABLE] == "7"


def test_a_silent_worker_is_lost_after_a_minute_or_what_the_user_has_set(monkeypatch):
    monkeypatch.setenv(SILENCE_VARIABLE, "7")
    give_up_silent_workers()
    assert lost_after_s() == 7
    monkeypatch.delenv(SILENCE_VARIABLE)
    assert lost_after_s() == 60
    give_up_silent_workers()
    assert os.environ[SILENCE_VARIABLE] == "60.0"


def test_an_exchange_has_a_deadline_that_leaves_time_for_engines(monkeypatch):
    words, engine = texts.config(), texts.config("team.speaker.generation.engine=vllm")
    assert [exchange_s(run) for run in (config(), words, engine)] == [300, 600, 1200]
    monkeypatch.setenv(EXCHANGE_VARIABLE, "7")
    assert exchange_s(engine) == 7


@pytest.mark.parametrize("text", ["ten", "", "nan", "inf", "0", "-1"])
@pytest.mark.parametrize("variable", [EXCHANGE_VARIABLE, INTERVAL_VARIABLE, SILENCE_VARIABLE, START_VARIABLE])
def test_a_variable_without_a_number_of_seconds_is_refused_before_anything_starts(
    tmp_path, monkeypatch, variable, text
):
    monkeypatch.setenv(variable, text)
    run_config = config(f"storage={tmp_path}/runs")
    with pytest.raises(MarlRayError) as caught:
        check_run(run_config)
    assert str(caught.value) == f"the environment variable {variable}={text!r}: expected a number of seconds above 0"
    assert not (tmp_path / "runs").exists()
