"""Arms of the gateway that fail on some inputs or on all, for the tests of failures."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from gymnasium import spaces

from marl_ray.config import GatewayConfig, NetworkConfig, parse_config
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.bundles.actor_critic import PolicyParts, save_bundle
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.routing.breaker import CircuitState
from toy_serving.gateways import LINEAGE, last_layer

SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
GOOD, FAILING = [0.5, 0.5, 0.5], [1.0, -1.0, 0.0]
"""Observations: a fragile policy acts on the first, and makes NaN of the second."""
CLOSED, OPEN, _ = CircuitState


def bundle(folder: Path, action: int, fragile: bool, run: str = "r", broken: bool = False, units: int = 8) -> str:
    """Write the bundle of a policy that takes one action, with so many hidden units.

    A fragile one makes NaN of all observations but constant ones, a broken one of all. Arms of other sizes
    share no pass.
    """
    torch.manual_seed(action)
    network = NetworkConfig(hidden=(units,), activation="relu")
    policy = ActorCritic(SPACE, spaces.Discrete(6), network)
    with torch.no_grad():
        last_layer(policy).bias[action] = np.nan if broken else 30.0
        if fragile:  # its input is normalized: hidden units are infinite or zero, and their sum has both signs
            first = policy.actor.first.linear
            assert isinstance(first, torch.nn.Linear)
            first.weight.copy_(torch.tensor([3e38, 0.0, 0.0]).expand(units, 3))
            last_layer(policy).weight.copy_(torch.tensor([1.0, -1.0] * (units // 2)).expand(6, units))
    parts = PolicyParts(network, SPACE, spaces.Discrete(6), policy.actor.state_dict())
    lineage = LINEAGE.model_copy(update={"run": run})
    return str(save_bundle(folder, {"agent": "p"}, {"p": parts}, lineage))


def config_of_arms(folder: Path, arms: dict[str, str], **more: Any) -> GatewayConfig:
    experiment = {"name": "exp", "arms": {arm: {"bundle": path} for arm, path in arms.items()}, "min_outcomes": 5}
    where = {"database": f"sqlite:///{folder}/experiments.db", "spool": f"{folder}/spool"}
    return parse_config(GatewayConfig, {"experiments": [experiment | more]} | where)


async def ask(
    client: httpx.AsyncClient, session: str, observation: list[float] = GOOD, mode: str = "sample"
) -> httpx.Response:
    body = {"session_id": session, "observations": {"agent": observation}, "mode": mode}
    return await client.post("/v1/act", json=body)


def errors_of(app: Gateway) -> dict[str, float]:
    """Session -> its `error`, of those that are stored."""
    app.service.unit_reports.write()
    return dict(app.service.stores.units.metric_values("exp", "error"))


def circuits(app: Gateway) -> dict[str, CircuitState]:
    return {arm: circuit.state for arm, circuit in app.service.endpoints.routers["exp"].circuits.items()}
