"""The whole HTTP API against its OpenAPI document: generated requests over real HTTP, none of which may be a defect."""

import copy
import json
import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from toy_serving.gateways import AGENTS, SEES, bearer
from toy_serving.sites import KEYS, SESSIONS, TEXTS, act, client, site, text_site
from waiting import until

from marl_ray.serving.handlers.api_description.document import openapi
from marl_ray.serving.handlers.route import Route
from marl_ray.serving.handlers.routes import ROUTES

__all__ = ["client", "site", "text_site"]
THOROUGH = "THOROUGH" in os.environ
load_all_checks()
FRAMING = ("content-length", "transfer-encoding")
"""Headers that say where a request ends: the HTTP server reads them, and refuses or awaits a request before the gateway
sees it."""
LOADING_S = 120.0
"""The first question to a model registry makes its database."""
CLIENTS = ("/v1/act", "/v1/assign", "/batch", *TEXTS, "/v2/models/{name}/infer", "/v1/outcomes", "/v1/outcomes/batch")
"""The paths that players' keys open; every other POST is for admins."""


@schemathesis.hook
def before_call(context, case, kwargs):
    """Requests are made of names in the source too, and the source names headers. The client alone writes these."""
    for name in [name for name in case.headers or {} if name.lower() in FRAMING]:
        del case.headers[name]


def document() -> dict[str, Any]:
    """The gateway's own, with values that exist there, so that requests come through."""
    schema = json.loads(openapi(ROUTES, "", True))
    parts = schema["components"]
    name = parts["parameters"]["name"]
    name["schema"] = {"anyOf": [{"enum": ["exp", "other", "new", "none"]}, name["schema"]]}
    # Any deadline may be missed, and then the answer is a 504.
    timeout = {"$ref": "#/components/parameters/x-request-timeout-seconds"}
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["parameters"].remove(timeout)
    schemas = parts["schemas"]
    new = schemas["ExperimentRequest"] = copy.deepcopy(schemas["ExperimentRequest"])
    new["properties"]["name"] = {"anyOf": [{"enum": ["exp", "new", "newer"]}, new["properties"]["name"]]}
    arm = new["properties"]["arms"]["additionalProperties"] = copy.deepcopy(schemas["ArmConfig"])
    arm["properties"]["bundle"] = {"enum": ["one", "four", "/no/such/bundle"]}
    for name in ("url", "model", "api_key_env", "deadline_s", "price"):  # nobody but this machine is to be asked
        del arm["properties"][name]
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
    return schema


schema = schemathesis.openapi.from_dict(document())
if not THOROUGH:
    schema = schema.exclude(path=list(TEXTS))  # a gateway of language models answers these, and refuses most


def text_document() -> dict[str, Any]:
    """Likewise for the routes of language models; texts are short, to take little time."""
    schema = document()
    schema["paths"] = {path: schema["paths"][path] for path in TEXTS}
    schemas = schema["components"]["schemas"]
    for name, field in (("GenerateRequest", "experiment"), ("ChatRequest", "model"), ("CompletionRequest", "model")):
        properties = schemas[name]["properties"] = copy.deepcopy(schemas[name]["properties"])
        properties[field] = {"enum": ["exp"]}
        properties["max_tokens"]["maximum"] = 20
    schemas["GenerateRequest"]["properties"]["agent"] = {"enum": ["writer", None]}
    return schema


text_schema = schemathesis.openapi.from_dict(text_document())
RANDOM = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
"""Random requests alone. Without a key nothing of a request is read, so each of its boundaries is met with a key."""
keyless_schema = schemathesis.openapi.from_dict(document(), config=RANDOM)
MORE = 8 if THOROUGH else 1
"""`make test-all` makes so many times as many requests."""
HELD = ("ops", "game") if THOROUGH else ("ops",)
"""A player's key opens fewer paths (`test_what_admins_may_do_nobody_else_may`), and those alike."""


@pytest.mark.parametrize("key", HELD)
@schema.parametrize()
@settings(max_examples=10 * MORE, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_a_defect_and_answers_are_as_described(case, key, site):
    excluded = [positive_data_acceptance]  # most requests that are well-formed ask for what does not exist
    if case.operation.path in ("/batch", "/v1/outcomes/batch"):
        excluded.append(negative_data_rejection)  # parts have statuses of their own
    case.call_and_validate(base_url=site.url, headers=KEYS[key], excluded_checks=excluded, timeout=LOADING_S)


@pytest.mark.parametrize("key", HELD)
@text_schema.parametrize()
@settings(max_examples=15 * MORE, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_for_a_text_is_a_defect(case, key, text_site):
    case.call_and_validate(
        base_url=text_site.url, headers=KEYS[key], excluded_checks=[positive_data_acceptance], timeout=LOADING_S
    )


@keyless_schema.parametrize()
@settings(max_examples=3 * MORE, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_without_a_key_is_a_defect(case, site):
    case.call_and_validate(base_url=site.url, excluded_checks=[positive_data_acceptance], timeout=LOADING_S)


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
    answers = [
        httpx.post(f"{site.url}{path.format(name='exp')}", json={}, headers=shown) for shown in ({}, bearer("wrong"))
    ]
    assert [answer.status_code for answer in answers] == [401, 401]


def test_players_cannot_choose_their_arm(site):
    sent = {"experiment": "exp", "session_id": "s", "observations": SEES}
    headers = KEYS["game"] | {"x-arm": "four"}
    for path, body in (("/v1/act", sent), ("/batch", {"requests": [sent]})):
        answer = httpx.post(f"{site.url}{path}", json=body, headers=headers)
        assert answer.status_code == 403 or answer.json()["answers"][0]["status"] == 403


def test_act_then_outcome_then_report(client, site):
    made = {"name": "sequence", "arms": {"a": {"bundle": "zero"}, "b": {"bundle": "two"}}, "reason": "r"}
    assert client.post("/v1/experiments", json=made | {"outcome_window_s": 3.0}).status_code == 201
    arms = {}

    def tell(k: int, value: float, cost: float) -> httpx.Response:
        named = {"experiment": "sequence", "session_id": f"s{k}"}
        return client.post("/v1/outcomes", json=named | {"value": value, "metrics": {"cost": cost}})

    for k in range(12):
        arms[k] = act(client, session=f"s{k}", experiment="sequence")["arm"]
        reports = [tell(k, value, k) for value in (-1, k, k)]
        assert [answer.status_code for answer in reports] == [200, 200, 200]
        assert reports[1].json() == {"experiment": "sequence", "arm": arms[k], "value": float(k), "counts": True}

    def judged() -> bool:
        arms_now = client.get("/v1/experiments/sequence").json()["arms"]
        return sum(arm["outcomes"] for arm in arms_now.values()) == len(arms)

    until(judged, "the end of all windows")
    for k in range(12):
        refused = [tell(k, k, -1), tell(k, -1, k), tell(k, k, k)]
        assert [answer.status_code for answer in refused] == [409, 409, 200]
        assert [answer.json()["error"]["field"] for answer in refused[:2]] == ["metrics.cost", "value"]
    report = client.get("/v1/experiments/sequence").json()
    for arm in ("a", "b"):
        sessions = [k for k in arms if arms[k] == arm]
        assert (report["arms"][arm]["exposures"], report["arms"][arm]["outcomes"]) == (len(sessions), len(sessions))
        assert report["arms"][arm]["mean"] == pytest.approx(sum(sessions) / len(sessions))


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
