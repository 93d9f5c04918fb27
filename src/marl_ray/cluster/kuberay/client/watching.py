"""Follows one resource through expired watches, lost connections and restarts of the server."""

import json
import time
from collections.abc import Iterator
from http import HTTPStatus

from marl_ray.cluster.kuberay.client.connection import Connection, RequestRefusedError
from marl_ray.cluster.kuberay.client.resources import RAY_API_VERSION, list_all, path_of, read
from marl_ray.cluster.kuberay.state.phases import ResourceState
from marl_ray.cluster.kuberay.state.resource import resource_state
from marl_ray.cluster.kuberay.state.view import Object, ResourceKind, View, owned_by, view_of

MIN_VIEW_S, MAX_VIEW_S = 0.2, 5
"""Minimum and maximum seconds between two views: a resource may change many times a second, and its pods without it."""
EXPIRED_STATUS = HTTPStatus.GONE
"""Status of a version that the server has forgotten."""
UNWATCHED_S = 1.0
"""Maximum seconds before a server that cannot watch is asked again."""


def view_now(connection: Connection, kind: ResourceKind, name: str) -> View:
    """Return the resource, its clusters, their pods and its warnings as they are now."""
    resource = read(connection, kind, name)
    if resource is None:
        return View(kind, name, None)
    objects: list[Object] = [{"kind": kind, **resource}]
    clusters: list[Object] = []
    if kind in ("RayJob", "RayService"):
        clusters = [*list_all(connection, "RayCluster", labels=owned_by(kind, name))]
    names = [name] if kind == "RayCluster" else [item["metadata"]["name"] for item in clusters]
    if names:
        objects += list_all(connection, "Pod", "v1", labels=f"ray.io/cluster in ({','.join(names)})")
    if kind == "RayJob":
        objects += list_all(connection, "Pod", "v1", labels=f"job-name={name}")
    new_clusters = [item["metadata"]["name"] for item in clusters if not (item.get("status") or {}).get("state")]
    for involved_kind, involved_name in [(kind, name), *(("RayCluster", cluster) for cluster in new_clusters)]:
        fields = f"involvedObject.kind={involved_kind},involvedObject.name={involved_name}"
        objects += list_all(connection, "Event", "v1", fields=fields)
    return view_of(kind, name, [*objects, *clusters])


def follow(connection: Connection, kind: ResourceKind, name: str, deadline: float) -> Iterator[ResourceState]:
    """Yield the resource's state, now and after each change, until `deadline` (of `time.monotonic`).

    Every state is of a fresh view, so nothing is missed while a watch was away. Raises MarlRayError if the API stays out of
    reach.
    """
    while True:
        began = time.monotonic()
        view = view_now(connection, kind, name)
        yield resource_state(view, time.time())
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return
        version = view.resource["metadata"]["resourceVersion"] if view.resource is not None else "0"
        _until_changed(connection, kind, name, version, min(MAX_VIEW_S, remaining_s))
        time.sleep(max(0.0, min(MIN_VIEW_S - (time.monotonic() - began), deadline - time.monotonic())))


def _until_changed(connection: Connection, kind: str, name: str, version: str, seconds: float) -> None:
    """Wait for the next change after `version`, for `seconds` at most.

    An expired version (410) or a broken connection ends it early: whoever follows reads again in any case.
    """
    end = time.monotonic() + seconds
    query: dict[str, str | int | bool] = {
        "watch": True,
        "fieldSelector": f"metadata.name={name}",
        "resourceVersion": version,
        "timeoutSeconds": max(1, int(seconds)),
    }
    try:
        for line in connection.lines(path_of(connection, RAY_API_VERSION, kind), query, seconds + 1):
            event = json.loads(line)
            if event.get("type") == "ERROR":
                break
            if event["object"]["metadata"]["resourceVersion"] != version:
                return
    except RequestRefusedError as error:
        if error.status != EXPIRED_STATUS:
            raise
    except (ValueError, LookupError, TypeError):
        pass  # half a line of a connection that broke
    time.sleep(max(0.0, min(UNWATCHED_S, end - time.monotonic())))
