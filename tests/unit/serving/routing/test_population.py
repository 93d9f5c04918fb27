"""The units that an experiment takes: its share of all, attributes, and an endpoint's hold-out."""

import asyncio
import itertools
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_serving.gateways import act, serving
from toy_serving.gateways import gateway_config as config_of
from waiting import until_async

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.experiments.assignment.rendezvous import is_held_out_unit, is_in_layer, is_in_share
from marl_ray.experiments.lifecycle import Action
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.routing.experiment import remembered_units


def gateway(bundles, tmp_path, population: dict[str, Any] | None = None, **more: Any) -> GatewayConfig:
    config = config_of(bundles, tmp_path / "x.db", **more)
    experiment = config.experiments[0].model_dump(mode="json") | {"population": population or {}}
    return parse_config(GatewayConfig, config.model_dump(mode="json") | {"experiments": [experiment]})


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ([], "attributes"),
        ({"": 1}, "attributes"),
        ({"n" * 101: 1}, "attributes"),
        ({f"n{k}": 1 for k in range(33)}, "attributes"),
        ({"x": None}, "attributes.x"),
        ({"x": [1]}, "attributes.x"),
        ({"x": "t" * 257}, "attributes.x"),
        ({"x": "\u0000"}, "attributes.x"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/act", "/v1/assign"])
async def test_bad_attributes_are_named(bundles, tmp_path, attributes, field, path):
    async with serving(gateway(bundles, tmp_path)) as (client, _):
        sent = {"session_id": "s", "attributes": attributes} | (
            {"observations": {"agent_0": [0, 1, 2]}} if "act" in path else {}
        )
        answer = await client.post(path, json=sent)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


async def test_units_outside_of_the_population_are_with_the_control_and_not_counted(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"share": 0.5, "attributes": {"country": ["de", "at"], "paid": [True]}})

    async with serving(config) as (client, app):
        right = {f"s{k}": (await act(client, f"s{k}", attributes={"country": "at", "paid": True})) for k in range(80)}
        for k, wrong in enumerate([{"country": "de"}, {"country": "fr", "paid": True}, {"country": "de", "paid": 1}]):
            for n in range(10):
                assert (await act(client, f"w{k}-{n}", attributes=wrong))["arm"] == "one"
        assert (await act(client, "none"))["arm"] == "one"
        app.service.exposures.flush()
        stored = {unit for unit in right if app.service.stores.units.assignment("exp", unit)}
        summary = app.service.stores.evidence.summary("exp")
    assert stored == {unit for unit in right if is_in_share("exp", 0.5, unit)} and 20 < len(stored) < 60
    assert {right[unit]["arm"] for unit in right if unit not in stored} == {"one"}
    assert sum(arm.exposures for arm in summary.values()) == len(stored)


async def test_clusters_take_part_or_are_held_out_as_wholes(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"share": 0.5}, holdouts={"exp": 0.3})
    config = config.model_copy(
        update={"experiments": [config.experiments[0].model_copy(update={"randomize": "cluster"})]}
    )

    async with serving(config) as (client, app):
        for cluster in (f"c{k}" for k in range(20)):
            answers = [await act(client, f"{cluster}-{k}", cluster_id=cluster) for k in range(2)]
            app.service.exposures.flush()
            out, inside = is_held_out_unit("exp", 0.3, cluster), is_in_share("exp", 0.5, cluster)
            stored = [app.service.stores.units.assignment("exp", f"{cluster}-{k}") is not None for k in range(2)]
            assert [answer.get("holdout", False) for answer in answers] == [out, out]
            assert stored == [inside and not out] * 2


def test_a_unit_keeps_its_place_in_a_layer_in_whatever_cluster_it_comes(bundles, tmp_path):
    """Two experiments share an endpoint's clusters by halves; the second time a player comes in a match of the other's."""
    config = config_of(bundles, tmp_path / "x.db", names=("low", "high"))
    shares = {"low": (0.0, 0.5), "high": (0.5, 1.0)}
    more = {"randomize": "cluster", "layer": "l", "endpoint": "game"}
    experiments = [e.model_copy(update=more | {"layer_share": shares[e.name]}) for e in config.experiments]
    both = config.model_copy(update={"experiments": experiments})
    alone = config.model_copy(update={"experiments": experiments[:1]})
    clusters = {
        name: [f"c{k}" for k in range(40) if is_in_layer("l", share, f"c{k}")] for name, share in shares.items()
    }
    units = [f"s{k}" for k in range(12)]

    async def arms(config: GatewayConfig, first: str) -> list[tuple[str, str]]:
        async with serving(config) as (client, app):
            arms_seen = []
            for k, unit in enumerate(units):
                answer = await act(client, unit, cluster_id=clusters[first][k], experiment="game")
                arms_seen.append((answer["experiment"], answer["arm"]))
            app.service.exposures.flush()
            return arms_seen

    before = asyncio.run(arms(both, "low"))
    assert {experiment for experiment, _ in before} == {"low"} and {arm for _, arm in before} == {"one", "four"}
    for config in (both, alone):  # replicas that remember nothing
        assert asyncio.run(arms(config, "high")) == before

    # One that remembers.
    async def moved() -> list[dict[str, Any]]:
        async with serving(both) as (client, _):
            return [
                await act(client, "new", cluster_id=clusters[name][0], experiment="game") for name in ("high", "low")
            ]

    unmoved, other = asyncio.run(moved())
    assert unmoved["experiment"] == other["experiment"] == "high" and unmoved["arm"] == other["arm"]


async def test_treatments_get_no_copies_of_what_units_outside_of_the_population_ask(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"share": 0.5})
    config = config.model_copy(
        update={"experiments": [config.experiments[0].model_copy(update={"strategy": "shadow"})]}
    )

    async with serving(config) as (client, app):
        for k in range(20):
            await act(client, f"s{k}")
        shadows = app.service.endpoints.routers["exp"].shadows
        inside = sum(is_in_share("exp", 0.5, f"s{k}") for k in range(20))
        await until_async(lambda: shadows.totals["four"].acts >= inside, f"{inside} copies")
        await shadows.close()
        assert shadows.totals["four"].acts == inside


async def test_what_a_unit_has_met_it_keeps_whatever_its_attributes_are_later(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"attributes": {"country": ["de"]}}, weights=(1.0, 1e6))
    inside, outside = {"attributes": {"country": "de"}}, {"attributes": {"country": "fr"}}

    async with serving(config) as (client, app):
        assert (await act(client, "s", **inside))["arm"] == "four"
        assert (await act(client, "s", **outside))["arm"] == (await act(client, "s"))["arm"] == "four"
        assert (await act(client, "late", **outside))["arm"] == "one"
        assert (await act(client, "late", **inside))["arm"] == "four"
        assert (await act(client, "late", **outside))["arm"] == "four"
        app.service.exposures.flush()
    async with serving(config) as (client, app):  # which remembers nothing
        assert [(await act(client, unit, **outside))["arm"] for unit in ("s", "late", "new")] == [
            "four",
            "four",
            "one",
        ]


@pytest.mark.parametrize("later", [{"share": 0.01}, {"attributes": {"country": ["de"]}}])
def test_a_population_that_changes_is_an_epoch_and_leaves_everyone_where_they_are(bundles, tmp_path, later):
    before = gateway(bundles, tmp_path, {"share": 0.5})
    after = gateway(bundles, tmp_path, later, weights=(1.0, 3.0))

    async def arms(config: GatewayConfig, expected_epoch: int) -> dict[str, tuple[str, bool]]:
        async with serving(config) as (client, app):
            assert app.service.endpoints.routers["exp"].rules.state.epoch == expected_epoch
            arms_by_unit = {f"s{k}": (await act(client, f"s{k}"))["arm"] for k in range(60)}
            app.service.exposures.flush()
            return {
                unit: (arm, app.service.stores.units.assignment("exp", unit) is not None)
                for unit, arm in arms_by_unit.items()
            }

    first, second = asyncio.run(arms(before, 1)), asyncio.run(arms(after, 2))
    assert 10 < sum(met for _, met in first.values()) < 50
    assert second == first


async def test_units_that_never_can_have_been_in_are_not_looked_up(bundles, tmp_path, monkeypatch):
    for population in ({"share": 0.5}, {"share": 0.4}):
        async with serving(gateway(bundles, tmp_path, population)) as (client, app):
            units_read: list[str] = []
            read = app.service.assigner.lookups.look_up

            async def look_up(experiment: str, unit: str, read=read, units_read=units_read) -> Any:
                units_read.append(unit)
                return await read(experiment, unit)

            monkeypatch.setattr(app.service.assigner.lookups, "look_up", look_up)
            for k in range(60):
                await act(client, f"s{population['share']}-{k}")
    between = {
        f"s0.4-{k}"
        for k in range(60)
        if not is_in_share("exp", 0.4, f"s0.4-{k}") and is_in_share("exp", 0.5, f"s0.4-{k}")
    }
    assert set(units_read) == between and len(units_read) == len(between)


async def test_units_that_are_held_out_meet_no_experiment_and_are_told_so(bundles, tmp_path):
    config = gateway(bundles, tmp_path, weights=(1.0, 1e6), holdouts={"exp": 0.3})

    async with serving(config) as (client, app):
        answers = {f"s{k}": await act(client, f"s{k}") for k in range(60)}
        report = await client.post(
            "/v1/assign", json={"session_id": next(u for u in answers if is_held_out_unit("exp", 0.3, u))}
        )
        app.service.exposures.flush()
        stored = {unit for unit in answers if app.service.stores.units.assignment("exp", unit)}
        report = report.json()
        metrics = (await client.get("/metrics")).text
    out = {unit for unit in answers if is_held_out_unit("exp", 0.3, unit)}
    assert {unit for unit, answer in answers.items() if answer.get("holdout")} == out and 5 < len(out) < 35
    assert all(answers[unit]["arm"] == "one" for unit in out) and stored == answers.keys() - out
    assert (report["holdout"], report["exposed"], report["arm"]) == (True, False, "one")
    assert f'marl_ray_gateway_holdouts_total{{endpoint="exp"}} {len(out) + 1}.0' in metrics


async def test_a_hold_out_that_begins_later_leaves_units_with_what_they_have_met(bundles, tmp_path):
    async with serving(gateway(bundles, tmp_path, weights=(1.0, 1e6))) as (client, app):
        assert {(await act(client, f"s{k}"))["arm"] for k in range(20)} == {"four"}
        app.service.exposures.flush()
    async with serving(gateway(bundles, tmp_path, weights=(1.0, 1e6), holdouts={"exp": 0.5})) as (client, app):
        old = [await act(client, f"s{k}") for k in range(20)]
        new = [await act(client, f"t{k}") for k in range(20)]
    assert all(answer["arm"] == "four" and "holdout" not in answer for answer in old)
    assert {answer["arm"] for answer in new} == {"one", "four"}
    assert all((answer["arm"] == "one") == answer.get("holdout", False) for answer in new)


async def test_a_promoted_arm_is_for_those_outside_too_and_not_for_the_hold_out(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"share": 0.3}, holdouts={"exp": 0.3})

    async with serving(config) as (client, app):
        app.service.stores.experiments.change("exp", Action.PROMOTE, epoch=1, actor="a", reason="r", arm="four")
        app.service.follower.poll()
        answers = {f"s{k}": await act(client, f"s{k}") for k in range(40)}
    for unit, answer in answers.items():
        assert answer["arm"] == ("one" if is_held_out_unit("exp", 0.3, unit) else "four")


ACTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["de", "fr", None]), st.booleans()), max_size=12)


@given(ACTS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_over_all_histories_and_replicas_a_unit_is_in_from_its_first_right_request_on(histories, acts):
    """Two replicas; before each act what was met before is stored, and nobody remembers a no."""
    clients, apps, numbers = histories
    history, inside = next(numbers), set[str]()

    async def play() -> None:
        for number, country, second in acts:
            unit = f"h{history}-{number}"
            if country == "de" and is_in_share("exp", 0.7, unit):
                inside.add(unit)
            more = {} if country is None else {"attributes": {"country": country}}
            answer = await act(clients[second], unit, **more)
            assert answer["arm"] == ("four" if unit in inside else "one")
            for app in apps:
                app.service.exposures.flush()

    asyncio.run(play())
    assert {
        unit for unit in (f"h{history}-{k}" for k in range(4)) if apps[0].service.stores.units.assignment("exp", unit)
    } == inside


@pytest.fixture
def histories(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(remembered_units, "OVERLAP_S", 0.0)
    where = {"share": 0.7, "attributes": {"country": ["de"]}}
    apps = [Gateway(gateway(bundles, tmp_path, where, weights=(1e-6, 1e6)), seed=0) for _ in range(2)]
    clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") for app in apps]
    yield clients, apps, itertools.count()
    for app in apps:
        app.service.close()
