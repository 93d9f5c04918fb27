"""A gateway as a RayService on a real cluster.

It comes up, acts, survives its head, is upgraded under load, and goes.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from kuberay_cluster import END_S, RUN_S, START_S, WORKER, Site, until

from marl_ray.cluster.kuberay.client.resources import delete
from marl_ray.cluster.kuberay.state.phases import Phase

WITHOUT_HEAD_S = 90.0
"""Longer than a worker continues without the head that it knew: whoever answers then belongs to the new one."""
LOAD = """
import http.client, json, time, urllib.request
url, done, failed, row, told = "http://{service}-serve-svc:8000/v1/act", 0, 0, 0, 0
while True:
    body = {{"session_id": f"s{{done}}", "observations": {{"agent": [0.0, 0.0, 0.0, 0.0]}}}}
    request = urllib.request.Request(url, json.dumps(body).encode(), {{"content-type": "application/json"}})
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        assert answer["actions"]["agent"] in (0, 1), answer
        done, row = done + 1, row + 1
    except (OSError, http.client.HTTPException, ValueError) as error:
        failed, row = failed + 1, 0
        print("failed:", error, getattr(error, "fp", None) and error.read()[:500])
    if time.time() > told + 1:
        told = time.time()
        print(json.dumps({{"done": done, "failed": failed, "row": row}}))
    time.sleep(0.1)
"""


class Counts(NamedTuple):
    """The answers that a client has met so far."""

    done: int
    failed: int
    row: int
    """Answers since the last failure."""


class Load:
    """A client in the cluster that acts all the time."""

    def __init__(self, site: Site, service: str):
        self.site, self.name = site, site.start_inside(LOAD.format(service=service))

    def counts(self) -> Counts:
        answers = [line for line in self.site.log_inside(self.name).splitlines() if line.startswith('{"done"')]
        return Counts(**json.loads(answers[-1])) if answers else Counts(0, 0, 0)

    def goes_on(self, answers: int, timeout_s: float) -> Counts:
        """Wait for as many more answers without a failure between them; the counts then."""
        done = self.counts().done
        until(
            lambda: (now := self.counts()).done >= done + answers <= done + now.row,
            timeout_s,
            f"{answers} answers in a row",
            lambda: self.site.log_inside(self.name)[-2000:],
        )
        return self.counts()


@contextmanager
def load(site: Site, service: str) -> Iterator[Load]:
    client = Load(site, service)
    try:
        yield client
    finally:
        site.stop_inside(client.name)


Gateway = tuple[str, dict[str, Any]]
"""Name of a RayService and keys of its config."""


@pytest.fixture(scope="module")
def gateway(lasting_site: Site, tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    """A trained policy served on a RayService."""
    site, shared = lasting_site, lasting_site.shared()
    run, name = site.name("bundle"), site.name("gateway")
    status, text = site.submit(tmp_path_factory.mktemp("run"), site.run(run))
    assert status == 0, text
    site.delete("RayJob", run)
    bundle = next(line.split()[-1] for line in text.splitlines() if line.strip().startswith("bundle "))
    args = {
        "experiments": [{"name": "cartpole", "arms": {"ppo": {"bundle": bundle}}}],
        # SQLite needs a file; without a shared folder each pod has one of its own.
        "database": f"sqlite:////tmp/{name}.db" if "://" in shared else f"sqlite:///{shared}/{name}.db",
        "spool": "/var/lib/marl-ray/spool",
        "cpus_per_replica": 0.5,
        "replicas": 1,
        "request_timeout_s": 50,  # a small machine is slow while a second cluster comes up
    }
    application = {"name": "gateway", "route_prefix": "/", "import_path": "marl_ray.serving.app:build", "args": args}
    serve = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000, "request_timeout_s": 55},
        "applications": [application],
    }
    config = {
        "service": {"serve": serve, "delete_old_after_s": 60},
        "groups": {"gateway": {**WORKER, "replicas": 1}},
    }
    site.apply(site.config(name, **config))
    assert site.wait("RayService", name, Phase.READY).phase is Phase.READY
    return name, config


def test_a_gateway_comes_up_and_acts(lasting_site, gateway):
    with load(lasting_site, gateway[0]) as client:
        assert client.goes_on(20, START_S).failed == 0


def test_an_upgrade_under_load_fails_no_request(lasting_site, gateway):
    site, (name, config) = lasting_site, gateway
    before = {pod["metadata"]["name"] for pod in site.pods(name)}

    def now() -> set[str]:
        return {pod["metadata"]["name"] for pod in site.pods(name)}

    with load(site, name) as client:
        client.goes_on(20, START_S)
        site.apply(site.config(name, env={"E2E_GENERATION": "2"}, **config))
        until(lambda: now() - before, START_S, "the new cluster")
        assert site.wait("RayService", name, Phase.READY).phase is Phase.READY
        until(lambda: now() and not now() & before, RUN_S, "the end of the old cluster")
        counts = client.goes_on(20, START_S)
        assert counts.failed == 0, site.log_inside(client.name)[-2000:]


def test_a_lost_head_is_replaced_and_the_gateway_acts_again(lasting_site, gateway):
    site, (name, _) = lasting_site, gateway
    [head] = site.pods(name, node_type="head")

    def another() -> bool:
        heads = [pod for pod in site.pods(name, node_type="head") if pod["metadata"]["uid"] != head["metadata"]["uid"]]
        conditions = [condition for pod in heads for condition in pod.get("status", {}).get("conditions", ())]
        return any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)

    with load(site, name) as client:
        client.goes_on(20, START_S)
        assert delete(site.connection, "Pod", head["metadata"]["name"], "v1")
        until(another, START_S, "another head that is ready")
        time.sleep(WITHOUT_HEAD_S)
        assert site.wait("RayService", name, Phase.READY).phase is Phase.READY
        client.goes_on(50, RUN_S)


def test_a_gateway_that_is_deleted_leaves_nothing(lasting_site, gateway):
    lasting_site.delete("RayService", gateway[0])
    until(lambda: not lasting_site.remaining(gateway[0]), END_S, "the end of the gateway")
