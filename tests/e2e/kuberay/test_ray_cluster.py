"""RayClusters on a real cluster: what the server refuses, coming up, scaling, and leaving nothing."""

import pytest
from kuberay_cluster import END_S, RUN_S, Site, until

from marl_ray.cluster.kuberay.client.connection import RequestRefused
from marl_ray.cluster.kuberay.client.resources import apply, delete, list_all
from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.cluster.kuberay.state.phases import Phase

LEFT = (
    ("RayCluster", "ray.io/v1"),
    ("Pod", "v1"),
    ("NetworkPolicy", "networking.k8s.io/v1"),
    ("PodDisruptionBudget", "policy/v1"),
)
SCALE = """
import ray, time
ray.init()
@ray.remote(resources={"rollout": 1}, num_cpus=0)
def play():
    time.sleep(20)
    return ray.get_runtime_context().get_node_id()
print("nodes:", len(set(ray.get([play.remote() for _ in range(2)], timeout=600))))
"""


def test_the_server_refuses_what_the_schemas_forbid(site: Site) -> None:
    [manifest, *_] = render(site.config(site.name("refused")))
    unknown = {**manifest, "spec": {**manifest["spec"], "rayVersoin": "2.60.0"}}
    with pytest.raises(RequestRefused, match="rayVersoin"):
        apply(site.connection, unknown, dry_run=True)
    wrong = {**manifest, "spec": {**manifest["spec"], "managedBy": "nobody"}}
    with pytest.raises(RequestRefused, match="managedBy"):
        apply(site.connection, wrong, dry_run=True)
    apply(site.connection, manifest, dry_run=True)


def test_a_cluster_comes_up_and_leaves_nothing(site: Site) -> None:
    config = site.config(site.name("cluster"))
    site.apply(config)
    assert site.wait("RayCluster", config.name, Phase.READY).phase is Phase.READY
    assert len(site.pods(config.name)) == 2
    delete(site.connection, "RayCluster", config.name)
    assert site.wait("RayCluster", config.name, Phase.GONE, timeout_s=END_S).phase is Phase.GONE
    delete(site.connection, "NetworkPolicy", config.name, "networking.k8s.io/v1")

    def gone() -> bool:
        selector = f"marl-ray/cluster={config.name}"
        return not any(list_all(site.connection, kind, version, labels=selector) for kind, version in LEFT)

    until(gone, END_S, "the end of every pod and policy")


def test_a_group_scales_out_for_work_and_in_after_it(site: Site) -> None:
    name = site.name("scales")
    group = {"cpus": 1, "memory": "2Gi", "replicas": [0, 2], "resources": {"rollout": 1}, "idle_timeout_s": 20}
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-files"},
        "data": {"scale.py": SCALE},
    }
    apply(site.connection, files)
    job = {"entrypoint": "python /etc/marl-ray/files/scale.py", "keep_s": 600}
    site.apply(site.config(name, groups={"rollouts": group}, job=job, files=f"{name}-files"))
    until(lambda: len(site.pods(name, group="rollouts")) == 2, RUN_S, "the second worker")
    assert site.wait("RayJob", name, Phase.SUCCEEDED, timeout_s=RUN_S).phase is Phase.SUCCEEDED
    until(lambda: not site.pods(name, group="rollouts"), RUN_S, "the end of idle workers")
