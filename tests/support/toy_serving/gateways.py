"""Small bundles and a gateway in this process, for the tests of serving."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import torch
import yaml
from gymnasium import spaces
from stores.migrated import migrate

from marl_ray.config import GatewayConfig, NetworkConfig, parse_config
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.bundles.actor_critic import PolicyParts, save_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.serving.asgi import Gateway

OBSERVATION = spaces.MultiDiscrete([3, 4, 5])
ACTIONS = spaces.Discrete(6)
LINEAGE = Lineage(
    run="r",
    algorithm={"p": "ippo"},
    config_hash="c",
    code_version="v",
    seed=0,
    env={},
    steps=1,
    metrics={"return": 0.5},
)
AGENTS = ("agent_0", "agent_1")
SEES = {"agent_0": [0, 1, 2], "agent_1": [2, 3, 4]}


def last_layer(policy: ActorCritic) -> torch.nn.Linear:
    """The layer that computes the logits of the actions."""
    layer = policy.actor.rest[-1]
    assert isinstance(layer, torch.nn.Linear)
    return layer


def make_bundle(
    folder: Path,
    action: int,
    observation: spaces.Space[Any] = OBSERVATION,
    agents: Iterable[str] = AGENTS,
    actions: spaces.Space[Any] = ACTIONS,
    bias: float = 30.0,
    lineage: Lineage = LINEAGE,
) -> str:
    """A small random policy that all but certainly takes one action.

    With a NaN for `bias` every pass fails.
    """
    torch.manual_seed(action)
    policy = ActorCritic(observation, actions, NetworkConfig(hidden=(8,)))
    with torch.no_grad():
        last_layer(policy).bias[action] = bias
    parts = PolicyParts(NetworkConfig(hidden=(8,)), observation, actions, policy.actor.state_dict())
    return str(save_bundle(folder, dict.fromkeys(agents, "p"), {"p": parts}, lineage))


def gateway_config(
    bundles: dict[str, str],
    database: Path,
    weights: tuple[float, ...] = (1.0, 1.0),
    names: tuple[str, ...] = ("exp",),
    **more: Any,
) -> GatewayConfig:
    arms = {arm: {"bundle": bundles[arm], "weight": w} for arm, w in zip(("one", "four"), weights, strict=True)}
    experiments = [{"name": name, "arms": arms, "min_outcomes": 5} for name in names]
    where = {"database": f"sqlite:///{database}", "spool": str(database.parent / "spool")}
    return parse_config(GatewayConfig, {"experiments": experiments} | where | more)


def write_keys(path: Path, **scopes: tuple[str, ...]) -> str:
    """A file of keys, whose secrets are their names."""
    keys = [{"name": k, "sha256": hashlib.sha256(k.encode()).hexdigest(), "scopes": v} for k, v in scopes.items()]
    path.write_text(yaml.safe_dump({"keys": [key | {"scopes": list(key["scopes"])} for key in keys]}))
    return str(path)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def windows_end(*apps: Gateway) -> None:
    """The outcome windows of all units so far are over, by the clock of the gateways' stores."""
    for app in apps:
        app.service.exposures.flush()
    now = max((app.service.stores.database.clock or time.time)() for app in apps) + 1_000.0
    for app in apps:
        app.service.stores.database.clock = lambda: now


@asynccontextmanager
async def serving(config: GatewayConfig) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway]]:
    migrate(config.database)
    app = Gateway(config, seed=0)
    app.service.start()
    transport = httpx.ASGITransport(cast(Any, app), raise_app_exceptions=True)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client, app
    finally:
        app.service.close()


def with_gateway(config: GatewayConfig, body: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with serving(config) as (client, _):
            return await body(client)

    return asyncio.run(run())


async def act(client: httpx.AsyncClient, session: str, **more: Any) -> dict[str, Any]:
    answer = await client.post("/v1/act", json={"session_id": session, "observations": SEES} | more)
    assert answer.status_code == 200, answer.text
    answered: dict[str, Any] = answer.json()
    return answered


def keyed_config(
    folder: Path, arms: dict[str, str], gateway: dict[str, Any] | None = None, **more: Any
) -> GatewayConfig:
    """A gateway with the keys `ops` and `game`, and one experiment of these arms (name -> bundle)."""
    experiment = {"name": "exp", "arms": {arm: {"bundle": bundle} for arm, bundle in arms.items()}, "min_outcomes": 5}
    keys = write_keys(folder / "keys.yaml", ops=("admin", "inference", "outcomes"), game=("inference", "outcomes"))
    where = {"database": f"sqlite:///{folder}/experiments.db", "spool": f"{folder}/spool", "api_keys": keys}
    return parse_config(GatewayConfig, {"experiments": [experiment | more]} | where | (gateway or {}))


async def acts_of(client: httpx.AsyncClient, names: list[str], **more: Any) -> list[dict[str, Any]]:
    """The answers of an act for each session."""
    answers = [await client.post("/v1/act", json={"session_id": n, "observations": SEES} | more) for n in names]
    assert {answer.status_code for answer in answers} == {200}, [a.text for a in answers if a.status_code != 200]
    return [answer.json() for answer in answers]
