"""A small Kubernetes for tests (tests/support/kubox), and a player that writes recorded stories onto it."""

import contextlib
import fcntl
import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from servers.installed import need
from waiting import until

from kube.stories import FOLDER, events
from marl_ray.cluster.kuberay.client.connection import Connection, RequestRefusedError
from marl_ray.cluster.kuberay.client.resources import delete, path_of

URL = "http://10.244.0.1:18080"
START_S, STOP_S, OTHERS_S = 60.0, 30.0, 280.0
"""Deadlines of the start, of the end, and of the wait for another test's cluster, in seconds."""
PACKED = Path(__file__).parents[1] / "kubox" / "kubox.xz"
PLAYED = ("RayCluster", "RayCronJob", "RayJob", "RayService", "Pod", "Event")
RAY = {"RayCluster", "RayCronJob", "RayJob", "RayService"}


@contextlib.contextmanager
def kubox(folder: Path, *options: str | Path, crds: bool = True) -> Iterator[Connection]:
    """Start a cluster for as long as the block lasts, with KubeRay's CRDs.

    `options` are further ones of the program. A machine has one such cluster at a time. `folder` holds its files and a
    log. Skips where this machine cannot run it.
    """
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("kubox makes network namespaces: it needs Linux and root")
    need("iproute2")
    with (Path(tempfile.gettempdir()) / "kubox.lock").open("w") as lock:
        until(lambda: _lock(lock.fileno()) and not _ready(), "the end of another kubox on this machine", OTHERS_S)
        yield from _run(folder, options, crds)


def _run(folder: Path, options: tuple[str | Path, ...], crds: bool) -> Iterator[Connection]:
    binary, definitions = folder / "kubox", folder / "crds"
    with lzma.open(PACKED) as packed, binary.open("wb") as file:
        shutil.copyfileobj(packed, file)
    binary.chmod(0o755)
    definitions.mkdir()
    for path in (FOLDER / "crds").glob("*.gz") if crds else ():
        (definitions / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    command = [binary, "-crds", definitions, "-root", folder / "pods", *options]
    with (folder / "kubox.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: process.poll() is not None or _ready(), "kubox", START_S)
        assert process.poll() is None, (folder / "kubox.log").read_text()[-2000:]
        yield Connection(client.ApiClient(client.Configuration(host=URL)), "default")
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _ready() -> bool:
    try:
        return bool(urllib.request.urlopen(f"{URL}/readyz", timeout=2).status == 200)
    except OSError:
        return False


def make_trouble(query: str) -> None:
    """Have the server forget (`compact`) or fail (`fail?status=503&times=3&path=rayjobs`; status 0 drops connections)."""
    urllib.request.urlopen(urllib.request.Request(f"{URL}/kubox/{query}", method="POST"), timeout=5).read()


def kubeconfig(folder: Path) -> Path:
    """A kubeconfig of the cluster, as the command line reads it."""
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kubox", "cluster": {"server": URL}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "kubox", "context": {"cluster": "kubox", "user": "nobody"}}],
        "current-context": "kubox",
    }
    path.write_text(json.dumps(config))
    return path


def play(connection: Connection, story: str, pause_s: float = 0.0) -> None:
    """Write a story's objects, event by event, without their owners: nothing but the player changes them."""
    known: set[tuple[str, str]] = set()
    for event in events(story):
        kind, name = event.object["kind"], event.object["metadata"]["name"]
        if kind not in PLAYED:
            continue
        if event.type == "DELETED":
            delete(connection, kind, name, "ray.io/v1" if kind in RAY else "v1")
            known.discard((kind, name))
            continue
        body = _trim(event.object)
        path = path_of(connection, body["apiVersion"], kind)
        if (kind, name) not in known:
            known.add((kind, name))
            with contextlib.suppress(RequestRefusedError):  # an event of a name that was there before
                connection.request("POST", path, body=body)
        if kind != "Event":
            _put(connection, f"{path}/{name}", {"spec": body["spec"]} if kind in RAY else {})
            _put(connection, f"{path}/{name}", {"status": event.object.get("status") or {}}, "/status")
        time.sleep(pause_s)


def _put(connection: Connection, path: str, parts: dict[str, Any], under: str = "") -> None:
    """Replace parts of an object, or of what lies under it."""
    if parts:
        connection.request("PUT", path + under, body=connection.request("GET", path) | parts)


def _trim(recorded: dict[str, Any]) -> dict[str, Any]:
    metadata_keys = ("name", "labels", "annotations")
    metadata = {key: recorded["metadata"][key] for key in metadata_keys if key in recorded["metadata"]}
    if recorded["kind"] == "Event":
        about = {key: recorded["regarding"][key] for key in ("apiVersion", "kind", "name", "namespace")}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": metadata,
            "involvedObject": about,
            "type": recorded["type"],
            "reason": recorded["reason"],
            "message": recorded["note"],
        }
    spec = recorded["spec"]
    if recorded["kind"] == "Pod":  # which nobody is to run
        node_name = {key: spec[key] for key in ("nodeName",) if key in spec}
        names = [
            {"name": container["name"], "image": "none", "resources": container.get("resources", {})}
            for container in spec["containers"]
        ]
        spec = node_name | {"nodeSelector": {"recorded": "only"}, "containers": names}
    api_version = "ray.io/v1" if recorded["kind"] in RAY else "v1"
    return {"apiVersion": api_version, "kind": recorded["kind"], "metadata": metadata, "spec": spec}
