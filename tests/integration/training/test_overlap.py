"""Batches that are played while the team learns: by which weights, and what a resumed run makes of them."""

import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from processes.two_workers import two_workers
from toy_runs.runs import config, train_rows

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.rollout.actor_critic import overlap
from marl_ray.rollout.actor_critic.collector import ActorCriticCollector
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.single_process import train_alone

OVERLAP = "train.overlap=true"
COMPILED = ("env={id: gymnasium.CartPole-v1}", "hyper.lr=1e-3")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "by torch": ("algorithm=mappo",),
    "by compiled code": ("algorithm=ippo", *COMPILED),
    "with costs": ("algorithm=ppo_lagrangian", "constraints=[{budget: 4}]"),
}


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what depends on the clock."""
    clocks = ("time/", "steps_per_second", "timestamp")
    return [{key: value for key, value in row.items() if not key.startswith(clocks)} for row in rows]


class OneLate:
    """A collector that plays without a thread, by the weights of one update before, as the overlapped one does."""

    def __init__(self, collector: Any):
        self.inner = collector
        self.late: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def collect(self, players: Mapping[str, Any], iteration: int) -> Any:
        earlier, self.late = self.late or players, copy.deepcopy(dict(players))
        return self.inner.collect(earlier, iteration)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_is_played_by_the_weights_of_one_update_before(name, alone):
    overlapped, plain = (build_run(config(*ALGORITHMS[name], *more), torch.device("cpu")) for more in ((OVERLAP,), ()))
    plain.collector = OneLate(plain.collector)
    for _ in range(4):
        assert timeless([overlapped.step()]) == timeless([plain.step()])
    assert overlapped.state.metrics["kl"] != 0
    for run in (overlapped, plain):
        run.close()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_equals_the_one_that_never_stopped(name, tmp_path):
    run = config(*ALGORITHMS[name], OVERLAP)
    uninterrupted = train_alone(run, tmp_path)
    again = train_alone(run, resume=tmp_path / "2")
    assert timeless(again) == timeless([row for row in uninterrupted if row["iteration"] > 2]) != []


def test_a_run_plays_no_batch_that_it_does_not_learn_from(alone):
    run = build_run(config(OVERLAP), torch.device("cpu"))
    while not run.done:
        run.step()
    assert "behaviour" not in run.collector.state()
    run.close()


def test_an_abandoned_run_does_not_wait_for_a_batch_that_hangs_and_closes_its_copies_later(alone, monkeypatch, caplog):
    gate, closed = threading.Event(), threading.Event()
    collect, close = ActorCriticCollector.collect, ActorCriticCollector.close

    def hang_later(collector: ActorCriticCollector, players: Any, iteration: int) -> Any:
        assert iteration == 0 or gate.wait(60)
        return collect(collector, players, iteration)

    def close_and_tell(collector: ActorCriticCollector) -> None:
        close(collector)
        closed.set()

    monkeypatch.setattr(overlap, "CLOSE_S", 0.05, raising=False)
    monkeypatch.setattr(ActorCriticCollector, "collect", hang_later)
    monkeypatch.setattr(ActorCriticCollector, "close", close_and_tell)
    run = build_run(config(OVERLAP), torch.device("cpu"))
    run.step()
    abandoning = threading.Thread(target=run.abandon, daemon=True)
    abandoning.start()
    abandoning.join(15)
    is_abandoned, is_closed_early = not abandoning.is_alive(), closed.is_set()
    gate.set()
    assert (is_abandoned, is_closed_early) == (True, False)
    assert closed.wait(60)
    message = "the batch under way was not played within 0.05 s; its environments close when it ends"
    assert caplog.messages == [message]


@pytest.mark.long
def test_two_workers_play_what_one_plays(tmp_path):
    keys = (
        OVERLAP,
        "evaluation.every=0",
        "hyper.lr=1e-12",
    )  # so that rounding, which depends on the workers, decides nothing
    two = two_workers(train_rows, str(tmp_path), *keys, "resources.workers=2")
    assert [row.get("return") for row in two] == [row.get("return") for row in train_alone(config(*keys))] != []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm=cpo", "train.overlap: cpo learns from the newest weights' own batch alone"),
        ("algorithm=happo", "train.overlap: happo learns from the newest weights' own batch alone"),
        ("hyper.importance_cap=2", "train.overlap: importance_cap of policy '.*' has no effect"),
        ("train.rollout=episodes", "train.overlap: expected actor-critics and train.rollout=steps"),
    ],
)
def test_other_algorithms_refuse_it(override, words):
    more = ("constraints=[{budget: 4}]",) if override.endswith("cpo") else ()
    with pytest.raises(MarlRayError, match=words):
        config(OVERLAP, override, *more)


def test_the_key_is_off_by_default():
    assert not RunConfig.model_validate({"name": "plain", "env": {"id": "toys.envs:countdown"}}).train.overlap
