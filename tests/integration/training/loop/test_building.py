"""A run that cannot be built closes what it has opened, because its process may build others. No Ray."""

import shutil

import pytest
import torch
from toy_runs import runs
from toys import texts
from toys.envs import Limited
from toys.texts import LimitedEcho

from marl_ray.config import RunConfig
from marl_ray.config.sweep import MetricConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.training.checkpoints.loading import UnreadableCheckpointError
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.start import RunStart
from marl_ray.training.single_process import process_group, train_alone
from marl_ray.tuning.running.trial_seeds import TrialSeeds

CPU = torch.device("cpu")


def limited(limit: int, *overrides: str) -> RunConfig:
    return runs.config(f"env={{id: 'toys.envs:limited', kwargs: {{limit: {limit}}}}}", *overrides)


class Closable(TorchEngine):
    """Counts the engines that are open; only one can be made."""

    open_count = 0

    def __init__(self, policy):
        super().__init__(policy)
        if Closable.open_count:
            raise MarlRayError("one engine is open")
        Closable.open_count += 1

    def close(self):
        Closable.open_count -= 1
        super().close()


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch):
    """Let each test count from 0, whatever another has left."""
    for kind in (Limited, LimitedEcho, Closable):
        monkeypatch.setattr(kind, "open_count", 0)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_run_whose_last_environment_copies_cannot_be_made_closes_the_first(limit):
    with process_group(), pytest.raises(MarlRayError, match=f"{limit} environments are open"):
        build_run(limited(limit), CPU)
    assert Limited.open_count == 0


def test_a_run_whose_checkpoint_is_damaged_closes_its_environment(tmp_path):
    train_alone(limited(100), tmp_path)
    assert Limited.open_count == 0
    shutil.rmtree(tmp_path / "2" / "weights")
    with process_group(), pytest.raises(UnreadableCheckpointError, match="no checkpoint can be read: "):
        build_run(limited(100), CPU, RunStart([local_stored_folder(tmp_path / "2")]))
    assert Limited.open_count == 0


def test_a_run_that_is_closed_leaves_nothing_open():
    with process_group():
        run = build_run(limited(100), CPU)
        assert Limited.open_count == 5  # one that has the spaces, and four copies
        run.close()
    assert Limited.open_count == 0


def test_a_run_of_texts_whose_last_copies_cannot_be_made_closes_the_first_and_its_engines():
    config = texts.config("env={id: 'toys.texts:limited', kwargs: {limit: 4}}")
    with process_group(), pytest.raises(MarlRayError, match="4 environments are open"):
        build_run(config, CPU, engine_of=lambda name, policy: Closable(policy))
    assert (LimitedEcho.open_count, Closable.open_count) == (0, 0)


def test_a_team_whose_last_engine_cannot_be_made_closes_the_first():
    config = texts.config(texts.TWO_AGENTS, texts.TWO_POLICIES)
    with process_group(), pytest.raises(MarlRayError, match="one engine is open"):
        build_run(config, CPU, engine_of=lambda name, policy: Closable(policy))
    assert Closable.open_count == 0


def test_seeds_of_which_the_last_cannot_be_built_are_all_closed():
    configs = [limited(7, f"seed={seed}") for seed in range(2)]  # a run has five environments
    with process_group(), pytest.raises(MarlRayError, match="7 environments are open"):
        TrialSeeds(configs, [MetricConfig(name="return")], CPU, None)
    assert Limited.open_count == 0


def test_seeds_are_all_closed_where_closing_one_raises(monkeypatch):
    configs = [limited(100, f"seed={seed}") for seed in range(2)]
    with process_group():
        seeds = TrialSeeds(configs, [MetricConfig(name="return")], CPU, None)
        monkeypatch.setattr(seeds.runs[0].saver, "close", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            seeds.close()
    assert Limited.open_count == 0
