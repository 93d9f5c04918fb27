"""A gateway as a RayService on a real cluster: it comes up, acts, survives its head, and is upgraded under load."""

import json

import pytest
from kuberay_cluster import RUN_S, START_S, Site, until
from test_ray_job import submitted

from marl_ray.cluster.kuberay.client.resources import delete
from marl_ray.cluster.kuberay.state.phases import Phase

ACT = """
import json, time, urllib.request
url, end, failed, done = "http://{service}-serve-svc:8000/v1/act", time.time() + {seconds}, 0, 0
while time.time() < end:
    body = {{"session_id": f"s{{done}}", "observations": {{"agent": [0.0, 0.0, 0.0, 0.0]}}}}
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), {{"content-type": "application/json"}})
        answer = json.load(urllib.request.urlopen(request, timeout=10))
        assert answer["actions"]["agent"] in (0, 1), answer
        done += 1
    except OSError as error:
        failed += 1
        print("failed:", error, flush=True)
        time.sleep(0.2)
    time.sleep(0.02)
print(json.dumps({{"done": done, "failed": failed}}))
raise SystemExit(0 if done else 1)
"""


@pytest.fixture(scope="module")
def gateway(site: Site, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object]]:
    """A trained policy served on a RayService; its name and config."""
    folder, run = site.storage_path(), site.name("bundle")
    status, text = submitted(site, tmp_path_factory.mktemp("run"), run, resources={"workers": 1})
    assert status == 0, text
    [line] = [line for line in text.splitlines() if line.strip().startswith("bundle ")]
    bundle = line.split()[-1]
    name = site.name("gateway")
    args = {
        "experiments": [{"name": "cartpole", "arms": {"ppo": {"bundle": bundle}}}],
        "database": f"sqlite:///{folder}/{name}.db",
        "spool": "/var/run/marl-ray/spool",
        "cpus_per_replica": 0.5,
        "replicas": 1,
    }
    application = {"name": "gateway", "route_prefix": "/", "import_path": "marl_ray.serving.app:build", "args": args}
    serve = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "applications": [application],
    }
    config = {"service": {"serve": serve, "delete_old_after_s": 30}}
    site.apply(site.config(name, **config))
    assert site.wait("RayService", name, Phase.READY).phase is Phase.READY
    return name, config


def act(site: Site, name: str, seconds: float) -> dict[str, int]:
    succeeded, text = site.run_inside(ACT.format(service=name, seconds=seconds), seconds + START_S)
    assert succeeded, text
    counts: dict[str, int] = json.loads(text.strip().splitlines()[-1])
    return counts


def test_a_gateway_comes_up_and_acts(site: Site, gateway: tuple[str, dict[str, object]]) -> None:
    counts = act(site, gateway[0], 5)
    assert counts["done"] > 10 and counts["failed"] == 0


def test_an_upgrade_under_load_fails_no_request(site: Site, gateway: tuple[str, dict[str, object]]) -> None:
    name, config = gateway
    before = {pod["metadata"]["name"] for pod in site.pods(name)}
    client = site.start_inside(ACT.format(service=name, seconds=240))
    site.apply(site.config(name, env={"E2E_GENERATION": "2"}, **config))
    until(lambda: {pod["metadata"]["name"] for pod in site.pods(name)} - before, START_S, "the new cluster")
    assert site.wait("RayService", name, Phase.READY).phase is Phase.READY
    succeeded, text = site.end_inside(client, RUN_S)
    counts = json.loads(text.strip().splitlines()[-1])
    assert succeeded and counts["failed"] == 0, text[-2000:]


def test_a_lost_head_is_replaced_and_the_gateway_acts_again(site: Site, gateway: tuple[str, dict[str, object]]) -> None:
    name, _ = gateway
    [head] = site.pods(name, node_type="head")
    delete(site.connection, "Pod", head["metadata"]["name"], "v1")
    until(
        lambda: [
            pod for pod in site.pods(name, node_type="head") if pod["metadata"]["name"] != head["metadata"]["name"]
        ],
        START_S,
        "another head",
    )
    assert site.wait("RayService", name, Phase.READY).phase is Phase.READY
    until(lambda: act(site, name, 5)["done"] > 10, RUN_S, "an act after the head was lost")
