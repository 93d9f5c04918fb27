"""The check of a gateway's answers: another service behind the address is one line, for every call and command."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from servers.http_server import serving_http

from marl_ray.api.client import Client
from marl_ray.cli.main import main
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonObject
from marl_ray.serving.client.answers import ANSWERS, check_answer
from marl_ray.serving.handlers.api_description.document import openapi
from marl_ray.serving.handlers.route_table import ROUTES


@contextmanager
def serving_answer(answer: object) -> Iterator[str]:
    """Serve one JSON answer to every request; yields the URL."""

    class OtherServer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, *_):
            """Print nothing."""

    with serving_http(OtherServer) as url:
        yield url


@pytest.mark.parametrize(
    ("call", "path", "key"),
    [
        (lambda client: client.act({"a": [1]}), "/v1/act", "experiment"),
        (lambda client: client.generate("a prompt"), "/generate", "experiment"),
        (lambda client: client.record_outcome("s", 1.0), "/v1/outcomes", "experiment"),
        (lambda client: client.experiments(), "/v1/experiments", "experiments"),
        (lambda client: client.experiment("exp"), "/v1/experiments/exp", "name"),
    ],
)
def test_every_call_of_the_client_names_the_key_that_another_service_lacks(call, path, key):
    with serving_answer({}) as url, Client(url) as client, pytest.raises(MarlRayError) as caught:
        call(client)
    assert str(caught.value).startswith(f"gateway {url}{path}: expected a gateway's answer, got '{{}}': missing key")
    assert f"missing key {key!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("experiment", "ls"), "/v1/experiments"),
        (("experiment", "status", "exp"), "/v1/experiments/exp"),
        (("experiment", "watch", "exp"), "/v1/experiments/exp"),
        (("experiment", "audit", "exp"), "/v1/experiments/exp/audit"),
        (("experiment", "stop", "exp", "--reason", "over"), "/v1/experiments/exp/stop"),
        (("deploy", "models:/x/1"), "/v1/endpoints"),
    ],
)
def test_every_command_says_in_one_line_that_the_answer_is_another_services(capsys, arguments, path):
    with serving_answer({}) as url, pytest.raises(SystemExit) as caught:
        main([*arguments, "--url", url])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"marl-ray: gateway {url}{path}: expected a gateway's answer, got '{{}}': missing key '")


@pytest.mark.parametrize(
    ("experiments", "mistake"),
    [
        (3, "experiments: expected a list, got 3"),
        ([{"name": "x"}], "missing key 'experiments.0.status' (and 2 more)"),
        (
            [{"name": "x", "status": "running", "epoch": "1", "arms": {}}],
            "experiments.0.epoch: expected a whole number",
        ),
    ],
)
def test_a_key_of_another_type_is_named_by_its_place(experiments, mistake):
    with (
        serving_answer({"experiments": experiments}) as url,
        Client(url) as client,
        pytest.raises(MarlRayError) as caught,
    ):
        client.experiments()
    assert mistake in str(caught.value)


def test_an_answer_of_a_newer_gateway_behind_a_prefix_may_have_more_keys():
    answer = {"experiment": "exp", "arm": "a", "actions": {"x": 1}, "log_probs": {"x": 0}, "new": 1}
    check_answer("POST", "/prefix/v1/act", answer)
    check_answer("POST", "/v2/models/exp/infer", {})
    with pytest.raises(MarlRayError, match=r"^missing key 'actions'"):
        check_answer("POST", "/prefix/v1/act", {"experiment": "exp", "arm": "a", "log_probs": {}})


def check_read(read: JsonObject, read_forms: JsonObject, written: JsonObject, written_forms: JsonObject) -> None:
    """Check that a value of the schema `written` is always one of the schema `read`, whose keys it may exceed."""
    read = read_forms[read["$ref"].rpartition("/")[2]] if "$ref" in read else read
    written = written_forms[written["$ref"].rpartition("/")[2]] if "$ref" in written else written
    if "anyOf" in read or "anyOf" in written:
        choices, ways = read.get("anyOf", [read]), written.get("anyOf", [written])
        assert {way.get("type") for way in ways} - {None} <= {choice.get("type") for choice in choices} - {None}
        read, written = choices[0], ways[0]
        if "$ref" in read or "$ref" in written:
            check_read(read, read_forms, written, written_forms)
        return
    properties = written.get("properties", {})
    defaults = {key for key, schema in properties.items() if "default" in schema}  # a report writes them all out
    assert set(read.get("required", ())) <= {*written.get("required", ()), *defaults}
    for key in read.get("properties", {}):
        check_read(read["properties"][key], read_forms, properties[key], written_forms)
    for inner in ("items", "additionalProperties"):
        if isinstance(read.get(inner), dict):
            check_read(read[inner], read_forms, written[inner], written_forms)


def test_what_clients_read_is_in_the_answers_that_the_gateways_document_promises():
    document = json.loads(openapi(ROUTES, "", False))
    for (method, pattern), form in ANSWERS.items():
        templates = [path for path in document["paths"] if re.fullmatch(pattern, path.replace("{name}", "exp"))]
        assert templates, pattern
        for template in templates:
            operation = document["paths"][template].get(method.lower())
            if operation is None:
                continue
            (answer,) = (operation["responses"][code] for code in ("200", "201") if code in operation["responses"])
            read, written = form.json_schema(), answer["content"]["application/json"]["schema"]
            check_read(read, read.get("$defs", {}), written, document["components"]["schemas"])
