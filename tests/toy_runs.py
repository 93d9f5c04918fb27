"""Training in this process, without Ray; a module of its own so that spawned workers can import it."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from marl_ray.config import SPECS, RunConfig, parse_config
from marl_ray.training.alone import train_alone


def config(*overrides: str) -> RunConfig:
    base = {
        "name": "toy",
        "env": {"id": "toy_envs:countdown"},
        "train": {"total_steps": 192, "env_copies": 4, "horizon": 8},
        "checkpoint": {"every": 2},
        "hyper": {"lr": 0.01, "epochs": 2, "minibatches": 2},
    }
    return parse_config(RunConfig, base, overrides)


def one_of_two(rank: int, port: int, folder: str, algorithms: list[str], out: Any) -> None:
    """One of two workers that train with every algorithm; worker 0 sends the rows of metrics by algorithm."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rows = {
        name: train_alone(short(name, BRIEF, FEW, "resources.workers=2"), Path(folder, name)) for name in algorithms
    }
    if rank == 0:
        out.put(rows)
    dist.destroy_process_group()


def short(algorithm: str, *overrides: str) -> RunConfig:
    """Four iterations of the toy, with everything that the algorithm needs."""
    whole = ["train.group_size=2", "return_high=6"] if SPECS[algorithm].episodes else []
    needed = [item if "." in item else f"hyper.{item}" for item in whole]
    needed += ["constraints=[{budget: 4}]"] if SPECS[algorithm].costs else []
    return config(f"algorithm={algorithm}", "train.total_steps=96", *needed, *overrides)


BRIEF = "train.total_steps=64"
"""Two iterations of the toy."""
FEW = "evaluation.episodes=4"
"""Evaluations so small that rounding, by which weights differ between one worker and two, changes no sampled action."""
TWO_POLICIES = "team={first: {agents: [a]}, second: {agents: [b]}}"
"""One policy per agent of the toy."""
