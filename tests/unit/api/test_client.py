"""The client refuses what JSON cannot hold before it asks the gateway, and names the argument."""

import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from marl_ray.api.client import Client
from marl_ray.errors import FieldError, MarlRayError

NO_GATEWAY = "http://127.0.0.1:9"
"""Port of `discard`, where nothing answers: what is refused is refused before a request."""


@pytest.fixture
def bodies():
    """Serve a gateway that accepts every POST, and yield its address and the bodies that it gets."""
    received: list[object] = []
    answer = json.dumps({"experiment": "exp", "arm": "a", "text": "x"}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_numbers_of_numpy_are_numbers(bodies):
    url, received = bodies
    metrics: dict[str, Any] = {"steps": np.int64(3), "cost": np.float32(0.25)}
    with Client(url) as client:
        client.record_outcome("s", np.float32(0.5), metrics)
        client.request("/generate", {"temperature": np.float32(0.5), "attributes": {"age": np.int8(7)}})
    assert received == [
        {"session_id": "s", "value": 0.5, "metrics": {"steps": 3.0, "cost": 0.25}},
        {"temperature": 0.5, "attributes": {"age": 7}},
    ]


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"timeout_s": "30"}, "timeout_s: expected seconds, more than 0 and less than a day (86,400), got '30'"),
        ({"timeout_s": True}, "timeout_s: expected seconds, more than 0 and less than a day (86,400), got True"),
        ({"timeout_s": math.nan}, "timeout_s: expected seconds, more than 0 and less than a day (86,400), got nan"),
        ({"timeout_s": math.inf}, "timeout_s: expected seconds, more than 0 and less than a day (86,400), got inf"),
        ({"timeout_s": -1}, "timeout_s: expected seconds, more than 0 and less than a day (86,400), got -1"),
        ({"key": 5}, "key: expected a text, got int"),
        ({"key": "k\u00e9y"}, "key: expected printable ASCII without blanks around it"),
        ({"key": "a\nb"}, "key: expected printable ASCII without blanks around it"),
    ],
)
def test_a_client_is_refused_the_arguments_that_no_request_can_be_made_with(arguments, refusal):
    with pytest.raises(MarlRayError, match=f"^{re.escape(refusal)}$"):
        Client(NO_GATEWAY, **arguments)


def test_the_variable_of_a_key_that_no_header_can_hold_is_named(monkeypatch):
    monkeypatch.setenv("MARL_RAY_API_KEY", "k\u00e9y")
    with pytest.raises(MarlRayError, match=r"^MARL_RAY_API_KEY: expected printable ASCII without blanks"):
        Client(NO_GATEWAY)


@pytest.mark.parametrize(
    ("value", "metrics", "refusal"),
    [
        (float("nan"), None, "value: expected a finite number, got nan"),
        (np.float32("inf"), None, "value: expected a finite number, got inf"),
        (object(), None, "value: expected a number, got <object object at "),
        ("1.5", None, "value: expected a number, got '1.5'"),
        (b"2", None, "value: expected a number, got b'2'"),
        (True, None, "value: expected a number, got True"),
        (np.True_, None, "value: expected a number, got np.True_"),
        (1.0, {"cost": "2"}, "metrics.cost: expected a number, got '2'"),
        (10**400, None, "value: expected a number, got 1000"),
        (1.0, {"cost": float("inf")}, "metrics.cost: expected a finite number, got inf"),
        (1.0, {"cost": object()}, "metrics.cost: expected a number, got <object object at "),
        (1.0, [("cost", 1.0)], "metrics: expected a mapping of names to numbers, got list"),
    ],
)
def test_an_outcome_that_is_no_number_is_named(value, metrics, refusal):
    with Client(NO_GATEWAY) as client, pytest.raises(FieldError, match=f"^{re.escape(refusal)}"):
        client.record_outcome("s", value, metrics)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"observations": {"a": [np.nan]}}, "observations.a: expected what JSON can hold: Out of range float values"),
        ({"observations": {"a": object()}}, "observations.a: expected what JSON can hold: Object of type object"),
        ({"observations": {"a": [[1], [1, 2]]}}, "observations.a: expected an array: setting an array element"),
        ({"observations": {"a": [1]}, "action_masks": {"a": [np.inf]}}, "action_masks.a: expected what JSON can hold"),
        ({"observations": {"a": [1]}, "attributes": {"at": object()}}, "attributes.at: expected what JSON can hold"),
    ],
)
def test_an_observation_that_is_no_json_is_named(arguments, refusal):
    with Client(NO_GATEWAY) as client, pytest.raises(FieldError, match=f"^{re.escape(refusal)}"):
        client.act(**arguments)


def test_a_setting_that_is_no_json_is_named():
    with Client(NO_GATEWAY) as client, pytest.raises(FieldError, match=r"^temperature: expected what"):
        client.generate("a prompt", temperature=float("nan"))
