"""The seams to Ray that need no cluster."""

import os

import pytest

from marl_ray import ray_seams

INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"


def test_looks_after_workers_are_rarer_the_more_there_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_seams, "_poll_set", None)
    monkeypatch.setenv(INTERVAL, "x")
    monkeypatch.delenv(INTERVAL)
    intervals = []
    for workers in (1, 100, 500, 1000, 100_000):  # a process drives one group after another
        ray_seams.poll_often(workers)
        intervals.append(os.environ[INTERVAL])
    assert intervals == ["0.25", "0.25", "1.0", "2.0", "2.0"]
    monkeypatch.setenv(INTERVAL, "7")
    ray_seams.poll_often(1)
    assert os.environ[INTERVAL] == "7"
