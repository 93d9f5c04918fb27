"""The refusals of `serve --local` before Ray starts, its lines for another terminal, and a silent gateway's error."""

from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from servers.dripping_server import dripping
from servers.http_server import serving_http

from marl_ray.api.client import Client
from marl_ray.cli.serving.local_gateway import address_lines, serve_locally
from marl_ray.cluster.local_ray import free_port
from marl_ray.errors import MarlRayError
from marl_ray.serving.client import requests
from marl_ray.serving.client.requests import experiment_path, request_json


def test_what_a_second_terminal_needs_is_printed_for_pasting():
    lines = address_lines({"one": "http://127.0.0.1:8017", "two": "http://127.0.0.1:8017/two"}, "secret")
    assert lines[1:] == [
        "two runs at http://127.0.0.1:8017/two, its page at http://127.0.0.1:8017/two/ui",
        "export MARL_RAY_API_KEY=secret",
        "export MARL_RAY_GATEWAY=http://127.0.0.1:8017",
        "serving until Ctrl-C",
    ]
    assert not any("KEY" in line for line in address_lines({"one": "http://127.0.0.1:8000"}, None))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("{experiments: [{name: x, arms: {a: {bundle: nowhere}}}]}", "experiments.x.arms.a: bundle 'nowhere'"),
        ("{experiments: [], api_keys: keys.yaml}", "api_keys: config file 'keys.yaml' cannot be read"),
    ],
)
def test_what_a_gateway_names_is_read_before_ray_starts(tmp_path, monkeypatch, capsys, args, named):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("serve.yaml").write_text(
        f"http_options: {{host: 127.0.0.1, port: {free_port()}}}\n"
        f"applications: [{{name: x, import_path: 'marl_ray.serving.app:build', args: {args}}}]\n"
    )
    with pytest.raises(MarlRayError, match=f"^serve.yaml: applications.0.args.{named}"):
        serve_locally(Path("serve.yaml"), 60)
    assert capsys.readouterr().err.splitlines()[-1].endswith("s  checking what serve.yaml names")


def test_a_gateway_that_does_not_answer_is_an_error_with_the_remedy():
    with pytest.raises(
        MarlRayError,
        match=r"^gateway http://127.0.0.1:9/? does not answer: .* \(--url or MARL_RAY_GATEWAY names another",
    ):
        request_json("http://127.0.0.1:9", "/v1/endpoints")


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1"])
def test_an_address_without_a_scheme_is_told_what_one_has(url):
    with pytest.raises(MarlRayError, match=f"^gateway '{url}/': expected an address such as http://.* names another"):
        request_json(url, "/v1/endpoints")


@pytest.mark.parametrize("url", ["http://localhost:port", "http://[::1", "http://\0"])
def test_an_address_that_is_no_url_is_told_what_one_is(url):
    expected = f"gateway {url!r}: expected an address such as http://127.0.0.1:8000"
    with pytest.raises(MarlRayError) as caught:
        request_json(url, "/v1/endpoints")
    assert str(caught.value) == f"{expected} (--url or MARL_RAY_GATEWAY names another address)"
    with pytest.raises(MarlRayError) as caught:
        Client(url)
    assert str(caught.value) == expected


def test_a_gateway_whose_answer_comes_byte_by_byte_does_not_answer(monkeypatch):
    monkeypatch.setattr(requests, "REQUEST_S", 0.3)
    with (
        dripping() as url,
        pytest.raises(MarlRayError, match=r"does not answer: no whole answer within 0\.3 s \(--url"),
    ):
        request_json(url, "/headers")


@pytest.mark.parametrize("text", ["<h1>Welcome\n to nginx</h1>", "[1, 2]"])
def test_an_answer_that_is_no_gateways_is_told_in_one_line(text):
    class OtherServer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with serving_http(OtherServer) as url, pytest.raises(MarlRayError) as caught:
        request_json(url, "/v1/endpoints")
    assert str(caught.value) == f"gateway {url}/v1/endpoints: expected a JSON object, got {' '.join(text.split())!r}"


@pytest.mark.parametrize("name", ["", "x/audit", "a\tb", "..", "a b", "n" * 101])
def test_a_text_that_is_no_name_of_an_experiment_asks_no_gateway(name, monkeypatch):
    words = "expected letters, digits, _, . and -, a letter or digit first, at most 100 characters"
    with pytest.raises(MarlRayError) as refused:
        experiment_path(name, "audit")
    assert str(refused.value) == f"experiment {name!r}: {words}"
    monkeypatch.setenv("MARL_RAY_API_KEY", "k")
    with Client("http://127.0.0.1:9") as client, pytest.raises(MarlRayError, match=r"^experiment "):
        client.experiment(name)


def test_the_path_of_an_experiment_has_its_parts():
    assert experiment_path("gridworld-2") == "/v1/experiments/gridworld-2"
    assert experiment_path("gridworld-2", "audit") == "/v1/experiments/gridworld-2/audit"
