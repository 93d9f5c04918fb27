"""The gateway under a load that grows and ends: Serve adds a replica, takes it away, and no request fails meanwhile."""

import json
import re
import subprocess

import httpx
import pytest
import ray
from ray import serve
from servers.installed import need
from toy_serving.gateways import SEES, make_bundle
from toy_serving.undeploying import undeploy
from waiting import until

from marl_ray.cluster.local_ray import free_port
from marl_ray.serving.administration.deploy import deploy

pytestmark = [
    pytest.mark.shared_ray("two"),
    pytest.mark.slow,
]
LOAD_S = 40
LULL_S = 30.0
"""Seconds for which a replica must be too many: more than Ray's metrics take to arrive."""
SCRIPT = """
local thread, number = 0, 0
function setup(t) t:set("id", thread) thread = thread + 1 end
request = function()
  number = number + 1
  local body = string.format('{"session_id": "%d-%d", "observations": OBSERVATIONS}', id, number)
  return wrk.format("POST", nil, {["content-type"] = "application/json"}, body)
end
"""


def count_running() -> int:
    """Replicas of the gateway that take requests."""
    states = serve.status().applications["scaled"].deployments["Gateway"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def count_acts() -> dict[str, float]:
    """Replica -> acts that it answered with 200, as Prometheus scrapes them from the machine's metrics agent."""
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=60).text
    counts: dict[str, float] = {}
    for labels, value in re.findall(r"^ray_marl_ray_gateway_requests_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if (named["endpoint"], named["status"], named["application"]) == ("/v1/act", "200", "scaled"):
            counts[named["replica"]] = counts.get(named["replica"], 0.0) + float(value)
    return counts


def test_a_replica_comes_under_load_and_goes_after_it_and_no_request_fails(ray_cluster, tmp_path):
    need("wrk")
    arms = {name: {"bundle": make_bundle(tmp_path, number)} for number, name in enumerate(("zero", "one"))}
    args = {
        "experiments": [{"name": "exp", "arms": arms}],
        "database": f"sqlite:///{tmp_path}/x.db",
        "spool": str(tmp_path / "spool"),
        "replicas": [1, 2],
        "cpus_per_replica": 0.1,
    }
    quick: dict[str, float] = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 8}
    quick |= {"upscale_delay_s": 1, "downscale_delay_s": LULL_S, "metrics_interval_s": 1, "look_back_period_s": 3}
    application = {
        "name": "scaled",
        "route_prefix": "/",
        "import_path": "marl_ray.serving.app:build",
        "args": args,
        "deployments": [{"name": "Gateway", "autoscaling_config": quick}],
    }
    with httpx.Client() as client:
        config = {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": free_port()}}
        url = deploy(config | {"applications": [application]}, ray_cluster.dashboard_url).urls["scaled"]
        try:
            body = client.get(f"{url}/ready", timeout=60).json()
            assert body["ready"] and body["arms"] == {"exp": {"zero": "loaded", "one": "loaded"}}
            assert count_running() == 1
            script = tmp_path / "act.lua"
            script.write_text(SCRIPT.replace("OBSERVATIONS", json.dumps(SEES)))
            command = ["wrk", "-t1", "-c32", f"-d{LOAD_S}", "--timeout", "10", "-s", str(script), f"{url}/v1/act"]
            load = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            until(lambda: count_running() == 2, "the second replica", LOAD_S, look_s=0.5)
            out = load.communicate(timeout=LOAD_S + 30)[0]
            assert "Non-2xx" not in out and "Socket errors" not in out, out
            sent_match = re.search(r"(\d+) requests in", out)
            assert sent_match is not None, out
            sent = int(sent_match[1])
            # Both replicas answered, and each one's own count is scraped, all the time: what wrk has sent is their sum.
            until(
                lambda: len(acts := count_acts()) == 2 and sum(acts.values()) >= sent,
                f"{sent} acts of two replicas in the metrics",
                60,
                count_acts,
                look_s=0.5,
            )
            acts = count_acts()
            assert min(acts.values()) > 0 and sum(acts.values()) <= sent + 32  # those under way at the end
            until(lambda: count_running() == 1, "the end of the second replica", LULL_S + 60, look_s=0.5)
            assert client.get(f"{url}/ready", timeout=60).status_code == 200
        finally:
            undeploy(ray_cluster.dashboard_url)
