"""The seams to Ray that need no cluster."""

import contextlib
from typing import Any

from marl_ray import ray_seams


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
