"""Whatever stands in a kubeconfig, and whatever answers as a server: one line says what was expected."""

import contextlib
import http.server
import json
from collections.abc import Iterator

import pytest
import yaml
from servers.http_server import serving_http

from marl_ray.cluster.kuberay.client.connection import Connection, RequestRefusedError, connect
from marl_ray.cluster.kuberay.client.resources import apply, path_of, read
from marl_ray.errors import MarlRayError

CONTEXT = {"name": "x", "context": {"cluster": "c", "user": "u"}}
WRONG = [
    ("a: [", "while parsing"),
    ("", "is empty"),
    ("- 1", "expected a kubeconfig"),
    ("contexts: []", "current-context"),
    (yaml.safe_dump({"current-context": "x", "contexts": [CONTEXT], "clusters": [], "users": []}), "name c"),
    (
        yaml.safe_dump({"current-context": "x", "contexts": [CONTEXT], "clusters": 5, "users": 6}),
        "expected a kubeconfig",
    ),
    (yaml.safe_dump({"current-context": "x", "contexts": [{"name": "x"}]}), "context"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_kubeconfig_is_one_line(tmp_path, text, words):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(MarlRayError, match=words) as caught:
        connect(str(path))
    assert str(caught.value).startswith("kubeconfig") and "\n" not in str(caught.value)


def test_a_context_that_is_named_needs_no_current_one(tmp_path):
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:9/"}}
    contexts = [CONTEXT, {"name": "y", "context": {"cluster": "c", "user": "u", "namespace": "lab"}}]
    (tmp_path / "one").write_text(yaml.safe_dump({"contexts": contexts, "clusters": [cluster], "users": []}))
    for name, namespace in (("x", "default"), ("y", "lab")):
        connection = connect(str(tmp_path / "one"), context=name)
        assert (connection.server, connection.namespace) == ("http://127.0.0.1:9", namespace)
    with pytest.raises(MarlRayError, match=r"^--context z: the kubeconfig has x, y$"):
        connect(str(tmp_path / "one"), context="z")
    with pytest.raises(MarlRayError, match=r"expected a kubeconfig .*current-context"):
        connect(str(tmp_path / "one"))
    (tmp_path / "two").write_text(yaml.safe_dump({"current-context": "y"}))
    assert connect(f"{tmp_path / 'one'}:{tmp_path / 'two'}").namespace == "lab"


def test_a_token_of_a_command_is_asked_for_again_when_it_has_expired(tmp_path):
    """Clouds give tokens for minutes, and a submission is followed for days."""
    script, calls = tmp_path / "token.sh", tmp_path / "calls"
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    status = {"token": "t", "expirationTimestamp": "2020-01-01T00:00:00Z"}
    script.write_text(f"#!/bin/sh\necho x >> {calls}\necho '{json.dumps(credential | {'status': status})}'\n")
    script.chmod(0o755)
    user = {"exec": {"apiVersion": credential["apiVersion"], "command": str(script), "interactiveMode": "Never"}}
    with server(200, "{}", tmp_path) as connection:
        config = yaml.safe_load((tmp_path / "kubeconfig").read_text()) | {"users": [{"name": "u", "user": user}]}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        connection = connect(str(tmp_path / "kubeconfig"))
        calls_made = len(calls.read_text().split())
        for _ in range(2):
            connection.request("GET", "/api/v1")
        assert len(calls.read_text().split()) == calls_made + 2


def test_a_folder_and_bytes_are_no_kubeconfig(tmp_path):
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    for path in (tmp_path, tmp_path / "bytes"):
        with pytest.raises(MarlRayError, match=f"kubeconfig {path}: "):
            connect(str(path))


@contextlib.contextmanager
def server(status: int, text: str, tmp_path) -> Iterator[Connection]:
    """A server that gives the same answer to whatever it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PATCH = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with serving_http(Handler) as url:
        clusters = [{"name": "c", "cluster": {"server": url}}]
        users = [{"name": "u", "user": {"token": "secret"}}]
        config = {"current-context": "x", "contexts": [CONTEXT], "clusters": clusters, "users": users}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        yield connect(str(tmp_path / "kubeconfig"))


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (401, '{"message": "Unauthorized"}', "http://127.0.0.1:.* takes no such credentials: Unauthorized"),
        (403, '{"message": "rayjobs is forbidden:\\nUser x"}', "rayjobs is forbidden: User x"),
        (200, "<html>", "expected JSON from a Kubernetes API"),
        (200, "[1, 2]", "expected JSON from a Kubernetes API"),
        (200, '{"hello": 1}', "expected a Kubernetes API, which lists its resources"),
        (404, "no such page", "knows no RayJob of ray.io/v1; is KubeRay's operator installed"),
    ],
)
def test_whatever_a_server_answers_is_told_in_one_line(tmp_path, status, text, words):
    with server(status, text, tmp_path) as connection:
        with pytest.raises(MarlRayError, match=words) as caught:
            read(connection, "RayJob", "x")
        assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
        assert not isinstance(caught.value, RequestRefusedError) or caught.value.status == status


def test_a_server_that_is_away_is_asked_again_without_a_word(tmp_path, caplog):
    with (
        server(503, "busy", tmp_path) as connection,
        pytest.raises(MarlRayError, match=r"no answer for 0.3 s: 503 busy"),
    ):
        connection.request("GET", "/api/v1", lost_s=0.3)
    with pytest.raises(MarlRayError, match=r"no answer for 0.3 s: .*refused"):
        connection.request("GET", "/api/v1", lost_s=0.3)
    assert caplog.records == []


def test_names_are_no_paths(tmp_path):
    kinds = '{"kind": "APIResourceList", "resources": [{"kind": "RayJob", "name": "rayjobs", "namespaced": true}]}'
    with server(200, kinds, tmp_path) as connection:
        assert path_of(connection, "ray.io/v1", "RayJob", "../x?y").endswith("/rayjobs/..%2Fx%3Fy")
        for wrong in ({"kind": "RayJob"}, {"kind": "RayJob", "apiVersion": "ray.io/v1", "metadata": "x"}):
            with pytest.raises(
                MarlRayError, match=r"^RayJob: expected apiVersion, kind and metadata\.name, each a text$"
            ):
                apply(connection, wrong)
