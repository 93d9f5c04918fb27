"""The seams to Ray that need no cluster."""

import contextlib
import os
from typing import Any

from marl_ray import ray_seams

INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"


def test_looks_after_workers_are_rarer_the_more_there_are(monkeypatch):
    monkeypatch.setattr(ray_seams, "interval_set_here", None)
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


def test_rays_attributes_are_back_after_the_start_of_a_loopback_ray_however_it_ends():
    from ray._private import parameter, ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER, parameter.RayParams
    with contextlib.suppress(OSError), ray_seams.loopback_only(log_monitor=False):
        assert not ray_constants.ENABLE_RAY_CLUSTER and parameter.RayParams().dashboard_agent_listen_port == 0
        raise OSError("Ray does not start")
    assert before == (ray_constants.ENABLE_RAY_CLUSTER, parameter.RayParams)


def test_a_run_on_its_own_ray_starts_no_process_for_an_autoscaler():
    import ray
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    connected = ray.is_initialized()  # by a test before
    trainer: Any = TorchTrainer(print)
    started: dict[str, Any] = {}
    trainer._initialize_and_run_controller = started.update  # Ray Train's own would start the run
    callbacks = trainer._create_default_callbacks()
    ray_seams.skip_cleanup_processes(trainer)
    trainer._initialize_and_run_controller(callbacks=callbacks, scaling_policy=None, validation_config=None)
    left_out = [each for each in callbacks if each not in started["callbacks"]]
    assert [type(each) for each in left_out] == [PlacementGroupCleanerCallback]
    policy = started["scaling_policy"]
    policy.after_controller_start(trainer.train_run_context)
    decision = policy.make_decision_for_non_running_worker_group()
    policy.before_controller_abort()
    assert decision.num_workers == 1 and "validation_config" in started
    assert ray.is_initialized() == connected  # an autoscaler would have been asked by an actor
