"""The worker group that runs and trials train in."""

from marl_ray.config import RunConfig, parse_config
from marl_ray.training.machines.torch_trainer import torch_trainer


def test_a_worker_group_has_what_the_run_asks_for_and_waits_no_longer_than_it_is_told(tmp_path):
    resources = {"workers": 3, "cpus_per_worker": 0.5, "max_failures": 2}
    keys = {
        "name": "toy",
        "env": {"id": "gymnasium.CartPole-v1"},
        "algorithm": "ppo",
        "train": {"total_steps": 8, "env_copies": 3},
    }
    config = parse_config(RunConfig, keys | {"resources": resources, "storage": str(tmp_path)})
    begun: list[object] = []
    trainer = torch_trainer(
        lambda payload: None,
        {"own": 1},
        config,
        label="toy",
        name="toy",
        storage=str(tmp_path),
        use_gpu=False,
        exchange_s=299.5,
        begun=begun.append,
    )
    assert trainer.scaling_config.num_workers == 3
    assert trainer.scaling_config.resources_per_worker == {"CPU": 0.5}
    assert trainer.run_config.failure_config.max_failures == 2
    assert trainer.backend_config.timeout_s == 300 and trainer.backend_config.backend == "gloo"  # type: ignore[attr-defined]  # Ray's
