"""Deletes a resource of KubeRay, with the policies and files that were made beside it."""

import time
from collections.abc import Callable

from marl_ray.cluster.kuberay.client.connection import Connection
from marl_ray.cluster.kuberay.client.resources import delete, list_all
from marl_ray.cluster.kuberay.client.waiting import WaitTimeoutError, wait
from marl_ray.cluster.kuberay.manifests.pods import CLUSTER_LABEL
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import ResourceKind, owned_by

POLICY_KINDS = (("NetworkPolicy", "networking.k8s.io/v1"), ("PodDisruptionBudget", "policy/v1"))
"""Kinds of the policies beside a resource, with the versions of their APIs."""
UNOWNED_KINDS = (*POLICY_KINDS, ("ConfigMap", "v1"))
"""Kinds that nothing owns. Files, a ConfigMap, have no owner where Redis is cleaned up with them."""
POLL_S = 0.5
"""Seconds between two looks at what is left of a resource."""


def delete_all(
    connection: Connection,
    kind: ResourceKind,
    name: str,
    timeout_s: float,
    say: Callable[[ResourceState], object],
) -> bool:
    """Delete a resource, wait until it, its clusters and their pods are gone, and delete what is beside them.

    Returns False if there is nothing of it. With `timeout_s` 0 it does not wait, and leaves files that pods may still
    need. Raises WaitTimeoutError where clusters or pods are left; what is beside them stays with them then.
    """
    end = time.monotonic() + timeout_s
    existed = delete(connection, kind, name)
    if existed and timeout_s:
        wait(connection, kind, name, (Phase.GONE,), timeout_s, say)
    while timeout_s and (remaining := _remaining(connection, kind, name)):
        if time.monotonic() > end:
            raise WaitTimeoutError(
                f"{kind} {name} is gone, and after {timeout_s:g} s there is left of it: {', '.join(remaining)}"
            )
        time.sleep(POLL_S)
    kinds_beside = UNOWNED_KINDS if timeout_s else POLICY_KINDS
    for other_kind, api_version in kinds_beside:
        for item in list_all(connection, other_kind, api_version, f"{CLUSTER_LABEL}={name}"):
            existed = delete(connection, other_kind, item["metadata"]["name"], api_version) or existed
    return existed


def _remaining(connection: Connection, kind: ResourceKind, name: str) -> list[str]:
    """Return what a deleted object has left, by kind and name.

    That is its pods, and its clusters that end and outlive them until Redis has forgotten their heads.
    """
    remaining = list_all(connection, "Pod", "v1", f"{CLUSTER_LABEL}={name}")
    if kind in ("RayJob", "RayService"):
        clusters = list_all(connection, "RayCluster", labels=owned_by(kind, name))
        remaining += [cluster for cluster in clusters if cluster["metadata"].get("deletionTimestamp")]
    return [f"{item['kind']} {item['metadata']['name']}" for item in remaining]
