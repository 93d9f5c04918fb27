"""What the tests on a real cluster share: its settings, small clusters, and clients that run inside of it.

They need a cluster with KubeRay's operator, a kubeconfig in KUBECONFIG, and of this repository the package alone. They
neither run commands in pods nor forward ports: whoever talks to a service is a Job in the cluster.
"""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from marl_ray.cluster.kuberay.client.connection import Connection
from marl_ray.cluster.kuberay.client.resources import apply, delete, list_all, read
from marl_ray.cluster.kuberay.client.waiting import wait
from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import ResourceKind
from marl_ray.config import parse_config
from marl_ray.config.cluster import ClusterConfig

START_S, RUN_S, END_S = 900.0, 900.0, 180.0
"""Longest time for a cluster to come up, for a small job to run, and for something to be gone."""
LABEL = "marl-ray/cluster"


@dataclass
class Site:
    """A namespace of the cluster and what the tests have made there."""

    connection: Connection
    image: str
    storage: str | None
    made: list[tuple[ResourceKind, str]] = field(default_factory=list)

    def name(self, kind: str) -> str:
        return f"e2e-{kind}-{secrets.token_hex(2)}"

    def config(self, name: str, **more: Any) -> ClusterConfig:
        """A small cluster: a head and one worker."""
        node = {"cpus": 1, "memory": "3Gi"}
        base: dict[str, Any] = {
            "name": name,
            "image": self.image,
            "head": node,
            "groups": {"workers": {**node, "replicas": 1}},
            "drain_s": 20,
        }
        return parse_config(ClusterConfig, base | more)

    def apply(self, config: ClusterConfig) -> ResourceKind:
        """Apply all manifests; the kind of the resource."""
        manifests = render(config)
        kind: ResourceKind = manifests[0]["kind"]
        self.made.append((kind, config.name))
        for manifest in manifests:
            apply(self.connection, manifest, force=True)
        return kind

    def wait(self, kind: ResourceKind, name: str, *goals: Phase, timeout_s: float = START_S) -> ResourceState:
        """The state at the end of the wait; the states on the way are printed."""
        return wait(self.connection, kind, name, goals, timeout_s, lambda state: print(f"{name}: {state}", flush=True))

    def storage_path(self) -> str:
        """A folder that all pods share, or a skip."""
        if self.storage is None or "://" in self.storage:
            pytest.skip("MARL_RAY_E2E_STORAGE: expected a path that pods share")
        return self.storage.rstrip("/")

    def pods(self, cluster: str, **labels: str) -> list[dict[str, Any]]:
        """Pods of a rendered cluster that do not end, chosen by KubeRay's labels (`node_type="head"`)."""
        selector = [f"{LABEL}={cluster}", *(f"ray.io/{key.replace('_', '-')}={value}" for key, value in labels.items())]
        pods = list_all(self.connection, "Pod", "v1", labels=",".join(selector))
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]

    def run_inside(self, script: str, timeout_s: float) -> tuple[bool, str]:
        """Run Python in a Job of the cluster, which may reach services; whether it succeeded, and its output."""
        name = self.start_inside(script)
        return self.end_inside(name, timeout_s)

    def start_inside(self, script: str) -> str:
        """Start Python in a Job of the cluster; its name."""
        name = self.name("client")
        container = {"name": "client", "image": self.image, "command": ["python", "-c", script]}
        pod = {"restartPolicy": "Never", "containers": [container]}
        template = {"metadata": {"labels": {"marl-ray/client": "true"}}, "spec": pod}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
        apply(self.connection, job | {"spec": {"backoffLimit": 0, "template": template}})
        return name

    def end_inside(self, name: str, timeout_s: float) -> tuple[bool, str]:
        """Wait for such a Job; whether it succeeded, and its output."""

        def over() -> dict[str, Any] | None:
            job = read(self.connection, "Job", name, "batch/v1") or {}
            status = job.get("status") or {}
            return status if status.get("succeeded") or status.get("failed") else None

        status = until(over, timeout_s, f"the Job {name}")
        [pod] = list_all(self.connection, "Pod", "v1", labels=f"job-name={name}")
        path = f"/api/v1/namespaces/{self.connection.namespace}/pods/{pod['metadata']['name']}/log"
        text = b"\n".join(self.connection.lines(path, {}, 30)).decode("utf-8", "replace")
        delete(self.connection, "Job", name, "batch/v1")
        return bool(status.get("succeeded")), text

    def clean_up(self) -> None:
        """Delete what the tests have made."""
        for kind, name in self.made:
            delete(self.connection, kind, name)
            delete(self.connection, "NetworkPolicy", name, "networking.k8s.io/v1")
            delete(self.connection, "ConfigMap", f"{name}-files", "v1")


def until(look: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true result of `look`, asked once a second."""
    end = time.monotonic() + timeout_s
    while not (result := look()):
        assert time.monotonic() < end, f"{what} is not there after {timeout_s:g} s"
        time.sleep(1.0)
    return result


def settings() -> tuple[str, str | None, str | None]:
    """Image, namespace and storage from the environment; skips without a cluster or an image."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set: these tests need a cluster with KubeRay's operator")
    image = os.environ.get("MARL_RAY_E2E_IMAGE")
    if not image:
        pytest.skip("MARL_RAY_E2E_IMAGE is not set: expected an image that has marl-ray")
    return image, os.environ.get("MARL_RAY_E2E_NAMESPACE"), os.environ.get("MARL_RAY_E2E_STORAGE")
