"""The log of a RayJob's entrypoint, which its submitter repeats: each line once, through lost connections."""

import re
import time
from collections.abc import Iterator

from marl_ray.cluster.kuberay.client.connection import Connection, RequestRefusedError
from marl_ray.cluster.kuberay.client.resources import list_all, path_of, read
from marl_ray.cluster.kuberay.state.view import SUBMITTER_CONTAINER, Object
from marl_ray.json_types import JsonObject

SILENT_S = 60.0
"""A log that says nothing for as long is asked for again: a connection may be dead without a word."""
POLL_S = 1.0
"""Seconds between two requests for a log whose container has not ended."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


def submitter_of(connection: Connection, name: str) -> tuple[str, str] | None:
    """Return the newest pod and the container that submits a RayJob.

    It is None where there is none yet, or none at all (`HTTPMode`).
    """
    pods = list_all(connection, "Pod", "v1", labels=f"job-name={name}")
    job = read(connection, "RayJob", name) or {}
    cluster = (job.get("status") or {}).get("rayClusterName")
    if not pods and cluster and (job["spec"].get("submissionMode") == "SidecarMode"):
        pods = list_all(connection, "Pod", "v1", labels=f"ray.io/cluster={cluster},ray.io/node-type=head")
    candidates = [pod for pod in pods if _container(pod, SUBMITTER_CONTAINER)]
    newest = max(candidates, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)
    return None if newest is None else (newest["metadata"]["name"], SUBMITTER_CONTAINER)


def log_lines(connection: Connection, pod: str, container: str, follow: bool) -> Iterator[str]:
    """Yield the lines that a container has written; with `follow` until it has ended."""
    path = path_of(connection, "v1", "Pod", pod) + "/log"
    last, seen = "", 0
    while True:
        ended = _has_ended(connection, pod, container)  # asked before reading, so that no last line is missed
        query: JsonObject = {"container": container, "follow": follow and not ended, "timestamps": True}
        query |= {"sinceTime": last} if last else {}
        number = 0
        try:
            for line in connection.lines(path, query, SILENT_S):
                text = line.decode("utf-8", "replace")
                stamp, _, rest = text.partition(" ")
                if _STAMP.fullmatch(stamp):
                    if last and _order(stamp) <= _order(last):
                        continue
                    last = stamp
                    yield rest
                else:  # a server that tells no times sends everything again
                    number += 1
                    if number > seen:
                        seen = number
                        yield text
        except RequestRefusedError as error:
            if error.status not in (400, 404) or ended:  # 400: the container has not begun
                raise
        if ended or not follow:
            return
        time.sleep(POLL_S)


def _order(stamp: str) -> tuple[str, str]:
    match = _STAMP.fullmatch(stamp)
    assert match is not None
    return match[1], (match[2] or "").ljust(9, "0")


def _container(pod: Object, name: str) -> Object:
    """Return the status of a container, empty where it has none yet."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((status for status in statuses if status["name"] == name), {})


def _has_ended(connection: Connection, pod: str, container: str) -> bool:
    resource = read(connection, "Pod", pod, "v1")
    return resource is None or "terminated" in (_container(resource, container).get("state") or {})
