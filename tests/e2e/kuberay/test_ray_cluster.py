"""RayClusters on a real cluster: what the server refuses, coming up, scaling, and leaving nothing."""

import pytest
from kuberay_cluster import RUN_S, WORKER, until

from marl_ray.cluster.kuberay.client.connection import RequestRefusedError
from marl_ray.cluster.kuberay.client.resources import apply
from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.cluster.kuberay.state.phases import Phase

SCALE = """
import ray, time
ray.init()
@ray.remote(resources={"rollout": 1}, num_cpus=0)
def play():
    time.sleep(20)
    return ray.get_runtime_context().get_node_id()
print("nodes:", len(set(ray.get([play.remote() for _ in range(2)], timeout=600))))
"""


def test_the_server_refuses_what_the_schemas_forbid(site):
    [manifest, *others] = render(site.config(site.name("refused")))
    unknown = {**manifest, "spec": {**manifest["spec"], "rayVersoin": "2.60.0"}}
    with pytest.raises(RequestRefusedError, match="rayVersoin"):
        apply(site.connection, unknown, dry_run=True)
    wrong = {**manifest, "spec": {**manifest["spec"], "managedBy": "nobody"}}
    with pytest.raises(RequestRefusedError, match="managedBy"):
        apply(site.connection, wrong, dry_run=True)
    for part in (manifest, *others):
        apply(site.connection, part, dry_run=True)


@pytest.mark.parametrize(
    "more",
    [
        {"job": {"entrypoint": "x"}},
        {"job": {"entrypoint": "x", "schedule": "0 3 * * *", "time_zone": "Europe/Rome"}},
        {"job": {"entrypoint": "x"}, "queue": "team"},
        {"service": {"serve": {"applications": []}, "api_keys_secret": "keys"}},
        {"groups": {"rollouts": {"replicas": [0, 8], "spot": True, "gpus": 1, "resources": {"rollout": 1}}}},
    ],
    ids=["RayJob", "RayCronJob", "RayJob in a queue", "RayService", "RayCluster that scales"],
)
def test_the_server_takes_what_is_rendered(site, more):
    for manifest in render(site.config(site.name("taken"), **more)):
        apply(site.connection, manifest, dry_run=True)


def test_a_cluster_comes_up_and_leaves_nothing(site):
    config = site.config(site.name("cluster"))
    site.apply(config)
    assert site.wait("RayCluster", config.name, Phase.READY).phase is Phase.READY
    assert len(site.pods(config.name)) == 2 and len(site.pods(config.name, node_type="head")) == 1
    assert {line.split()[0] for line in site.remaining(config.name)} >= {
        "Pod",
        "Service",
        "RayCluster",
        "NetworkPolicy",
    }
    site.delete("RayCluster", config.name)


def test_a_group_scales_out_for_work_and_in_after_it(site):
    name = site.name("scales")
    # Beside the autoscaler and the submitter, of half a CPU each, two workers must have room on two CPUs.
    group = {**WORKER, "cpus": 0.25, "replicas": [0, 2], "resources": {"rollout": 1}, "idle_timeout_s": 20}
    files = site.apply_files(name, scale_py=SCALE)
    job = {"entrypoint": "python /etc/marl-ray/scale.py", "retries": 0, "keep_s": 900}
    site.apply(site.config(name, groups={"rollouts": group}, job=job, files=files))
    until(lambda: len(site.pods(name, group="rollouts")) == 2, RUN_S, "the second worker", lambda: site.log(name))
    assert site.wait("RayJob", name, Phase.SUCCEEDED, timeout_s=RUN_S).phase is Phase.SUCCEEDED
    until(lambda: not site.pods(name, group="rollouts"), RUN_S, "the end of idle workers")
    assert site.pods(name, node_type="head"), "the cluster has ended, not its idle workers"
    site.delete("RayJob", name)
