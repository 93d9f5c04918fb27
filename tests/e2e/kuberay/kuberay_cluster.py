"""Parts that the tests on a real cluster share: its settings, small clusters, and clients that run inside of it.

They need a cluster with KubeRay's operator, a kubeconfig in KUBECONFIG, and of this repository the package alone. They
neither run commands in pods nor forward ports: whoever talks to a service is a Job in the cluster. Pods ask for at most two
CPUs and 11 GiB together; Ray counts 0.4 of a CPU as one.

MARL_RAY_E2E_IMAGE      an image that has marl-ray and runs as user 1000
MARL_RAY_E2E_NAMESPACE  where all of it happens; the context's own where not given
MARL_RAY_E2E_STORAGE    what pods share: a URL that they may write (s3://bucket/e2e), or a folder of every machine that
                        user 1000 may write. A folder is mounted as a hostPath, which the namespace must allow.
"""

import io
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from marl_ray.cluster.kuberay.client.connection import Connection, RequestRefusedError
from marl_ray.cluster.kuberay.client.logs import log_lines, submitter_of
from marl_ray.cluster.kuberay.client.resources import apply, delete, list_all, path_of
from marl_ray.cluster.kuberay.client.waiting import wait
from marl_ray.cluster.kuberay.deletion import delete_all
from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import ResourceKind
from marl_ray.cluster.kuberay.submission import follow, submit
from marl_ray.cluster.listeners import JobListener
from marl_ray.config import parse_config
from marl_ray.config.cluster import ClusterConfig

START_S, RUN_S, END_S = 900.0, 900.0, 300.0
"""Longest time for a cluster to come up, for a small job to run, and for something to be gone."""
SHARED = "/var/lib/marl-ray/runs"
"""Path at which pods see a shared folder."""
WORKER: dict[str, Any] = {"cpus": 0.4, "memory": "2Gi"}
HEAD: dict[str, Any] = {"cpus": 0.4, "memory": "3Gi"}
RUN = {
    "algorithm": "ppo",
    "env": {"id": "gymnasium.CartPole-v1"},
    "train": {"total_steps": 4096, "env_copies": 8, "horizon": 64},
    "resources": {"workers": 1},
}
"""A run of half a minute."""
LEFT = (
    ("Pod", "v1"),
    ("Service", "v1"),
    ("Secret", "v1"),
    ("ServiceAccount", "v1"),
    ("Role", "rbac.authorization.k8s.io/v1"),
    ("RoleBinding", "rbac.authorization.k8s.io/v1"),
    ("Job", "batch/v1"),
    ("RayCluster", "ray.io/v1"),
    ("NetworkPolicy", "networking.k8s.io/v1"),
    ("PodDisruptionBudget", "policy/v1"),
)
"""Kinds that a resource of KubeRay brings with it."""


@dataclass
class Site:
    """A namespace of the cluster and what the tests have made there."""

    connection: Connection
    image: str
    storage: str | None
    resources: list[tuple[ResourceKind, str]] = field(default_factory=list)
    objects: list[tuple[str, str, str]] = field(default_factory=list)
    """Kind, name and API version of what no resource of KubeRay owns."""

    def name(self, kind: str) -> str:
        return f"e2e-{kind}-{secrets.token_hex(2)}"

    def config(self, name: str, **more: Any) -> ClusterConfig:
        """A small cluster: a head and one worker."""
        base: dict[str, Any] = {
            "name": name,
            "image": self.image,
            "head": HEAD,
            "groups": {"workers": {**WORKER, "replicas": 1}},
            "volumes": [{"host": self.storage, "path": SHARED}] if self.storage and "://" not in self.storage else [],
            "drain_s": 20,
        }
        return parse_config(ClusterConfig, base | more)

    def shared(self) -> str:
        """The place that pods share: a folder or a URL; a skip where there is neither."""
        if self.storage is None:
            pytest.skip(
                "MARL_RAY_E2E_STORAGE is not set: expected a folder of every machine, or a URL, that pods share"
            )
        return self.storage.rstrip("/") if "://" in self.storage else SHARED

    def run(self, name: str, **more: Any) -> dict[str, Any]:
        """The config of a run under this name that keeps what it makes where all pods see it."""
        config = RUN | {"name": name, "storage": f"{self.shared()}/{name}"} | more
        # MLflow's file cannot lie under a URL.
        return config | ({"tracking": {"uri": "sqlite:////tmp/mlflow.db"}} if "://" in self.shared() else {})

    def apply(self, config: ClusterConfig) -> ResourceKind:
        """Apply all manifests; the kind of the resource."""
        manifests = render(config)
        kind: ResourceKind = manifests[0]["kind"]
        self.resources.append((kind, config.name))
        for manifest in manifests:
            apply(self.connection, manifest, force=True)
        return kind

    def apply_files(self, name: str, **files: str) -> str:
        """Apply a ConfigMap with these files (`run_py="..."` is run.py); its name."""
        data = {key.replace("_", "."): text for key, text in files.items()}
        self._apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-files"}, "data": data})
        return f"{name}-files"

    def submit(self, tmp_path: Path, config: dict[str, Any]) -> tuple[int, str]:
        """Submit a run as a user does, on as many pods as it has workers.

        The result is its exit status, and its log with a line for each state.
        """
        name, path, texts = config["name"], tmp_path / "run.yaml", io.StringIO()
        path.write_text(json.dumps(config))
        learners = {**WORKER, "replicas": config["resources"]["workers"]}
        cluster = self.config(name, groups={"learners": learners}, job={"entrypoint": "-", "retries": 0})
        self.resources.append(("RayJob", name))
        listener = JobListener(texts.write, lambda line: texts.write(f"{line}\n"))
        assert submit(self.connection, "train", path, (), cluster, name)
        status = follow(self.connection, cluster, name, listener, timeout_s=START_S + RUN_S)
        return status, texts.getvalue()

    def wait(self, kind: ResourceKind, name: str, *goals: Phase, timeout_s: float = START_S) -> ResourceState:
        """The state at the end of the wait; the states on the way are printed."""
        return wait(self.connection, kind, name, goals, timeout_s, lambda state: print(f"{name}: {state}", flush=True))

    def pods(self, cluster: str, **labels: str) -> list[dict[str, Any]]:
        """Pods of a rendered cluster that do not end, chosen by KubeRay's labels (`node_type="head"`)."""
        selector = [
            f"marl-ray/cluster={cluster}",
            *(f"ray.io/{key.replace('_', '-')}={value}" for key, value in labels.items()),
        ]
        pods = list_all(self.connection, "Pod", "v1", labels=",".join(selector))
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]

    def log(self, job: str) -> str:
        """The prints of a RayJob's entrypoint so far, in its newest try."""
        submitter = submitter_of(self.connection, job)
        return "\n".join(log_lines(self.connection, *submitter, follow=False)) if submitter else ""

    def start_inside(self, script: str) -> str:
        """Start Python in a Job of the cluster, which may reach services; its name."""
        name = self.name("client")
        security = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        amounts = {"cpu": "100m", "memory": "128Mi"}
        pod = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "client",
                    "image": self.image,
                    "command": ["python", "-u", "-c", script],
                    "securityContext": security,
                    "resources": {"requests": amounts, "limits": amounts},
                }
            ],
        }
        template = {"metadata": {"labels": {"marl-ray/client": "true"}}, "spec": pod}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
        self._apply(job | {"spec": {"backoffLimit": 0, "template": template}})
        return name

    def log_inside(self, name: str) -> str:
        """The prints of such a Job so far."""
        pods = list_all(self.connection, "Pod", "v1", labels=f"job-name={name}")
        if not pods:
            return ""
        path = path_of(self.connection, "v1", "Pod", pods[0]["metadata"]["name"])
        try:
            return b"\n".join(self.connection.lines(f"{path}/log", {}, 30)).decode("utf-8", "replace")
        except RequestRefusedError as error:
            if error.status != 400:  # it has not begun
                raise
            return ""

    def stop_inside(self, name: str) -> None:
        delete(self.connection, "Job", name, "batch/v1")

    def delete(self, kind: ResourceKind, name: str) -> None:
        """Delete a resource as a user does, and see that nothing of it is left."""
        delete_all(self.connection, kind, name, END_S, lambda state: print(f"{name}: {state}", flush=True))
        until(
            lambda: not self.remaining(name),
            END_S,
            f"the end of all that belongs to {name}",
            lambda: str(self.remaining(name)),
        )

    def remaining(self, name: str) -> list[str]:
        """Return the existing objects of a resource.

        Its clusters' Services, Secrets and accounts carry no label of it, but all names that are made for it begin
        with its own.
        """
        names = (
            (kind, item["metadata"]["name"])
            for kind, version in LEFT
            for item in list_all(self.connection, kind, version)
        )
        return sorted(
            f"{kind} {object_name}"
            for kind, object_name in names
            if object_name == name or object_name.startswith(f"{name}-")
        )

    def clean_up(self) -> None:
        """Delete what the tests have made, whatever came of them; all of it is tried before a failure is told."""
        failures: list[str] = []
        for kind, name, version in self.objects:
            _try(failures, delete, self.connection, kind, name, version)
        for resource in self.resources:
            _try(failures, delete_all, self.connection, *resource, END_S, lambda state: None)
        assert not failures, failures

    def _apply(self, manifest: dict[str, Any]) -> None:
        self.objects.append((manifest["kind"], manifest["metadata"]["name"], manifest["apiVersion"]))
        apply(self.connection, manifest, force=True)


def _try(failures: list[str], call: Callable[..., object], *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception as error:
        failures.append(str(error))


def until(look: Callable[[], Any], timeout_s: float, what: str, more: Callable[[], str] = str) -> Any:
    """The first true result of `look`, asked once a second. AssertionError at the deadline, with what `more` says."""
    end = time.monotonic() + timeout_s
    while not (result := look()):
        assert time.monotonic() < end, f"{what} is not there after {timeout_s:g} s {more()}".strip()
        time.sleep(1.0)
    return result


def settings() -> tuple[str, str | None, str | None]:
    """Image, namespace and storage from the environment; skips without a cluster or an image."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set: these tests need a cluster with KubeRay's operator")
    image = os.environ.get("MARL_RAY_E2E_IMAGE")
    if not image:
        pytest.skip("MARL_RAY_E2E_IMAGE is not set: expected an image that has marl-ray")
    return image, os.environ.get("MARL_RAY_E2E_NAMESPACE") or None, os.environ.get("MARL_RAY_E2E_STORAGE") or None
