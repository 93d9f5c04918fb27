"""The whole HTTP API against its OpenAPI document: generated requests over real HTTP, none of which may be a defect."""

import asyncio
import copy
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import schemathesis
import torch
import uvicorn
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from toy_gateways import AGENTS, SEES, bearer, gateway_config, make_bundle, write_keys
from toy_text_gateways import make_text_bundle, text_config

from marl_ray.serving.gateway import Gateway
from marl_ray.serving.http import Request, RequestError
from marl_ray.serving.openapi import openapi
from marl_ray.serving.routes import ROUTES, Route

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
torch.set_num_threads(1)
load_all_checks()
SESSIONS = [f"known-{k}" for k in range(4)]
WAIT_S = 30.0
LOADING_S = 120.0
"""The first question to a model registry makes its database."""
# Schemathesis probes without the key where it finds a header of exactly this spelling.
KEYS = {"ops": {"Authorization": "Bearer ops"}, "game": {"Authorization": "Bearer game"}, "none": {}}
TEXTS = ("/generate", "/v1/chat/completions")
CLIENTS = ("/v1/act", "/batch", *TEXTS, "/v1/outcomes")
"""What players' keys open; every other POST is for admins."""


class Tracebacks(logging.Handler):
    """What threads have logged: they must survive everything that requests leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(logging.Formatter().format(record))


class Site(NamedTuple):
    url: str
    port: int


def make_keys(folder: Path) -> str:
    return write_keys(folder / "keys.yaml", ops=("admin", "inference", "outcomes"), game=("inference", "outcomes"))


@contextmanager
def running(gateway: Gateway) -> Iterator[Site]:
    """The gateway on a port of its own; at the end no thread may have left a traceback."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(gateway, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    tracebacks = Tracebacks()
    logging.getLogger("marl_ray").addHandler(tracebacks)
    try:
        yield Site(f"http://127.0.0.1:{port}", port)
    finally:
        logging.getLogger("marl_ray").removeHandler(tracebacks)
        server.should_exit = True
        thread.join(WAIT_S)
        listening.close()
    assert not thread.is_alive()
    assert not tracebacks.found, tracebacks.found[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway with keys and two experiments."""
    folder = tmp_path_factory.mktemp("fuzz")
    bundles = {arm: make_bundle(folder, k) for k, arm in enumerate(("zero", "one", "two", "three", "four"))}
    for arm, bundle in bundles.items():
        (folder / arm).symlink_to(bundle)
    more = {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "decision_log": str(folder / "log")}
    more |= {"api_keys": make_keys(folder), "cache": {"url": "memory:"}}
    config = gateway_config(bundles, folder / "x.db", names=("exp", "other"), **more)
    with running(Gateway(config, seed=0)) as made, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # so that generated requests can name the bundles
        with httpx.Client(base_url=made.url, headers=KEYS["ops"]) as client:
            for session in SESSIONS:
                act(client, session)
        yield made


@pytest.fixture(scope="module")
def text_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway with keys and an experiment of language models."""
    folder = tmp_path_factory.mktemp("texts")
    bundles = {arm: make_text_bundle(folder, k) for k, arm in enumerate(("one", "two"))}
    with running(Gateway(text_config(bundles, folder, api_keys=make_keys(folder)), seed=0)) as made:
        yield made


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.url, timeout=WAIT_S, headers=KEYS["ops"]) as made:
        yield made


def act(client: httpx.Client, session: str, **more: Any) -> dict[str, Any]:
    sent = {"experiment": "exp", "session_id": session, "observations": SEES} | more
    answer = client.post("/v1/act", json=sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def document() -> dict[str, Any]:
    """The gateway's own, with values that exist there, so that requests come through."""
    found = json.loads(openapi(ROUTES, "", True))
    parts = found["components"]
    name = parts["parameters"]["name"]
    name["schema"] = {"anyOf": [{"enum": ["exp", "other", "new", "none"]}, name["schema"]]}
    # Any deadline may be missed, and then the answer is a 504.
    timeout = {"$ref": "#/components/parameters/x-request-timeout-seconds"}
    for methods in found["paths"].values():
        for operation in methods.values():
            operation["parameters"].remove(timeout)
    schemas = parts["schemas"]
    new = schemas["ExperimentRequest"] = copy.deepcopy(schemas["ExperimentRequest"])
    new["properties"]["name"] = {"anyOf": [{"enum": ["exp", "new", "newer"]}, new["properties"]["name"]]}
    arm = new["properties"]["arms"]["additionalProperties"] = copy.deepcopy(schemas["ArmConfig"])
    arm["properties"]["bundle"] = {"enum": ["one", "four", "/no/such/bundle"]}
    for config in (new, schemas["ExperimentConfig"]):  # schemathesis makes an invalid schema of prefixItems in answers
        share = config["properties"]["layer_share"]
        share["items"] = share.pop("prefixItems")[0]
    seen = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2}, "minItems": 3, "maxItems": 3}
    for request in (schemas["ActRequest"], schemas["OutcomeRequest"]):
        request["properties"]["experiment"] = {"enum": ["exp", "other"]}
        request["properties"]["session_id"] = {"anyOf": [{"enum": SESSIONS}, request["properties"]["session_id"]]}
        request["required"] += ["experiment", "session_id"]
    schemas["ActRequest"]["properties"]["observations"] |= {
        "properties": dict.fromkeys(AGENTS, seen),
        "additionalProperties": False,
    }
    return found


schema = schemathesis.openapi.from_dict(document())


def text_document() -> dict[str, Any]:
    """Likewise for the routes of language models; texts are short, to take little time."""
    found = document()
    found["paths"] = {path: found["paths"][path] for path in TEXTS}
    schemas = found["components"]["schemas"]
    for name, field in (("GenerateRequest", "experiment"), ("ChatRequest", "model")):
        properties = schemas[name]["properties"] = copy.deepcopy(schemas[name]["properties"])
        properties[field] = {"enum": ["exp"]}
        properties["max_tokens"]["maximum"] = 20
    schemas["GenerateRequest"]["properties"]["agent"] = {"enum": ["writer", None]}
    return found


text_schema = schemathesis.openapi.from_dict(text_document())


@pytest.mark.parametrize("key", KEYS)
@schema.parametrize()
@settings(max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_a_defect_and_answers_are_as_described(case, key, site):
    excluded = [positive_data_acceptance]  # most requests that are well-formed ask for what does not exist
    if case.operation.path == "/batch":
        excluded.append(negative_data_rejection)  # parts have statuses of their own
    case.call_and_validate(base_url=site.url, headers=KEYS[key], excluded_checks=excluded, timeout=LOADING_S)


@pytest.mark.parametrize("key", KEYS)
@text_schema.parametrize()
@settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_for_a_text_is_a_defect(case, key, text_site):
    case.call_and_validate(
        base_url=text_site.url, headers=KEYS[key], excluded_checks=[positive_data_acceptance], timeout=LOADING_S
    )


def is_page(route: Route) -> bool:
    return route.template.startswith("/ui")


def path_of(route: Route) -> str:
    return route.template.replace("{name}", "exp").replace("{version}", "team:1")


ADMIN = [route for route in ROUTES if route.method != "GET" and route.template not in CLIENTS]


@pytest.mark.parametrize("route", ADMIN, ids=lambda route: f"{route.method} {route.template}")
def test_what_admins_may_do_nobody_else_may(route, client):
    """A route that is new is for admins, unless `CLIENTS` names it."""
    before = client.get("/v1/experiments/exp/audit").json()
    for key, status in (("none", 401), ("game", 403), ("wrong", 401)):
        shown = KEYS.get(key, bearer("wrong"))
        for body in ({"reason": "r"}, {}):
            if is_page(route):  # whose forms hold the key
                form = body | ({} if key == "none" else {"key": key})
                answer = client.request(route.method, path_of(route), data=form, headers={"Authorization": ""})
            else:
                sent = {k: v for k, v in client.headers.items() if k != "authorization"} | shown
                answer = httpx.request(route.method, f"{client.base_url}{path_of(route)}", json=body, headers=sent)
            assert answer.status_code == status, (key, answer.text)
    assert client.get("/v1/experiments/exp/audit").json() == before


@pytest.mark.parametrize("path", CLIENTS)
def test_clients_need_a_key(path, site):
    answers = [httpx.post(f"{site.url}{path}", json={}, headers=shown) for shown in ({}, bearer("wrong"))]
    assert [answer.status_code for answer in answers] == [401, 401]


def test_players_cannot_choose_their_arm(site):
    sent = {"experiment": "exp", "session_id": "s", "observations": SEES}
    headers = KEYS["game"] | {"x-arm": "four"}
    for path, body in (("/v1/act", sent), ("/batch", {"requests": [sent]})):
        answer = httpx.post(f"{site.url}{path}", json=body, headers=headers)
        assert answer.status_code == 403 or answer.json()["answers"][0]["status"] == 403


def test_act_then_outcome_then_report(client, site):
    made = {"name": "sequence", "arms": {"a": {"bundle": "zero"}, "b": {"bundle": "two"}}, "reason": "r"}
    assert client.post("/v1/experiments", json=made).status_code == 201
    arms = {}
    for k in range(12):
        named = {"experiment": "sequence", "session_id": f"s{k}"}
        arms[k] = act(client, **{"session": f"s{k}", "experiment": "sequence"})["arm"]
        told = [client.post("/v1/outcomes", json=named | {"value": v, "metrics": {"cost": k}}) for v in (k, k, -1)]
        assert [answer.status_code for answer in told] == [200, 200, 409]
        assert told[0].json() == {"experiment": "sequence", "arm": arms[k], "value": float(k)}
        other = client.post("/v1/outcomes", json=named | {"value": k, "metrics": {"cost": -1}})
        assert (other.status_code, other.json()["error"]["field"]) == (409, "metrics.cost")
    report = client.get("/v1/experiments/sequence").json()
    for arm in ("a", "b"):
        mine = [k for k in arms if arms[k] == arm]
        assert (report["arms"][arm]["exposures"], report["arms"][arm]["outcomes"]) == (len(mine), len(mine))
        assert report["arms"][arm]["mean"] == pytest.approx(sum(mine) / len(mine))


def test_create_then_pause_then_resume_then_stop(client):
    arms = {"a": {"bundle": "zero"}, "b": {"bundle": "two"}}
    made = client.post("/v1/experiments", json={"name": "life", "arms": arms, "reason": "begin", "autostart": False})
    assert (made.status_code, made.json()["status"]) == (201, "draft")
    for action, status in (("start", "running"), ("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
        late = client.post(f"/v1/experiments/life/{action}", json={"reason": "r", "epoch": 99})
        done = client.post(f"/v1/experiments/life/{action}", json={"reason": action})
        assert late.status_code == 409
        assert (done.status_code, done.json()["status"]) == (200, status), done.text
    assert client.post("/v1/experiments/life/start", json={"reason": "again"}).status_code == 409
    reasons = [entry["reason"] for entry in client.get("/v1/experiments/life/audit").json()["audit"]]
    assert reasons == ["begin", "start", "pause", "resume", "stop"]


DEEP = b"[" * 900 + b"]" * 900
"""As deep as JSON is read, and deeper than it is written."""
HOSTILE = [
    *(b'"a\\u0000b"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xed\xa0\x80"', b'"\xff"', b'"\\u202e"', b'""'),
    *(b"9" * 400, b"-9223372036854775808", b"18446744073709551615", b"1e308", b"1e999", b"NaN", b"Infinity"),
    *(b"null", b"true", b"[]", b"{}", b"[[1],[1,2],3]", b'{"a":{"b":1}}', b'["1","2"]', b"[null]", DEEP),
    *(b'{"\\u0000":1}', b'{"a: b":1}', b'{"":[[]]}', b'"' + b"x" * 5000 + b'"'),
    *(b'{"agent_0":%s}' % value for value in (DEEP, b'"abc"', b'{"a":1}', b"[1e308,1,1]", b"[1,[2],3]")),
]
"""Values, as JSON or nearly, for any field."""
BODIES = [
    b"",
    b"\0",
    b"null",
    b"[]",
    b'"x"',
    b"1",
    b"{",
    b"{}{}",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe",
    b'{"\\ud800":1}',
    b'{"a":' * 2000,
    DEEP,
]
ACT = {"experiment": "exp", "session_id": "h", "observations": SEES}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/act": ACT | {"action_masks": {}, "cluster_id": "c", "mode": "greedy"},
    "/batch": {"requests": [ACT]},
    "/generate": {"experiment": "exp", "session_id": "h", "prompt": "p", "max_tokens": 1, "temperature": 1}
    | dict.fromkeys(("agent", "cluster_id", "top_p", "top_k", "stop", "seed", "stream")),
    "/v1/chat/completions": {"model": "exp", "messages": [{"role": "user", "content": "p"}], "max_tokens": 1}
    | dict.fromkeys(
        ("user", "stop", "seed", "stream", "n", "tools", "logit_bias", "max_completion_tokens", "logprobs")
    ),
    "/v1/outcomes": {"experiment": "exp", "session_id": "known-3", "value": 1, "metrics": {}},
    "/v1/experiments": {"name": "hostile", "arms": {"a": {"bundle": "zero"}}, "reason": "r"}
    | dict.fromkeys(
        ("endpoint", "salt", "layer", "guardrails", "alpha", "block_s", "stages", "breaker", "layer_share")
    ),
    "/v1/experiments/other/rollback": {"reason": "r", "arm": "four", "epoch": 99},
    "/v1/experiments/other/promote": {"reason": "r", "arm": "four", "epoch": 99},
}


def assert_refused_or_done(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        (error,) = answer.json().values()
        openais = {"type", "code", "param"}  # on its route
        assert set(error) - openais == {"field", "message"} and "\n" not in error["message"]


@pytest.mark.parametrize("path", REQUESTS)
def test_hostile_values_are_refused_by_name(path, client, text_site):
    good = REQUESTS[path]
    if path in TEXTS:
        client.base_url = text_site.url
    for field in good:
        start, _, end = json.dumps(good | {field: "@"}).encode().partition(b'"@"')
        for number, value in enumerate(HOSTILE):
            # An experiment that could be made is there, so the next one needs another name.
            body = (start + value + end).replace(b"hostile", f"{field}-{number}".encode())
            assert_refused_or_done(client.post(path, content=body))
            if path == "/v1/act":
                assert_refused_or_done(client.post("/batch", content=b'{"requests":[' + body + b"]}"))
    for body in BODIES:
        answer = client.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "body")


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("/v1/act", {"session_id": "a\0b"}, "session_id"),
        ("/v1/act", {"session_id": "a\x1b"}, "session_id"),
        ("/v1/act", {"cluster_id": "a\0b"}, "cluster_id"),
        ("/v1/outcomes", {"session_id": "a\0b"}, "session_id"),
        ("/v1/outcomes", {"metrics": {"a\0b": 1}}, "metrics"),
        ("/v1/outcomes", {"metrics": {"": 1}}, "metrics"),
        ("/v1/outcomes", {"metrics": {"x" * 101: 1}}, "metrics"),
        ("/v1/outcomes", {"metrics": {"outcome": 1}}, "metrics"),
        ("/v1/experiments/other/promote", {"reason": "a\0b"}, "reason"),
        ("/v1/experiments/other/promote", {"reason": "x" * 1001}, "reason"),
        ("/v1/experiments/other/promote", {"arm": []}, "arm"),
        ("/v1/experiments/other/promote", {"arm": {}}, "arm"),
    ],
)
def test_what_the_database_could_not_keep_never_reaches_it(path, change, field, client):
    answer = client.post(path, json=REQUESTS[path] | change)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"salt": "a\0b"}, "body"),
        ({"layer": "a\0b"}, "body"),
        ({"guardrails": [{"name": "\0", "better": "lower"}]}, "body"),
        ({"arms": {"a": {"bundle": "a\0b"}}}, "body"),
        ({"arms": {"a\0b": {"bundle": "zero"}}}, "arms"),
        ({"arms": {"a\nb": {"bundle": "zero"}}}, "arms"),
        ({"arms": {"": {"bundle": "zero"}}}, "arms"),
        ({"arms": {"x" * 101: {"bundle": "zero"}}}, "arms"),
        ({"arms": {"a": {"bundle": "zero", "weight": "Infinity"}}}, "arms.a.weight"),
        ({"arms": {"a": {"bundle": "zero", "weight": 1.7e308}, "b": {"bundle": "two"}}}, "arms"),
        ({"arms": {"a": {"bundle": "zero", "weight": 5e-324}, "b": {"bundle": "two"}}}, "arms"),
        ({"alpha": 5e-324}, "alpha"),
        ({"alpha_rollback": 5e-324}, "alpha_rollback"),
        ({"guardrails": [{"name": "cost", "alpha": 5e-324}]}, "guardrails"),
        ({"strategy": "gradual", "stages": [5e-324, 1]}, "stages"),
        ({"randomize": "switchback", "block_s": 5e-324}, "block_s"),
    ],
)
def test_experiments_that_nobody_could_run_are_not_made(change, field, client):
    made = {"name": "never", "arms": {"a": {"bundle": "zero"}, "b": {"bundle": "two"}}, "reason": "r"} | change
    answer = client.post("/v1/experiments", json=made)
    found = answer.json()["error"]["field"]
    assert answer.status_code == 400 and f"{found}.".startswith(f"{field}."), found
    assert client.get("/v1/experiments/never").status_code == 404


@pytest.mark.parametrize("name", ["%00", "%FF", "%ED%A0%80", "%", "%zz", "a;b", "%2565xp", "%41" * 9000, "x" * 60_000])
def test_names_in_paths_may_be_anything(name, client):
    for path, status in (
        ("/v1/experiments/{}", 404),
        ("/v1/experiments/{}/audit", 404),
        ("/v1/{}", 404),
        ("/ui/experiments/{}", 404),
    ):
        target = httpx.URL(client.base_url).copy_with(raw_path=path.format(name).encode())
        answer = client.get(target)
        assert_refused_or_done(answer)
        assert answer.status_code == status
    answer = client.post(httpx.URL(client.base_url).copy_with(raw_path=f"/models/{name}:1/load".encode()))
    assert_refused_or_done(answer)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-session-id", b"\xed\xa0\x80")],
        [(b"x-session-id", b"")],
        [(b"x-session-id", b"a" * 300)],
        [(b"x-session-id", b"a"), (b"x-session-id", b"b")],
        [(b"x-session-id", b"a"), (b"x-arm", b"\xff")],
        [(b"x-session-id", b"a"), (b"x-request-id", b"\xff")],
        [(b"x-session-id", b"a"), (b"authorization", b"Bearer \xff")],
        *([(b"x-request-timeout-seconds", value)] for value in (b"nan", b"-1", b"", b"\xb2", b"9" * 5000)),
    ],
)
def test_headers_may_be_anything(headers, client):
    assert_refused_or_done(client.post("/v1/act", json={"experiment": "exp", "observations": SEES}, headers=headers))


@pytest.mark.parametrize("length", [b"9" * 5000, b"9" * 30, b"11"])
def test_a_body_that_is_announced_too_long_is_not_waited_for(length):
    async def receive() -> Any:
        raise AssertionError("read")

    with pytest.raises(RequestError) as refused:
        asyncio.run(Request({"path": "/", "headers": [(b"content-length", length)]}, receive, 10).body())
    assert refused.value.status == 413
