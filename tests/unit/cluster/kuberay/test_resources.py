"""Objects that several make at once: one makes them, and what the others are told is true."""

import http.server
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kubernetes import client
from servers.http_server import serving_http

from marl_ray.cluster.kuberay.client.connection import Connection, RequestRefusedError
from marl_ray.cluster.kuberay.client.resources import apply, create

KINDS = {
    "kind": "APIResourceList",
    "resources": [{"kind": "ConfigMap", "name": "configmaps", "namespaced": True}],
}
FILES = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "files"}, "data": {"config.yaml": "{}"}}
TAKEN = (409, {"reason": "AlreadyExists", "message": 'configmaps "files" already exists'})
QUOTA = (409, {"reason": "Conflict", "message": "Operation cannot be fulfilled on resourcequotas"})
DONE = (200, FILES)


@contextmanager
def api_server(*answers: tuple[int, object]) -> Iterator[tuple[Connection, list[str]]]:
    """A server that knows ConfigMaps and gives these answers to writes, one after another; yields their methods too."""
    methods: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, KINDS)

        def do_PATCH(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            methods.append(self.command)
            self.reply(*answers[len(methods) - 1])

        do_POST = do_PATCH

        def reply(self, status: int, content: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with serving_http(Handler) as url:
        yield Connection(client.ApiClient(client.Configuration(host=url)), "default"), methods


def test_an_object_that_somebody_else_makes_at_the_same_moment_is_applied_again():
    with api_server(TAKEN, DONE) as (connection, methods):
        assert apply(connection, FILES) == FILES
        assert methods == ["PATCH", "PATCH"]


def test_a_name_that_stays_taken_is_one_line_without_advice_about_fields():
    with api_server(TAKEN, TAKEN) as (connection, methods), pytest.raises(RequestRefusedError) as refused:
        apply(connection, FILES)
    assert str(refused.value) == 'ConfigMap files: configmaps "files" already exists'
    assert (refused.value.status, refused.value.reason, methods) == (409, "AlreadyExists", ["PATCH", "PATCH"])


def test_only_a_name_that_is_taken_makes_no_object():
    with api_server(TAKEN, QUOTA) as (connection, methods):
        assert create(connection, FILES) is None
        with pytest.raises(RequestRefusedError, match=r"^ConfigMap files: Operation cannot be fulfilled on resourceq"):
            create(connection, FILES)
        assert methods == ["POST", "POST"]
