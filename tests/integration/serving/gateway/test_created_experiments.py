"""Experiments that are created over HTTP: every replica has them, and an endpoint outlives them."""

import pytest
from toy_serving.gateways import SEES, acts_of, bearer, keyed_config, serving
from waiting import until_async

OPS = bearer("ops")


async def test_an_experiment_created_over_http_reaches_every_replica(bundles, tmp_path):
    config = keyed_config(tmp_path, bundles)
    new = {
        "name": "new",
        "arms": {"a": {"bundle": bundles["one"]}, "b": {"bundle": bundles["four"]}},
        "strategy": "gradual",
        "reason": "try it",
    }

    async with serving(config) as (first, _), serving(config) as (second, other):
        made = await first.post("/v1/experiments", json=new, headers=OPS)
        twice = await first.post("/v1/experiments", json=new, headers=OPS)
        await until_async(
            lambda: "new" in other.service.endpoints.routers and other.service.endpoints.routers["new"].arms,
            "the other replica to load the arms",
        )
        answer = await second.post(
            "/v1/act", json={"experiment": "new", "session_id": "s", "observations": SEES}, headers=OPS
        )
        audit = (await second.get("/v1/experiments/new/audit", headers=OPS)).json()["audit"]
    async with serving(config) as (_, app):  # and after a restart
        assert app.service.endpoints.routers["new"].arms.keys() == {"a", "b"}
    assert made.status_code == 201 and made.json()["status"] == "running"
    assert (twice.status_code, twice.json()["error"]["field"]) == (409, "name")
    assert answer.json()["experiment"] == "new"
    assert [(entry["action"], entry["actor"], entry["reason"]) for entry in audit] == [("open", "ops", "try it")]


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"reason": ""}, 400, "reason"),
        ({"arms": {}}, 400, "arms"),
        ({"stages": [0.5, 0.1]}, 400, "stages"),
        ({"weight": 1}, 400, "weight"),
        ({"arms": {"a": {"bundle": "/no/such/bundle"}}}, 409, "experiment"),
        ({"placement": "deployment"}, 409, "experiment"),
    ],
)
async def test_experiments_that_cannot_be_are_refused(bundles, tmp_path, change, status, field):
    new = {"name": "new", "arms": {"a": {"bundle": bundles["one"]}}, "reason": "r"} | change

    async with serving(keyed_config(tmp_path, bundles)) as (client, _):
        refused = await client.post("/v1/experiments", json=new, headers=OPS)
        rows = (await client.get("/v1/experiments", headers=OPS)).json()["experiments"]
    assert (refused.status_code, refused.json()["error"]["field"]) == (status, field), refused.text
    assert [row["name"] for row in rows] == ["exp"]


async def test_an_endpoint_outlives_its_experiments_and_sessions_finish_where_they_began(bundles, tmp_path):
    config = keyed_config(tmp_path, bundles)
    arms = {"production": {"bundle": bundles["four"]}, "candidate": {"bundle": bundles["one"]}}
    new = {"name": "exp-2", "endpoint": "exp", "arms": arms, "reason": "next"}

    async with serving(config) as (client, app), serving(config) as (other, second):
        client.headers.update(OPS)
        other.headers.update(OPS)
        before = await acts_of(client, [f"s{k}" for k in range(10)])
        busy = await client.post("/v1/experiments", json=new)
        for action in ("promote",):
            await client.post(f"/v1/experiments/exp/{action}", json={"reason": "good", "arm": "four"})
        where = (await client.get("/v1/endpoints")).json()["endpoints"]["exp"]
        made = await client.post("/v1/experiments", json=new)
        await until_async(lambda: "exp-2" in second.service.endpoints.routers, "the other replica to follow")
        app.service.exposures.flush()
        again = [await acts_of(c, [f"s{k}" for k in range(10)], experiment="exp") for c in (client, other)]
        fresh = await acts_of(other, ["fresh"], experiment="exp")
        posts = [
            (await client.post("/v1/outcomes", json={"session_id": s, "value": 1, "experiment": "exp"})).json()
            for s in ("s0",)
        ]
    assert busy.status_code == 409 and "exp" in busy.text
    assert where["production"]["arm"] == "four" and where["production"]["bundle"] == bundles["four"]
    assert made.status_code == 201, made.text
    for answers in again:
        assert [(a["experiment"], a["arm"]) for a in answers] == [("exp", a["arm"]) for a in before]
    assert fresh[0]["experiment"] == "exp-2"
    assert posts[0]["experiment"] == "exp"
