"""The gateway in this process: outcomes, restarts, failures of its database, configs."""

import asyncio

import numpy as np
import pytest
from gymnasium import spaces
from stores.statements import noted_statements
from toy_serving.gateways import act, gateway_config, make_bundle, serving, windows_end, with_gateway
from waiting import until_async

from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.database.schema import exposures
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.reports import UnknownUnitError
from marl_ray.experiments.store.units import UnitStore
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.http import fields
from marl_ray.serving.logs.exposures import ExposureLog


async def test_outcomes_may_be_corrected_while_their_window_lasts_and_are_final_then(config):
    async with serving(config) as (client, app):

        async def post(value: float):
            return await client.post("/v1/outcomes", json={"session_id": "s", "value": value})

        async def report():
            return (await client.get("/v1/experiments/exp")).json()["arms"][arm]

        arm = (await act(client, "s"))["arm"]
        first, repeated, corrected = [await post(value) for value in (0.5, 0.5, 0.6)]
        in_window = await report()
        windows_end(app)
        final, late_change = await post(0.6), await post(0.7)
        judged = await report()
        corrections = app.service.stores.units.corrections("exp")
    assert {answer.status_code for answer in (first, repeated, corrected, final)} == {200}
    assert corrected.json() == {"experiment": "exp", "arm": arm, "value": 0.6, "counts": True}
    message = "session 's' already has outcome 0.6, got 0.7; its window of 600 s for corrections is over"
    assert late_change.status_code == 409
    assert late_change.json()["error"] == {"field": "value", "message": message}
    assert [(change.old, change.new, change.actor) for change in corrections] == [(0.5, 0.6, "anyone")]
    counts = ("exposures", "judged", "in_window", "outcomes", "mean")
    assert [in_window[key] for key in counts] == [1, 0, 1, 0, None]
    assert [judged[key] for key in counts] == [1, 1, 0, 1, 0.6]


async def test_what_comes_after_the_window_is_kept_and_does_not_count(config):
    async with serving(config) as (client, app):
        arm = (await act(client, "s"))["arm"]
        windows_end(app)
        post = await client.post("/v1/outcomes", json={"session_id": "s", "value": 0.5})
        report = (await client.get("/v1/experiments/exp")).json()["arms"][arm]
        stored = list(app.service.stores.units.outcomes("exp"))
    assert post.json()["arm"] == arm
    assert post.status_code == 200 and post.json()["counts"] is False
    assert "s after the session's outcome window of 600 s: it is kept and does not count" in post.json()["note"]
    assert (report["judged"], report["outcomes"]) == (1, 0) and stored[0].value == 0.5


async def test_outcomes_in_a_batch_are_answered_one_by_one(config):
    refused = [
        ({"session_id": "stranger", "value": 1}, (404, "session_id")),
        ({"session_id": "s", "value": "1"}, (400, "value")),
        ({"session_id": "s"}, (400, "value")),
        ({"session_id": "s", "value": 1, "at": 1e11}, (400, "at")),
        ({"session_id": "s", "value": 1, "at": "2026-01-31T12:00:00"}, (400, "at")),
        ({"session_id": "t", "value": 1, "at": None, "experiment": "none"}, (404, "experiment")),
        ({"session_id": "t", "value": 0, "more": 1}, (400, "more")),
    ]
    outcome = {"session_id": "s", "value": 1, "at": 1_700_000_000}
    cost = {"session_id": "s", "metrics": {"cost": 2}, "at": "2026-01-31T12:00:00+01:00"}
    named = {"session_id": "t", "value": 0, "experiment": "exp"}
    batch = [outcome, cost, *(part for part, _ in refused), named]

    async with serving(config) as (client, app):
        s, t = [(await act(client, session))["arm"] for session in "st"]
        answers = (await client.post("/v1/outcomes/batch", json={"outcomes": batch})).json()["answers"]
        to_outcome, to_cost, *refusals, to_named = answers
        stored = list(app.service.stores.units.outcomes("exp"))
        costs = list(app.service.stores.units.metric_values("exp", "cost"))
    assert to_outcome == {"experiment": "exp", "arm": s, "value": 1.0, "counts": True}
    assert to_cost == {"experiment": "exp", "arm": s, "counts": True}
    assert to_named == {"experiment": "exp", "arm": t, "value": 0.0, "counts": True}
    expected = [status_and_field for _, status_and_field in refused]
    assert [(answer["status"], answer["error"]["field"]) for answer in refusals] == expected
    assert {(row.unit, row.value) for row in stored} == {("s", 1.0), ("t", 0.0)}
    assert next(row.at for row in stored if row.unit == "s") == 1_700_000_000
    assert costs == [("s", 2.0)]


async def test_a_batch_without_outcomes_or_with_too_many_is_refused_as_one(config):
    outcomes = 257 * [{"session_id": "s", "value": 1}]
    async with serving(config) as (client, _):
        empty = await client.post("/v1/outcomes/batch", json={"outcomes": []})
        too_long = await client.post("/v1/outcomes/batch", json={"outcomes": outcomes})
    assert (empty.status_code, too_long.status_code) == (400, 413)


async def test_outcomes_outside_their_bounds_are_refused_and_the_exact_test_decides(config):
    """Also what the gateway measures itself, which is moved into its range."""
    rails = [{"name": "cost", "bounds": [0, 5]}, {"name": "latency_s", "winsorize": [0, 1]}]
    data = config.experiments[0].model_dump(mode="json") | {"bounds": [0, 1], "margin": "20%", "guardrails": rails}
    bounded = config.model_copy(update={"experiments": [parse_config(ExperimentConfig, data)]})

    async with serving(bounded) as (client, app):

        async def post(session: str, **values: object):
            return await client.post("/v1/outcomes", json={"session_id": session} | values)

        first = (await act(client, "s"))["arm"]
        refused = [await post("s", value=1.5), await post("s", value=0.5, metrics={"cost": -1})]
        assert list(app.service.stores.units.outcomes("exp")) == []
        arms = {"s": first} | {f"s{k}": (await act(client, f"s{k}"))["arm"] for k in range(80)}
        for session, arm in arms.items():
            assert (await post(session, value=float(arm == "one"), metrics={"cost": 1})).status_code == 200
        windows_end(app)
        report = (await client.get("/v1/experiments/exp")).json()
    assert [answer.status_code for answer in refused] == [400, 400]
    assert [answer.json()["error"] for answer in refused] == [
        {"field": "value", "message": "expected a number from 0 to 1, its bounds, got 1.5"},
        {"field": "metrics.cost", "message": "expected a number from 0 to 5, its bounds, got -1.0"},
    ]
    four = report["arms"]["four"]
    assert four["harm"]["proven"] and four["harm"]["margin"] == pytest.approx(0.2) and four["harm"]["bound"] < -0.2
    assert four["difference"] == -1 and four["difference_interval"][0] == -1 and report["warnings"] == []
    assert {rail["name"] for rail in report["guardrails"]} == {"cost", "latency_s", "error"}


async def test_the_report_has_lineage_intervals_and_a_verdict(config):
    rng = np.random.default_rng(0)

    async with serving(config) as (client, app):

        async def episode(i):
            arm = (await act(client, f"s{i}"))["arm"]
            sent = {"session_id": f"s{i}", "value": float(rng.normal(0.9 if arm == "four" else 0.1, 0.1))}
            assert (await client.post("/v1/outcomes", json=sent)).status_code == 200

        await asyncio.gather(*(episode(i) for i in range(60)))
        windows_end(app)
        report = (await client.get("/v1/experiments/exp")).json()
    arm_one, arm_four = report["arms"]["one"], report["arms"]["four"]
    assert report["control"] == "one"
    assert report["config"]["min_outcomes"] == 5
    (reports,) = report["reporting"]
    assert (reports["arm"], reports["reported"], reports["alarm"]) == ("four", arm_four["judged"], False)
    (warning,) = report["warnings"]
    assert "declare bounds or winsorize" in warning
    assert "verdict" not in arm_one
    assert arm_four["verdict"] == "better"
    assert arm_four["difference_interval"][0] < arm_four["difference"] < arm_four["difference_interval"][1]
    assert arm_four["interval"][0] < arm_four["mean"] < arm_four["interval"][1]
    assert arm_four["lineage"]["metrics"] == {"return": 0.5}
    assert len(arm_four["digest"]) == 64
    assert arm_one["exposures"] + arm_four["exposures"] == arm_one["outcomes"] + arm_four["outcomes"] == 60


async def test_a_fresh_experiment_knows_nothing_yet(config):
    async with serving(config) as (client, _):
        four = (await client.get("/v1/experiments/exp")).json()["arms"]["four"]
    assert (four["exposures"], four["outcomes"]) == (0, 0)
    assert {four[key] for key in ("mean", "variance", "interval", "difference", "difference_interval")} == {None}
    assert four["verdict"] == "undecided"


async def test_metrics_are_prometheus_text(config):
    async with serving(config) as (client, _):
        for _ in range(5):
            await act(client, "s")
        await client.get("/nowhere/at/all")
        text = (await client.get("/metrics")).text
    assert 'marl_ray_gateway_requests_total{endpoint="/v1/act",status="200"} 5.0' in text
    assert 'marl_ray_gateway_errors_total{endpoint="other",status="404"} 1.0' in text
    assert 'marl_ray_gateway_act_seconds_bucket{arm="one",experiment="exp",le="0.0005"}' in text
    exposure_lines = [line for line in text.splitlines() if line.startswith("marl_ray_gateway_exposures_total{")]
    assert sorted(line.split()[-1] for line in exposure_lines) == ["0.0", "1.0"]  # every arm shows from the start


def test_a_session_keeps_its_arm_through_restarts_and_new_weights(bundles, tmp_path):
    database = tmp_path / "experiments.db"

    async def arms(client):
        return {f"s{i}": await act(client, f"s{i}") for i in range(20)}

    async def new_arms(client):
        return [(await act(client, f"n{i}")) for i in range(20)]

    first = with_gateway(gateway_config(bundles, database), arms)
    assert with_gateway(gateway_config(bundles, database), arms) == first
    moved = gateway_config(bundles, database, weights=(0.0, 1.0))
    again = with_gateway(moved, arms)
    assert {name: answer["arm"] for name, answer in again.items()} == {n: answer["arm"] for n, answer in first.items()}
    for name, answer in again.items():  # who has been with arm "four" under all weights is not looked up
        assert answer["arm"] == "four" or answer == first[name]  # also its epoch and propensity
    fresh = with_gateway(moved, new_arms)
    assert {(a["arm"], a["epoch"], a["propensity"]) for a in fresh} == {("four", 2, 1.0)}
    assert with_gateway(gateway_config(bundles, database, weights=(1.0, 0.0)), arms) == first  # nobody's tables agree


async def test_after_a_change_of_weights_only_sessions_that_may_move_are_looked_up(bundles, tmp_path):
    database = tmp_path / "experiments.db"

    def lookups(statements):
        return sum("FROM exposures" in statement and "propensity" in statement for statement, _ in statements)

    async with serving(gateway_config(bundles, database)) as (client, _):
        await act(client, "first")
    async with serving(gateway_config(bundles, database, weights=(3.0, 1.0))) as (client, _):
        with noted_statements() as one_by_one:
            for i in range(60):
                await act(client, f"one by one {i}")
        with noted_statements() as at_once:
            await asyncio.gather(*(act(client, f"together {i}") for i in range(60)))
    assert 0 < lookups(one_by_one) < 30  # a quarter of the units move
    assert 0 < lookups(at_once) < 10


def test_weights_of_another_salt_are_no_past(bundles, tmp_path):
    database = tmp_path / "experiments.db"
    for weights in ((1.0, 1.0), (3.0, 1.0)):
        with_gateway(gateway_config(bundles, database, weights=weights), lambda client: act(client, "one"))
    stores = open_stores(f"sqlite:///{database}")
    assert stores.experiments.epoch_history("exp").weights == [{"one": 1, "four": 1}, {"one": 3, "four": 1}]
    config = stores.experiments.read("exp").config
    stores.experiments.open("exp", config | {"salt": "another"})
    assert stores.experiments.epoch_history("exp") is None and stores.experiments.epoch_history("nobody") is None
    stores.close()


async def test_exposures_survive_forgetting_and_a_full_queue(config, monkeypatch):
    monkeypatch.setattr("marl_ray.serving.routing.experiment.remembered_units.MAX_REMEMBERED", 3)

    async with serving(config) as (client, app):
        for i in range(20):
            await act(client, f"s{i % 10}")
        assert len(app.service.endpoints.routers["exp"].remembered.units) == 3
        app.service.exposures.capacity = 0
        await act(client, "late")
        app.service.exposures.capacity = 10
        first = (await client.get("/v1/experiments/exp")).json()
        await act(client, "late")
        dropped = app.service.exposures.dropped
        second = (await client.get("/v1/experiments/exp")).json()
    assert dropped == 1
    assert [sum(a["exposures"] for a in r["arms"].values()) for r in (first, second)] == [10, 11]


async def test_closing_writes_what_is_queued(config):
    async with serving(config) as (client, app):
        app.service.exposures.interval_s = 1e6  # from the second round on
        await act(client, "s")
    stores = open_stores(config.database)
    assert sum(arm.exposures for arm in stores.evidence.summary("exp").values()) == 1


async def test_the_lifespan_starts_and_stops(config):
    app, sent = Gateway(config), []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_failing_database_is_a_503_and_loses_nothing(config, monkeypatch):
    original, broken = UnitStore.record_exposures, [True]

    def record(self, rows):
        if broken and rows:
            raise StoreError("experiment store: disk full")
        original(self, rows)

    monkeypatch.setattr(UnitStore, "record_exposures", record)

    async with serving(config) as (client, _):
        await act(client, "s")  # acting does not need the database
        down = await client.post("/v1/outcomes", json={"session_id": "s", "value": 1})
        broken.clear()
        up = await client.post("/v1/outcomes", json={"session_id": "s", "value": 1})
    assert (down.status_code, up.status_code) == (503, 200)


async def test_an_outcome_waits_for_another_replicas_exposure(bundles, tmp_path, monkeypatch):
    config = gateway_config(bundles, tmp_path / "e.db", replicas=2)
    record, tries = UnitStore.record, []

    def noted(self, *arguments):
        tries.append(record(self, *arguments))
        return tries[-1]

    monkeypatch.setattr(UnitStore, "record", noted)

    async with serving(config) as (first_app, app), serving(config) as (two, _):
        monkeypatch.setattr(app.service.exposures, "flush", lambda: None)  # its exposure is under way ...
        await act(first_app, "s")
        post = asyncio.create_task(two.post("/v1/outcomes", json={"session_id": "s", "value": 1}))
        await until_async(lambda: tries, "a try to record it")
        ExposureLog.flush(app.service.exposures)  # ... and arrives
        assert (await post).status_code == 200
    assert isinstance(tries[0][0], UnknownUnitError) and len(tries) > 1


def test_arms_must_understand_the_same_requests(bundles, tmp_path):
    other = {
        "spaces": make_bundle(tmp_path, 2, observation=spaces.MultiDiscrete([3, 4, 6])),
        "agents": make_bundle(tmp_path, 2, agents=("solo",)),
        "missing": str(tmp_path / "nothing"),
    }
    messages = {
        "spaces": "agent 'agent_0' has other spaces",
        "agents": "plays agents solo",
        "missing": "no readable bundle",
    }
    for kind, message in messages.items():
        config = gateway_config(bundles | {"four": other[kind]}, tmp_path / "e.db")
        with pytest.raises(MarlRayError, match=rf"experiments\.exp\.arms\.four: .*{message}"):
            Gateway(config)


def test_constants_fit_the_database():
    assert exposures.c.unit.type.length >= fields.MAX_SESSION_LENGTH  # type: ignore[attr-defined]  # of SQLAlchemy's String
