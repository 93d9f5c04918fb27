"""The end of a resource of KubeRay, with the policies that a short config renders beside it."""

import time
from collections.abc import Callable

from marl_ray.cluster.kuberay.client.connection import Connection
from marl_ray.cluster.kuberay.client.resources import delete, list_all
from marl_ray.cluster.kuberay.client.waiting import DeadlinePassed, wait
from marl_ray.cluster.kuberay.manifests.pods import LABEL
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import ResourceKind

POLICIES = (("NetworkPolicy", "networking.k8s.io/v1"), ("PodDisruptionBudget", "policy/v1"))
"""Kinds that nothing owns, with the versions of their APIs."""
PAUSE_S = 0.5


def delete_all(
    connection: Connection,
    kind: ResourceKind,
    name: str,
    timeout_s: float,
    say: Callable[[ResourceState], None],
) -> bool:
    """Delete a resource, wait until it and its pods are gone, and delete its policies; False if there is nothing of it.

    With `timeout_s` 0 it does not wait. Raises DeadlinePassed where pods are left; their policies stay with them then.
    """
    end = time.monotonic() + timeout_s
    existed = delete(connection, kind, name)
    if existed and timeout_s:
        wait(connection, kind, name, (Phase.GONE,), timeout_s, say)
    labels = f"{LABEL}={name}"
    while timeout_s and (pods := list_all(connection, "Pod", "v1", labels)):
        if time.monotonic() > end:
            names = ", ".join(pod["metadata"]["name"] for pod in pods)
            raise DeadlinePassed(f"{kind} {name} is gone, and after {timeout_s:g} s there are pods of it: {names}")
        time.sleep(PAUSE_S)
    for policy, version in POLICIES:
        for item in list_all(connection, policy, version, labels):
            existed = delete(connection, policy, item["metadata"]["name"], version) or existed
    return existed
