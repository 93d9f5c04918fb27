"""Keys open paths of the HTTP API to their holders; the stories of an outcome and of an experiment, over real HTTP."""

import httpx
import pytest
from toy_serving.gateways import SEES, bearer
from toy_serving.sites import KEYS, TEXTS, act, client, site
from waiting import until

from marl_ray.serving.handlers.route import Route
from marl_ray.serving.handlers.route_table import ROUTES

__all__ = ["client", "site"]
CLIENTS = ("/v1/act", "/v1/assign", "/batch", *TEXTS, "/v2/models/{name}/infer", "/v1/outcomes", "/v1/outcomes/batch")
"""The paths that players' keys open; every other POST is for admins."""


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
