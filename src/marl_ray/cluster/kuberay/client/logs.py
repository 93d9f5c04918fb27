"""Reads the log of a RayJob's entrypoint, which its submitter repeats, each line once through lost connections."""

import re
import time
from collections import Counter
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
_TIME_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?Z")

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


class SentLines:
    """The lines of a log that a server has sent already, and sends again after a lost connection.

    A server goes by whole seconds, so it sends all lines of the last second again. Two lines may have one stamp, and a
    line may be stamped a little before the one that it follows, because two streams are written side by side.
    """

    def __init__(self) -> None:
        self._second = ""
        """The last second of which a line has come, such as `2026-01-31T12:00:00`; empty before the first."""
        self._lines = Counter[str]()
        """The lines of that second, with the number of times that each has come."""
        self._repeated = Counter[str]()
        """Those of them that are still to come again on this connection."""
        self._unstamped = self._unstamped_before = 0
        """Lines without a stamp on this connection, and on all before: a server that stamps none sends all again."""

    @property
    def since(self) -> str:
        """The moment from which a server is to send lines; empty for the beginning."""
        return f"{self._second}Z" if self._second else ""

    def begin_connection(self) -> None:
        """Expect the lines since `since` again."""
        self._repeated = self._lines.copy()
        self._unstamped_before = max(self._unstamped_before, self._unstamped)
        self._unstamped = 0

    def new_text(self, line: str) -> str | None:
        """Return the text of the line that comes next, without its stamp; None if it has come before."""
        stamp, _, text = line.partition(" ")
        match = _TIME_STAMP.fullmatch(stamp)
        if match is None:
            self._unstamped += 1
            return line if self._unstamped > self._unstamped_before else None
        if self._repeated[line] > 0:
            self._repeated[line] -= 1
            return None
        if match[1] > self._second:
            self._second = match[1]
            self._lines.clear()
        if match[1] == self._second:
            self._lines[line] += 1
        return text


def log_lines(connection: Connection, pod: str, container: str, follow: bool) -> Iterator[str]:
    """Yield the lines that a container has written; with `follow` until it has ended."""
    path = path_of(connection, "v1", "Pod", pod) + "/log"
    sent_lines = SentLines()
    while True:
        ended = _has_ended(connection, pod, container)  # asked before reading, so that no last line is missed
        query: JsonObject = {"container": container, "follow": follow and not ended, "timestamps": True}
        query |= {"sinceTime": sent_lines.since} if sent_lines.since else {}
        sent_lines.begin_connection()
        try:
            for line in connection.lines(path, query, SILENT_S):
                text = sent_lines.new_text(line.decode("utf-8", "replace"))
                if text is not None:
                    yield text
        except RequestRefusedError as error:
            if error.status not in _NOT_BEGUN_STATUSES or ended:
                raise
        if ended or not follow:
            return
        time.sleep(POLL_S)


def _container_status(pod: Object, name: str) -> Object:
    """Return the status of a container, empty where it has none yet."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((status for status in statuses if status["name"] == name), {})


def _has_ended(connection: Connection, pod: str, container: str) -> bool:
    resource = read(connection, "Pod", pod, "v1")
    return resource is None or "terminated" in (_container_status(resource, container).get("state") or {})
