"""The chart's own services as processes in namespaces.

They come up from the rendered manifests, and an upgrade keeps what they have stored. Helm's engine renders, with
`lookup` answered by the cluster.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from kube.chart_cluster import NOBODY, ChartCluster, chart_cluster
from stores.units import config, exposure

from marl_ray.experiments.store.facade import Stores, open_stores

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
SERVICES = {"mlflow", "postgresql", "redis"}
SECRETS = ("database", "mlflow-database", "postgresql", "redis")
HOST = {"host": "demo-marl-ray-mlflow:5000"}
AS_NOBODY = {"runAsUser": NOBODY, "runAsGroup": NOBODY, "fsGroup": NOBODY}
# The tests' own Python may lie where only root can read.
AS_ROOT = {"runAsUser": 0, "runAsGroup": 0, "fsGroup": 0}
VALUES: dict[str, Any] = {
    "image": {"repository": "marl-ray", "tag": "0.1.0"},
    "mlflow": {"securityContext": AS_ROOT, "workers": 1},
    "postgresql": {"securityContext": AS_NOBODY},
    "redis": {"securityContext": AS_NOBODY},
}
CHANGED = VALUES | {
    "image": {"repository": "elsewhere/marl-ray", "tag": "0.2.0"},
    "postgresql": {"securityContext": AS_NOBODY, "maxConnections": 50, "claim": {"size": "30Gi"}},
    "redis": {"securityContext": AS_NOBODY, "resources": {"memory": "2Gi"}, "claim": {"size": "6Gi"}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ChartCluster]:
    with chart_cluster() as made:
        yield made


def test_services_come_up_answer_and_keep_their_data_over_an_upgrade(cluster):
    cluster.apply(VALUES)
    first = cluster.wait_until_new_and_ready({}, SERVICES)
    secrets = {name: cluster.secret(f"demo-marl-ray-{name}") for name in SECRETS}
    expected = [
        "http://demo-marl-ray-mlflow:5000/health 200",
        "PostgreSQL ('marl_ray',) TLS True",
        "Redis +PONG",
    ]
    assert cluster.chart_test(VALUES).splitlines() == expected

    mlflow = f"http://{first['mlflow']['status']['podIP']}:5000"
    created = httpx.post(f"{mlflow}/api/2.0/mlflow/experiments/create", json={"name": "kept"}, headers=HOST, timeout=60)
    assert created.status_code == 200, created.text
    artifact = "/api/2.0/mlflow-artifacts/artifacts/kept.txt"
    assert httpx.put(mlflow + artifact, content=b"weights", headers=HOST, timeout=60).status_code == 200
    # A page of another name, which a person's browser was led to, must not read it.
    assert httpx.get(f"{mlflow}/api/2.0/mlflow/experiments/get", headers={"host": "evil.example"}).status_code == 403
    stores = experiment_store(first, secrets)
    stores.experiments.open("exp", config(a=1, b=1))
    stores.units.record_exposures([exposure("unit", "a")])
    stores.close()
    heads(first, secrets).set("ray", "state")

    cluster.apply(CHANGED)
    second = cluster.wait_until_new_and_ready(first, SERVICES)
    assert {name: cluster.secret(f"demo-marl-ray-{name}") for name in SECRETS} == secrets
    assert cluster.chart_test(CHANGED).splitlines() == expected
    mlflow = f"http://{second['mlflow']['status']['podIP']}:5000"
    params = {"experiment_name": "kept"}
    response = httpx.get(f"{mlflow}/api/2.0/mlflow/experiments/get-by-name", params=params, headers=HOST, timeout=60)
    assert response.json()["experiment"]["experiment_id"] == created.json()["experiment_id"]
    assert httpx.get(mlflow + artifact, headers=HOST, timeout=60).content == b"weights"
    stores = experiment_store(second, secrets)
    assert stores.evidence.arrivals("exp", 0.0) == {"a": 1}
    stores.close()
    assert heads(second, secrets).get("ray") == b"state"


def experiment_store(pods: dict[str, Any], secrets: dict[str, dict[str, str]]) -> Stores:
    """The gateways' store, with what their Secret says but the pod's address, as names are known to pods alone."""
    login, address = secrets["database"], pods["postgresql"]["status"]["podIP"]
    where = f"{login['username']}:{login['password']}@{address}:{login['port']}/{login['database']}"
    return open_stores(f"postgresql://{where}?sslmode=require")


def heads(pods: dict[str, Any], secrets: dict[str, dict[str, str]]) -> redis.Redis:
    return redis.Redis(pods["redis"]["status"]["podIP"], password=secrets["redis"]["password"])
