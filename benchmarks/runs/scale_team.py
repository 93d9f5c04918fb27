"""A team of many policies, trained in one process: the CPU of an iteration and of a checkpoint for each policy."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv

from marl_ray.config import RunConfig, parse_config
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.single_process import process_group

COPIES, HORIZON, LENGTH = 8, 32, 16
"""Environment copies, steps of each in a batch, and steps of an episode."""
WARM_UP, ITERATIONS, CHECKPOINTS = 2, 3, 3
"""First iterations that are not counted, and iterations and checkpoints that are."""


class Crowd(ParallelEnv[str, np.ndarray, int]):  # type: ignore[misc]  # PettingZoo has no types
    """So many agents, of which each sees four numbers of its own and earns 1 for an action with the sign of the first."""

    metadata = {"name": "crowd", "render_modes": []}

    def __init__(self, count: int):
        self.possible_agents = [f"agent_{k}" for k in range(count)]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Box:
        return self._seen

    def action_space(self, agent: str) -> spaces.Discrete:
        return self._acts

    _seen, _acts = spaces.Box(-10.0, 10.0, (4,), np.float32), spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.time, self.agents = 0, list(self.possible_agents)
        return self._observe(), {agent: {} for agent in self.agents}

    def _observe(self) -> dict[str, np.ndarray]:
        numbers = self.random.normal(size=(len(self.possible_agents), 4)).clip(-10, 10).astype(np.float32)
        self.numbers = dict(zip(self.possible_agents, numbers, strict=True))
        return dict(self.numbers)

    def step(self, actions: dict[str, int]) -> Any:
        rewards = {agent: float(action == (self.numbers[agent][0] > 0)) for agent, action in actions.items()}
        self.time += 1
        over = dict.fromkeys(self.agents, self.time >= LENGTH)
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        observed = self._observe()
        self.agents = [] if self.time >= LENGTH else self.agents
        return observed, rewards, dict.fromkeys(over, False), over, infos


def crowd(count: int) -> Crowd:
    """Make the environment of `env.id: benchmarks.runs.scale_team:crowd`."""
    return Crowd(count)


def team_config(policies: int) -> RunConfig:
    agents = [f"agent_{k}" for k in range(policies)]
    return parse_config(
        RunConfig,
        {
            "name": f"team-{policies}",
            "env": {"id": "benchmarks.runs.scale_team:crowd", "kwargs": {"count": policies}},
            "algorithm": "ippo",
            "team": {f"policy_{agent}": {"agents": [agent]} for agent in agents},
            "train": {"total_steps": 10**9, "env_copies": COPIES, "horizon": HORIZON},
            "hyper": {"epochs": 2, "minibatches": 2},
            "evaluation": {"every": 0},
        },
    )


def team_times(policies: int) -> dict[str, float]:
    """Return the milliseconds of CPU for each policy.

    They are of an iteration and its parts, and of a checkpoint with its bundle.
    """
    with process_group():
        began = time.process_time()
        run = build_run(team_config(policies), torch.device("cpu"))
        built = time.process_time() - began
        iterations, parts = [], []
        for _ in range(WARM_UP + ITERATIONS):
            began = time.process_time()
            row = run.step()
            iterations.append(time.process_time() - began)
            parts.append({key: value * iterations[-1] for key, value in row.items() if key.startswith("time/")})
        saves, sizes = [], []
        for _ in range(CHECKPOINTS):
            with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
                began = time.process_time()
                run.save(local_stored_folder(Path(folder)))
                run.saver.wait()
                saves.append(time.process_time() - began)
                sizes.append(sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()))
        run.close()
    warm_parts = parts[WARM_UP:]
    shares = {key.removeprefix("time/"): statistics.median(part[key] for part in warm_parts) for key in warm_parts[0]}
    times = {
        "build": built,
        "iteration": statistics.median(iterations[WARM_UP:]),
        "checkpoint": statistics.median(saves),
    }
    return {name: 1000 * seconds / policies for name, seconds in (times | shares).items()} | {
        "bytes": statistics.median(sizes) / policies
    }
