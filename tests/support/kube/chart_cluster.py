"""The chart on kubox, a small Kubernetes whose pods are processes of this machine.

The source of kubox is in tests/support/kubox.
"""

import base64
import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from servers.installed import need
from waiting import until

from kube.charts import chart, helm_python
from kube.kubox import URL, kubox

READY_S = 240.0
"""Deadline of the services and of the chart's test, in seconds."""
NOBODY = pwd.getpwnam("nobody").pw_uid

# What the chart leaves to the image of PostgreSQL, by its documentation: a first start makes the database with the
# superuser's password, runs the scripts that are mounted, and every start runs the server with the given arguments.
POSTGRES = """
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --username=postgres --pwfile=/dev/fd/3 $POSTGRES_INITDB_ARGS 3<<END
$POSTGRES_PASSWORD
END
    printf 'host all all all scram-sha-256\\n' >>"$PGDATA/pg_hba.conf"
    pg_ctl -w start -o "-c listen_addresses='' -k /var/run/postgresql"
    for script in /docker-entrypoint-initdb.d/*.sh; do PGHOST=/var/run/postgresql . "$script"; done
    pg_ctl -w stop -m fast
fi
exec "$@" -k /var/run/postgresql
"""


@dataclass(frozen=True)
class ChartCluster:
    """A Kubernetes without KubeRay, for the chart's own services."""

    folder: Path

    def apply(self, values: dict[str, Any]) -> None:
        """Do as `helm install` and `helm upgrade`, with `lookup` answered by this cluster, without the tests."""
        for template, documents in self._rendered(values):
            if "/tests/" not in template:
                for document in documents:
                    self._send(document)

    def chart_test(self, values: dict[str, Any]) -> str:
        """Run what `helm test` runs, and return its log. AssertionError if it fails."""
        ((pod,),) = (documents for template, documents in self._rendered(values) if "/tests/" in template)
        path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
        httpx.delete(URL + path, params={"gracePeriodSeconds": 0})
        until(lambda: httpx.get(URL + path).status_code == 404, "the last test's pod to be gone", READY_S)
        self._send(pod)
        done = ("Succeeded", "Failed")
        until(lambda: httpx.get(URL + path).json()["status"].get("phase") in done, "the chart's test", READY_S)
        log = httpx.get(f"{URL}{path}/log").text
        assert httpx.get(URL + path).json()["status"]["phase"] == "Succeeded", log
        return log

    def pods(self) -> dict[str, dict[str, Any]]:
        """The pods of the chart's services, by component."""
        items = httpx.get(f"{URL}/api/v1/namespaces/default/pods", timeout=60).json()["items"]
        return {
            pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod
            for pod in items
            if pod["metadata"].get("ownerReferences") and "deletionTimestamp" not in pod["metadata"]
        }

    def wait_until_new_and_ready(self, before: dict[str, dict[str, Any]], components: set[str]) -> dict[str, Any]:
        """Wait for one ready pod of each component, none of which was there before."""

        def ready() -> bool:
            now = self.pods()
            return now.keys() == components and all(
                all(status["ready"] for status in pod["status"].get("containerStatuses", [{"ready": False}]))
                and pod["metadata"]["uid"] != before.get(name, pod | {"metadata": {"uid": ""}})["metadata"]["uid"]
                for name, pod in now.items()
            )

        until(ready, "the chart's services", READY_S, self.logs)
        return self.pods()

    def secret(self, name: str) -> dict[str, str]:
        data = httpx.get(f"{URL}/api/v1/namespaces/default/secrets/{name}").json()["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def logs(self) -> str:
        """The ends of all containers' logs, for a test that has failed."""
        ends = [f"{path}:\n{path.read_text()[-1500:]}" for path in sorted((self.folder / "pods").glob("*/log/*"))]
        return "\n".join([(self.folder / "kubox.log").read_text()[-2000:], *ends])

    def _rendered(self, values: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
        server = {"clusters": [{"name": "k", "cluster": {"server": URL}}], "users": [{"name": "k", "user": {}}]}
        context = {"contexts": [{"name": "k", "context": {"cluster": "k", "user": "k"}}], "current-context": "k"}
        kubeconfig = json.dumps({"apiVersion": "v1", "kind": "Config"} | server | context)
        with helm_python.Config(kubeconfig_content=kubeconfig, namespace="default") as config:
            rendered = config.render(chart(), values, name="demo", namespace="default")
        return [
            (template, [document for document in yaml.safe_load_all(text) if document])
            for template, text in sorted(rendered.items())
            if template.endswith(".yaml") and text.strip()
        ]

    def _send(self, document: dict[str, Any]) -> None:
        version = document["apiVersion"]
        group = f"{URL}/api/v1" if version == "v1" else f"{URL}/apis/{version}"
        resources = httpx.get(group).json()["resources"]
        resource = next(r for r in resources if r["kind"] == document["kind"] and "/" not in r["name"])
        where = "/namespaces/default" if resource["namespaced"] else ""
        done = httpx.patch(
            f"{group}{where}/{resource['name']}/{document['metadata']['name']}",
            params={"fieldManager": "helm", "force": "true", "fieldValidation": "Strict"},
            headers={"content-type": "application/apply-patch+yaml"},
            content=json.dumps(document),
        )
        assert done.is_success, done.text


@contextlib.contextmanager
def chart_cluster() -> Iterator[ChartCluster]:
    """An empty cluster, for as long as the block lasts; skips where this machine cannot run it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("kubox makes network namespaces: it needs Linux and root")
    need("PostgreSQL", "Redis")
    # Not below /tmp, which every pod has to itself.
    folder = Path(tempfile.mkdtemp(prefix="marl-ray-kubox-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        with _python(folder), _running(folder):
            yield ChartCluster(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[None]:
    (folder / "postgres.sh").write_text(POSTGRES)
    image = {"entrypoint": ["sh", str(folder / "postgres.sh"), "postgres"], "command": [], "env": {}}
    (folder / "images.json").write_text(json.dumps({"docker.io/library/postgres:": image}))
    options: list[str | Path] = ["-images", folder / "images.json", "-users", "-path", f"{folder / 'bin'}:{_path()}"]
    with kubox(folder, *options, crds=False):
        yield


@contextlib.contextmanager
def _python(folder: Path) -> Iterator[None]:
    """This environment's Python and MLflow at a place that a pod's own /tmp does not hide."""
    environment, programs = folder / "python", folder / "bin"
    environment.mkdir()
    programs.mkdir()
    for name, module in {"python": "", "mlflow": " -m mlflow"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {environment}/bin/python{module} "$@"\n')
        (programs / name).chmod(0o755)
    subprocess.run(["mount", "--bind", os.path.realpath(sys.prefix), environment], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", environment], check=True)


def _path() -> str:
    servers = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")))
    return ":".join([*servers[-1:], "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"])
