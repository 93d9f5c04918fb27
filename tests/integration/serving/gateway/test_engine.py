"""The gateway as an engine: circuits, shadows, limits, deadlines, data kept."""

import json
import logging
import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from toy_serving.gateways import SEES, acts_of, bearer, keyed_config, make_bundle, serving, windows_end
from waiting import until_async

from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.experiments.lifecycle import Action, ExperimentStatus
from marl_ray.experiments.store.facade import open_stores
from marl_ray.serving.arms.response_cache import MemoryCache
from marl_ray.serving.logs.act_reader import read_logged
from marl_ray.serving.routing.breaker import CircuitState

OPS = bearer("ops")


@contextmanager
def write_lock(database: Path) -> Iterator[None]:
    """Nobody else can write meanwhile."""
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("ROLLBACK")
    connection.close()


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A bundle whose every pass fails."""
    return make_bundle(tmp_path / "broken", 2, bias=math.nan)


async def test_an_arm_that_fails_is_answered_for_by_the_control(bundles, broken, tmp_path):
    breaker = {"failures": 3, "open_s": 60}
    config = keyed_config(tmp_path, {"one": bundles["one"], "bad": broken}, breaker=breaker)

    async with serving(config) as (client, app):
        client.headers.update(OPS)
        answers = await acts_of(client, [f"s{k}" for k in range(40)])
        assert app.service.endpoints.routers["exp"].rules.state.status is ExperimentStatus.RUNNING
        metrics = (await client.get("/metrics")).text
        app.service.exposures.flush()
        exposed = {arm: s.exposures for arm, s in app.service.stores.evidence.summary("exp").items()}
    assert {answer["arm"] for answer in answers} == {"one"}
    stood_in = [answer for answer in answers if "fallback_for" in answer]
    assert stood_in and {answer["fallback_for"] for answer in stood_in} == {"bad"}
    assert exposed["bad"] == len(stood_in)  # the sessions stay the arm's: intention to treat
    assert 'marl_ray_gateway_arm_failures_total{arm="bad",experiment="exp"} 3.0' in metrics
    assert 'marl_ray_gateway_circuit{arm="bad",experiment="exp"} 1.0' in metrics


async def test_a_control_that_fails_is_a_503_with_a_time_to_come_again(bundles, broken, tmp_path):
    config = keyed_config(tmp_path, {"bad": broken, "one": bundles["one"]}, breaker={"failures": 2, "open_s": 30})

    async with serving(config) as (client, _):
        answers = []
        for k in range(60):
            body = {"session_id": f"s{k}", "observations": SEES}
            answers.append(await client.post("/v1/act", json=body, headers=OPS))
    assert {a.status_code for a in answers} == {200, 503}
    assert {a.json()["arm"] for a in answers if a.status_code == 200} == {"one"}
    assert {a.headers["retry-after"] for a in answers if a.status_code == 503} == {"1"}


async def test_shadows_get_copies_and_are_compared(bundles, tmp_path):
    config = keyed_config(tmp_path, {"one": bundles["one"], "four": bundles["four"]}, strategy="shadow")

    async with serving(config) as (client, app):
        client.headers.update(OPS)
        answers = await acts_of(client, [f"s{k}" for k in range(10)])
        totals = app.service.endpoints.routers["exp"].shadows.totals
        await until_async(lambda: "four" in totals and totals["four"].acts == 10, "ten copies")
        app.service.follower.decide()
        report = (await client.get("/v1/experiments/exp")).json()
        metrics = (await client.get("/metrics")).text
    assert {answer["arm"] for answer in answers} == {"one"}
    shadow = report["shadow"]["four"]
    assert (shadow["acts"], shadow["decisions"], shadow["agreed"], shadow["dropped"]) == (10, 20, 0, 0)
    assert report["arms"]["four"]["exposures"] == 0
    assert 'marl_ray_gateway_shadow{arm="four",count="acts",experiment="exp"} 10.0' in metrics


async def test_an_experiment_that_cannot_be_judged_keeps_no_other_from_it(bundles, tmp_path):
    bad = {"name": "aaa", "arms": {arm: {"bundle": bundles[arm]} for arm in ("one", "four")}}
    config = keyed_config(tmp_path, {"one": bundles["one"], "four": bundles["four"]}, strategy="shadow")
    config = config.model_copy(update={"experiments": (parse_config(ExperimentConfig, bad), *config.experiments)})

    async with serving(config) as (client, app):
        client.headers.update(OPS)
        await acts_of(client, [f"s{k}" for k in range(5)], experiment="exp")
        totals = app.service.endpoints.routers["exp"].shadows.totals
        await until_async(lambda: "four" in totals and totals["four"].acts == 5, "five copies")
        app.service.follower.close()
        router = app.service.endpoints.routers["aaa"]
        router.config = router.config.model_copy(update={"margin": -1.0})  # no test can be made of this
        app.service.follower.decide()
        assert (await client.get("/v1/experiments/exp")).json()["shadow"]["four"]["acts"] == 5


async def test_a_batch_answers_each_part_and_counts_as_many(bundles, tmp_path):
    config = keyed_config(tmp_path, bundles, {"max_batch_requests": 8, "rate_limit": {"per_s": 0.001, "burst": 6}})
    part = {"observations": SEES}

    async with serving(config) as (client, _):
        client.headers.update(OPS)
        parts = [part | {"session_id": "a"}, part | {"session_id": "b"}, part, {"sesion_id": "c"}]
        good = await client.post("/batch", json={"requests": parts})
        long = await client.post("/batch", json={"requests": [part] * 9})
        often = await client.post("/batch", json={"requests": [part | {"session_id": "d"}] * 3})
        wrong: list[dict[str, Any]] = [{}, {"requests": []}, {"requests": "x"}]
        rest = [await client.post("/batch", json=sent) for sent in wrong]
    single, two, nameless, misspelt = good.json()["answers"]
    assert single["actions"] and two["actions"]
    assert (nameless["status"], nameless["error"]["field"]) == (400, "session_id")
    assert (misspelt["status"], misspelt["error"]["field"]) == (400, "sesion_id")
    assert (long.status_code, often.status_code) == (413, 429)
    assert int(often.headers["retry-after"]) > 100
    assert [answer.status_code for answer in rest] == [400, 400, 400]


async def test_rates_are_limited_by_key(bundles, tmp_path):
    config = keyed_config(tmp_path, bundles, {"rate_limit": {"per_s": 0.001, "burst": 2}})

    async with serving(config) as (client, _):
        sent = {"session_id": "s", "observations": SEES}
        assert [
            (await client.post("/v1/act", json=sent, headers=bearer(k))).status_code for k in ("ops",) * 3 + ("game",)
        ] == [200, 200, 429, 200]


async def test_requests_have_ids_deadlines_and_lines_in_the_log(bundles, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "marl_ray.access")

    app_config = keyed_config(tmp_path, bundles)
    async with serving(app_config) as (client, _):
        with_id = await client.get("/health", headers={"x-request-id": "mine-1"})
        bad = await client.get("/v1/experiments/none", headers=OPS | {"x-request-id": "two\tlines"})
        wishes = [await client.get("/health", headers={"x-request-timeout-seconds": s}) for s in ("soon", "nan")]
        with write_lock(tmp_path / "experiments.db"):
            headers = OPS | {"x-request-timeout-seconds": "0.2"}
            late = await client.post("/v1/experiments/exp/pause", json={"reason": "r"}, headers=headers)
    assert with_id.headers["x-request-id"] == "mine-1"
    assert bad.headers["x-request-id"] != "two\tlines" and len(bad.headers["x-request-id"]) > 8
    refused = [(wish.status_code, wish.json()["error"]["field"]) for wish in wishes]
    assert refused == [(400, "x-request-timeout-seconds")] * 2
    assert late.status_code == 504 and "no answer within 0.2 s" in late.text
    lines = [json.loads(record.message) for record in caplog.records if record.name == "marl_ray.access"]
    assert [line["status"] for line in lines] == [404, 400, 400, 504]
    assert lines[0]["request_id"] == bad.headers["x-request-id"] and lines[0]["path"] == "/v1/experiments/none"


@pytest.mark.parametrize("url", ["memory:"])
async def test_greedy_answers_are_kept(bundles, tmp_path, monkeypatch, url):
    config = keyed_config(tmp_path, bundles, {"cache": {"url": url}})

    async with serving(config) as (client, app):
        client.headers.update(OPS)
        first = await acts_of(client, [f"s{k}" for k in range(12)], mode="greedy")
        for arm in app.service.endpoints.routers["exp"].arms.values():
            monkeypatch.setattr(arm, "act", None)  # an answer that is not kept would fail
        again = await acts_of(client, [f"s{k}" for k in range(12)], mode="greedy")
    assert first == again and {a["arm"] for a in first} == {"one", "four"}


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"actions": 5, "log_probs": {}}'])
async def test_what_others_put_into_the_cache_is_no_answer(bundles, tmp_path, monkeypatch, value):
    keys: list[bytes] = []
    put = MemoryCache.put

    async def noted(cache: MemoryCache, key: bytes, answer: bytes) -> None:
        keys.append(key)
        await put(cache, key, answer)

    monkeypatch.setattr(MemoryCache, "put", noted)
    async with serving(keyed_config(tmp_path, bundles, {"cache": {"url": "memory:"}})) as (client, app):
        client.headers.update(OPS)
        first = await acts_of(client, ["s"], mode="greedy")
        [key] = keys
        await put(app.service.cache, key, value)
        assert await acts_of(client, ["s"], mode="greedy") == first
        assert keys == [key] * 2  # its arm was asked again


async def test_a_kept_answer_is_no_success_of_its_arm(bundles, tmp_path):
    """Two failures in a row open the circuit, whatever the cache has answered between them."""
    config = keyed_config(tmp_path, bundles, {"cache": {"url": "memory:"}}, breaker={"failures": 2})

    async with serving(config) as (client, app):
        client.headers.update(OPS)
        (first,) = await acts_of(client, ["s"], mode="greedy")
        circuit = app.service.endpoints.routers["exp"].circuits[first["arm"]]
        circuit.failure(circuit.allow())
        assert await acts_of(client, ["s"], mode="greedy") == [first]
        circuit.failure(circuit.allow())
        assert circuit.state is CircuitState.OPEN


async def test_shadows_get_copies_of_requests_with_kept_answers_too(bundles, tmp_path):
    arms = {"one": bundles["one"], "same": bundles["one"], "four": bundles["four"]}
    config = keyed_config(tmp_path, arms, {"cache": {"url": "memory:"}}, strategy="shadow")

    async with serving(config) as (client, app):
        client.headers.update(OPS)
        await acts_of(client, [f"s{k}" for k in range(6)], mode="greedy")
        totals = app.service.endpoints.routers["exp"].shadows.totals
        await until_async(lambda: [t.acts for t in totals.values()] == [6, 6], "six copies of each treatment")
    assert {arm: (t.decisions, t.agreed, t.dropped) for arm, t in totals.items()} == {
        "same": (12, 12, 0),
        "four": (12, 0, 0),
    }


async def test_decisions_are_kept_for_training(bundles, tmp_path):
    config = keyed_config(tmp_path, bundles, {"decision_log": str(tmp_path / "log")})

    async with serving(config) as (client, _):
        client.headers.update(OPS)
        answers = await acts_of(client, ["a", "b", "a"])
    decisions = list(read_logged(str(tmp_path / "log"), "exp"))
    assert sorted(d.unit for d in decisions) == ["a", "a", "b"]
    assert {d.arm for d in decisions} == {a["arm"] for a in answers}
    assert decisions[0].observations == SEES and set(decisions[0].log_probs) == set(SEES)


async def test_models_are_listed_and_loaded_ahead(bundles, tmp_path):
    more = {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    async with serving(keyed_config(tmp_path, bundles, more)) as (client, _):
        listed = (await client.get("/v1/models", headers=OPS)).json()["models"]
        codes = [
            (await client.post(path, headers=headers)).status_code
            for path, headers in (
                ("/models/x:1/load", bearer("game")),
                ("/models/nameless/load", OPS),
                ("/models/none:1/load", OPS),
            )
        ]
    assert sorted(arm for row in listed for arm in row["arms"]) == ["exp/four", "exp/one"]
    assert codes == [403, 400, 409]


async def test_text_is_refused_by_policies_that_have_none(config):
    async with serving(config) as (client, _):
        refused = await client.post("/generate", json={"prompt": "x"})
    assert refused.status_code == 422 and "expected token policies" in refused.text


async def test_clusters_share_an_arm(bundles, tmp_path):
    config = keyed_config(tmp_path, bundles, randomize="cluster")

    async with serving(config) as (client, _):
        client.headers.update(OPS)
        arms_of: dict[str, set[str]] = {}
        for k in range(60):
            answer = (await acts_of(client, [f"s{k}"], cluster_id=f"match-{k % 12}"))[0]
            arms_of.setdefault(f"match-{k % 12}", set()).add(answer["arm"])
    assert {len(arms) for arms in arms_of.values()} == {1}
    assert {arm for arms in arms_of.values() for arm in arms} == {"one", "four"}


async def test_the_guardrails_error_and_latency_are_measured_here(bundles, broken, tmp_path):
    rails = [{"name": "error", "margin": 0.1}, {"name": "latency_s", "margin": 1.0}]
    arms = {"one": bundles["one"], "bad": broken}
    breaker = {"failures": 1000}
    config = keyed_config(tmp_path, arms, guardrails=rails, breaker=breaker, min_outcomes=30)

    async with serving(config) as (client, app):
        client.headers.update(OPS)
        for k in range(100):
            await acts_of(client, [f"s{k}"])
            await client.post("/v1/outcomes", json={"session_id": f"s{k}", "value": k % 2})
        windows_end(app)
        await until_async(lambda: "bad" in app.service.endpoints.routers["exp"].rules.state.rolled_back, "the rollback")
        report = (await client.get("/v1/experiments/exp")).json()
        (errors, latency) = report["guardrails"]
        entry = app.service.stores.experiments.audit("exp")[-1]
    assert (errors["mean"], errors["control_mean"], errors["proven"]) == (1, 0, True)
    assert 0 < latency["control_mean"] < 1 and not latency["proven"]
    assert (entry.action, entry.reason) == (Action.ROLLBACK.value, "harm proven by error")


async def test_a_config_with_one_arm_is_served_as_it_is(bundles, tmp_path):
    async with serving(keyed_config(tmp_path, {"one": bundles["one"]})) as (client, _):
        client.headers.update(OPS)
        answers = await acts_of(client, [f"s{k}" for k in range(5)])
        report = (await client.get("/v1/experiments/exp")).json()
    assert {a["arm"] for a in answers} == {"one"} and report["arms"]["one"]["exposures"] == 5


async def test_acting_goes_on_without_the_database_and_its_exposures_arrive_later(bundles, tmp_path):
    config = keyed_config(tmp_path, bundles)
    database = tmp_path / "experiments.db"

    async with serving(config) as (client, app):
        client.headers.update(OPS)
        with write_lock(database):
            answers = await acts_of(client, [f"s{k}" for k in range(50)])
        await until_async(lambda: app.service.exposures.waiting == 0, "all exposures to leave memory")
    stores = open_stores(f"sqlite:///{database}")
    assert {unit: stores.units.assignment("exp", unit).arm for unit in (f"s{k}" for k in range(50))} == {
        f"s{k}": answer["arm"] for k, answer in enumerate(answers)
    }
    stores.close()
