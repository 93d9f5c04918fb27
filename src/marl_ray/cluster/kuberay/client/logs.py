"""Reads the log of a RayJob's entrypoint, which its submitter repeats, each line once through lost connections."""

import re
import time
from collections.abc import Iterator
from http import HTTPStatus

from marl_ray.cluster.kuberay.client.connection import Connection, RequestRefusedError
from marl_ray.cluster.kuberay.client.resources import list_all, path_of, read
from marl_ray.cluster.kuberay.state.view import SUBMITTER_CONTAINER, Object
from marl_ray.json_types import JsonObject

SILENT_S = 60.0
"""Seconds without a line after which a log is asked for again: a connection may be dead without a word."""
POLL_S = 1.0
"""Seconds between two requests for a log whose container has not ended."""
_TIME_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")

_NOT_BEGUN_STATUSES = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)
"""Statuses while a container has not begun, or its pod is not there yet."""


def submitter_of(connection: Connection, name: str) -> tuple[str, str] | None:
    """Return the newest pod that submits a RayJob, and its container.

    None where there is no such pod yet, or none at all (`HTTPMode`).
    """
    pods = list_all(connection, "Pod", "v1", labels=f"job-name={name}")
    job = read(connection, "RayJob", name) or {}
    cluster = (job.get("status") or {}).get("rayClusterName")
    if not pods and cluster and (job["spec"].get("submissionMode") == "SidecarMode"):
        pods = list_all(connection, "Pod", "v1", labels=f"ray.io/cluster={cluster},ray.io/node-type=head")
    candidates = [pod for pod in pods if _container_status(pod, SUBMITTER_CONTAINER)]
    newest = max(candidates, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)
    return None if newest is None else (newest["metadata"]["name"], SUBMITTER_CONTAINER)


def log_lines(connection: Connection, pod: str, container: str, follow: bool) -> Iterator[str]:
    """Yield the lines that a container has written; with `follow` until it has ended."""
    path = path_of(connection, "v1", "Pod", pod) + "/log"
    last_stamp, unstamped_lines = "", 0
    while True:
        ended = _has_ended(connection, pod, container)  # asked before reading, so that no last line is missed
        query: JsonObject = {"container": container, "follow": follow and not ended, "timestamps": True}
        query |= {"sinceTime": last_stamp} if last_stamp else {}
        line_number = 0
        try:
            for line in connection.lines(path, query, SILENT_S):
                text = line.decode("utf-8", "replace")
                stamp, _, logged_text = text.partition(" ")
                if _TIME_STAMP.fullmatch(stamp):
                    if last_stamp and _sort_key(stamp) <= _sort_key(last_stamp):
                        continue
                    last_stamp = stamp
                    yield logged_text
                else:  # a server that tells no times sends everything again
                    line_number += 1
                    if line_number > unstamped_lines:
                        unstamped_lines = line_number
                        yield text
        except RequestRefusedError as error:
            if error.status not in _NOT_BEGUN_STATUSES or ended:
                raise
        if ended or not follow:
            return
        time.sleep(POLL_S)


def _sort_key(stamp: str) -> tuple[str, str]:
    """Return a time stamp's second, and its fraction in nine digits, so that stamps of any precision compare."""
    match = _TIME_STAMP.fullmatch(stamp)
    assert match is not None
    return match[1], (match[2] or "").ljust(9, "0")


def _container_status(pod: Object, name: str) -> Object:
    """Return the status of a container, empty where it has none yet."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((status for status in statuses if status["name"] == name), {})


def _has_ended(connection: Connection, pod: str, container: str) -> bool:
    resource = read(connection, "Pod", pod, "v1")
    return resource is None or "terminated" in (_container_status(resource, container).get("state") or {})
