"""RLlib's PPO on the gridworld: prints one JSON object with what each training iteration took.

Runs in a Python environment of its own (see `benchmarks/environments/gridworld.py`), because RLlib pins an older gymnasium.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

SIZES = (11, 6, 4)
"""Values of a cell's type, colour and state (or direction of an agent)."""
CELLS = 7 * 7
"""Cells of an agent's view."""
WIDTH = CELLS * sum(SIZES) + 4
# Column of a cell's first type, colour and state, in the order of the flattened view; last the direction's.
OFFSETS = np.array(
    [c * sum(SIZES) + o for c in range(CELLS) for o in (0, SIZES[0], SIZES[0] + SIZES[1])] + [CELLS * sum(SIZES)]
)


def make_environment(kind: str, name: str, agents: int) -> Any:
    """Make the gridworld of one kind, one-hot encoded for RLlib.

    `package` is MultiGrid as it is; `marl_ray` is the same game as marl-ray plays it, encoded alike. Observations are
    float vectors, what RLlib's default networks take: 49 cells x (11 types + 6 colours + 4 states), then 4 directions.
    """
    import multigrid.envs  # noqa: F401  registers the environments
    from ray.rllib.env.multi_agent_env import MultiAgentEnv

    class OneHot(MultiAgentEnv):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # RLlib's
            self.names = [f"agent_{i}" for i in range(agents)]
            self.possible_agents, self.agents = [*self.names], [*self.names]
            self.observation_spaces = {a: gym.spaces.Box(0, 1, (WIDTH,), np.float32) for a in self.agents}
            self.action_spaces = {a: gym.spaces.Discrete(7) for a in self.agents}
            self._base = np.arange(agents)[:, None] * WIDTH + OFFSETS
            self._codes = np.empty((agents, len(OFFSETS)), np.int64)

        def _encode(self) -> dict[str, np.ndarray]:
            rows = np.zeros((agents, WIDTH), np.float32)
            rows.reshape(-1)[self._base + self._codes] = 1
            return dict(zip(self.names, rows, strict=True))

    class Package(OneHot):
        def __init__(self) -> None:
            super().__init__()
            self.env: Any = gym.make(name, disable_env_checker=True, agents=agents, joint_reward=True).unwrapped

        def _observe(self, observations: dict[int, dict[str, Any]]) -> dict[str, np.ndarray]:
            for i, observation in observations.items():
                self._codes[i, :-1] = observation["image"].reshape(-1)
                self._codes[i, -1] = observation["direction"]
            return self._encode()

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            return self._observe(self.env.reset(seed=seed)[0]), {}

        def step(self, actions: dict[Any, Any]) -> tuple[Any, ...]:
            # MultiGrid compares actions with an enumeration, which is much faster with Python integers.
            chosen = {i: int(actions[a]) for i, a in enumerate(self.names)}
            observations, rewards, terminated, truncated, _ = self.env.step(chosen)
            # Both agents' episodes end together.
            over, late = bool(terminated[0]), bool(truncated[0]) and not terminated[0]
            gained = {a: float(rewards[i]) for i, a in enumerate(self.names)}
            every = [*self.names, "__all__"]
            return self._observe(observations), gained, dict.fromkeys(every, over), dict.fromkeys(every, late), {}

    class MarlRay(OneHot):
        def __init__(self) -> None:
            super().__init__()
            from marl_ray.config import EnvConfig

            # marl-ray writes `MultiDiscrete[...]` in annotations, which the older gymnasium does not know.
            multi_discrete: Any = gym.spaces.MultiDiscrete
            multi_discrete.__class_getitem__ = classmethod(lambda cls, item: cls)
            from marl_ray.envs.registry import make_env

            self.env = make_env(EnvConfig(id=name, kwargs={"agents": agents, "joint_reward": True}))

        def _observe(self, observations: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            for i, row in enumerate(observations.values()):
                self._codes[i] = row
            return self._encode()

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            return self._observe(self.env.reset(seed=seed)[0]), {}

        def step(self, actions: dict[Any, Any]) -> tuple[Any, ...]:
            observations, gained, terminated, truncated, _ = self.env.step({a: int(x) for a, x in actions.items()})
            over = all(terminated.values())
            late = all(truncated.values()) and not over
            every = [*self.names, "__all__"]
            return self._observe(observations), gained, dict.fromkeys(every, over), dict.fromkeys(every, late), {}

    return {"package": Package, "marl_ray": MarlRay}[kind]()


def build(options: argparse.Namespace) -> Any:
    """Build PPO on RLlib's current API stack, which learns in the main process.

    The hyper-parameters are those of marl-ray's run.
    """
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.tune.registry import register_env

    torch.set_num_threads(options.threads)
    rows = options.batch * (options.agents if options.whole else 1)
    register_env("gridworld", lambda _: make_environment(options.env, options.id, options.agents))
    config = (
        PPOConfig()
        .environment("gridworld", disable_env_checking=True)
        .multi_agent(
            policies={"shared"},
            policy_mapping_fn=lambda agent, episode, **_: "shared",
            count_steps_by="agent_steps" if options.whole else "env_steps",
        )
        .env_runners(
            num_env_runners=options.runners,
            num_envs_per_env_runner=options.envs,
            rollout_fragment_length=rows // (max(options.runners, 1) * options.envs),
        )
        .learners(num_learners=0)
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
        )
        .training(
            train_batch_size_per_learner=rows,
            minibatch_size=options.batch * options.agents if options.whole else None,
            num_epochs=4,
            lr=options.lr,
            gamma=0.99,
            lambda_=0.95,
            clip_param=0.2,
            vf_clip_param=10.0,
            entropy_coeff=0.01,
            use_kl_loss=False,
            grad_clip=10.0,
        )
        .api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
        .debugging(log_level="ERROR")
    )
    return config.build_algo()


def watch_gradient_steps(algo: Any) -> list[int]:
    """Return a list that gets the rows of each gradient step from now on."""
    rows: list[int] = []
    algo.learner_group.foreach_learner(lambda learner: _watch(learner, rows))
    return rows


def _watch(learner: Any, rows: list[int]) -> None:
    update = learner._update  # noqa: SLF001  RLlib's

    def count_rows(batch: Any, **kwargs: Any) -> Any:
        rows.append(sum(len(next(iter(columns.values()))) for columns in batch.values()))
        return update(batch, **kwargs)

    learner._update = count_rows  # noqa: SLF001  RLlib's


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train for some iterations, and return seconds, environment steps and return of each."""
    import ray

    ray.init(
        address="local",
        num_cpus=max(2, options.runners + 1),
        include_dashboard=False,
        object_store_memory=512 << 20,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    algo = build(options)
    gradient_rows = watch_gradient_steps(algo) if options.count_gradient_steps else []
    iterations, before = [], 0.0
    for _ in range(options.iterations):
        started = time.perf_counter()
        result = algo.train()
        seconds = time.perf_counter() - started
        steps = result["env_runners"]["num_env_steps_sampled_lifetime"]
        iterations.append(
            {
                "seconds": seconds,
                "steps": steps - before,
                "return": result["env_runners"].get("agent_episode_returns_mean", {}).get("agent_0"),
            }
        )
        before = steps
    algo.stop()
    ray.shutdown()
    return {"options": vars(options), "iterations": iterations, "gradient_rows": gradient_rows}


def raw_steps_per_second(options: argparse.Namespace, seconds: float = 3.0) -> float:
    """Return steps per second of the environment alone, under random actions, in one process."""
    env = make_environment(options.env, options.id, options.agents)
    actions = np.random.default_rng(0).integers(0, 7, (4096, options.agents)).tolist()
    env.reset(seed=0)
    for warm in (True, False):
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < (0.3 if warm else seconds):
            *_, terminated, truncated, _ = env.step(dict(zip(env.possible_agents, actions[steps % 4096], strict=True)))
            if terminated["__all__"] or truncated["__all__"]:
                env.reset()
            steps += 1
    return steps / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--id", default="MultiGrid-Empty-8x8-v0")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--env", choices=("package", "marl_ray"), default="package")
    parser.add_argument("--runners", type=int, default=2, help="sampling processes besides the main one")
    parser.add_argument("--envs", type=int, default=16, help="environment copies per runner")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of the learner")
    parser.add_argument("--batch", type=int, default=4096, help="environment steps per iteration")
    parser.add_argument("--whole", action="store_true", help="minibatches of batch x agents rows, not of batch rows")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--count-gradient-steps", action="store_true")
    parser.add_argument("--raw", action="store_true", help="measure the environment alone")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")  # for sampling processes that play marl-ray's
    result = {"raw": raw_steps_per_second(options)} if options.raw else measure(options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
