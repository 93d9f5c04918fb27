"""Exported decisions as Parquet files; a module of its own so that other processes can import it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from toy_runs.runs import config

from marl_ray.config import NetworkConfig, RunConfig
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle, PolicyParts, save_bundle
from marl_ray.policies.bundles.loading import load_actor_critics
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.single_process import train_alone

NUMBERS, FLAGS = pa.list_(pa.float64()), pa.list_(pa.bool_())
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("experiment", "unit", "arm", "digest")),
        ("epoch", pa.int64()),
        ("propensity", pa.float64()),
        ("agent", pa.string()),
        *((name, pa.int64()) for name in ("group", "episode", "turn")),
        ("greedy", pa.bool_()),
        ("exposed_at", pa.float64()),
        ("outcome", pa.float64()),
        ("outcome_at", pa.float64()),
        ("observations", pa.list_(NUMBERS)),
        ("actions", pa.list_(NUMBERS)),
        ("log_probs", NUMBERS),
        ("action_masks", pa.list_(FLAGS)),
        ("rewards", NUMBERS),
        ("costs", pa.list_(NUMBERS)),
        ("mask", FLAGS),
        ("terminated", FLAGS),
        ("truncated", FLAGS),
    ]
)


def sequence(
    unit: int,
    agent: str,
    outcome: float,
    observations: Sequence[Sequence[float]],
    actions: Iterable[Any],
    log_probs: Iterable[float],
    **other: Any,
) -> dict[str, Any]:
    """One row; `other` replaces columns."""
    steps = len(observations)
    last = [False] * (steps - 1) + [True]
    row = {
        "experiment": "e",
        "unit": f"u{unit:06d}",
        "arm": "a",
        "digest": "d",
        "epoch": 0,
        "propensity": 1.0,
        "agent": agent,
        "group": unit,
        "episode": unit,
        "turn": 0,
        "greedy": False,
        "exposed_at": 0.0,
        "outcome": outcome,
        "outcome_at": 1.0,
        "observations": [list(map(float, row)) for row in observations],
        "actions": [np.asarray(action, float).reshape(-1).tolist() for action in actions],
        "log_probs": list(map(float, log_probs)),
        "action_masks": None,
        "rewards": [0.0] * (steps - 1) + [outcome],
        "costs": [[] for _ in range(steps)],
        "mask": [True] * steps,
        "terminated": last,
        "truncated": [False] * steps,
    }
    return row | other


def write(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema = SCHEMA) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows), schema), path)
    return str(path)


def toy_bundle(
    folder: Path, seed: int, observation: Any, action: Any, agents: Sequence[str], scale: float = 1.0
) -> ActorCriticBundle:
    """A random policy for all agents; a greater `scale` makes it less even."""
    torch.manual_seed(seed)
    network = NetworkConfig(hidden=(8,), normalize=False)
    model = ActorCritic(observation, action, network)
    with torch.no_grad():
        last = model.actor.rest[-1]
        assert isinstance(last, torch.nn.Linear)
        last.weight.normal_(0, scale)
        last.bias.normal_(0, scale)
    parts = PolicyParts(network, observation, action, model.actor.state_dict())
    names = ("run", "config_hash", "code_version")
    lineage = Lineage(**dict.fromkeys(names, "x"), algorithm={"p": "ippo"}, seed=seed, env={}, steps=1, metrics={})
    return load_actor_critics(save_bundle(folder, dict.fromkeys(agents, "p"), {"p": parts}, lineage))


LENGTH, AGENTS = 6, ("x", "y")


def log_countdown(path: Path, skill: float, units: int, seed: int = 0) -> str:
    """Episodes of toys.envs.Countdown by a policy that plays its bit with chance `skill`.

    The outcome is the mean return.
    """
    random = np.random.default_rng(seed)
    rows = []
    for unit in range(units):
        bits = random.integers(2, size=(len(AGENTS), LENGTH))
        right = random.random((len(AGENTS), LENGTH)) < skill
        for agent, seen, hits in zip(AGENTS, bits, right, strict=True):
            chances = np.log(np.where(hits, skill, 1 - skill))
            observations = [(LENGTH - t, bit) for t, bit in enumerate(seen)]
            actions = np.where(hits, seen, 1 - seen)
            rows.append(sequence(unit, agent, float(right.sum()) / len(AGENTS), observations, actions, chances))
    return write(path, rows)


def warm(data: str, *overrides: str) -> RunConfig:
    """A run on the logged toy."""
    env = f"env={{id: 'toys.envs:countdown', kwargs: {{agents: [{', '.join(AGENTS)}], length: {LENGTH}}}}}"
    size = ["train.env_copies=32", "train.horizon=12", "train.total_steps=384"]
    start = f"warm_start={{data: '{data}', epochs: 8, lr: 0.02, batch: 256}}"
    return config(env, *size, start, *overrides)


def of_two_warm(folder: str, data: str, overrides: list[str]) -> list[Metrics]:
    """Train as one of two workers and return the rows of metrics."""
    return train_alone(warm(data, "resources.workers=2", *overrides), Path(folder))
