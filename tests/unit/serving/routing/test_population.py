"""The units that an experiment takes: its share of all, attributes, and an endpoint's hold-out."""

import asyncio
import itertools
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from toy_serving.gateways import act, serving, until, with_gateway
from toy_serving.gateways import gateway_config as config_of

from marl_ray.config import ExperimentConfig, GatewayConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.population import population_of
from marl_ray.experiments.assignment.rendezvous import AssignmentTable, held_out, in_layer, in_share
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.store.records import assignment_part
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.routing import router

UNITS = [f"u{k}" for k in range(5_000)]
VALUES = st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=3)


def population(**given: Any) -> Any:
    return population_of({"population": given})


def gateway(bundles, tmp_path, population: dict[str, Any] | None = None, **more: Any) -> GatewayConfig:
    config = config_of(bundles, tmp_path / "x.db", **more)
    experiment = config.experiments[0].model_dump(mode="json") | {"population": population or {}}
    return parse_config(GatewayConfig, config.model_dump(mode="json") | {"experiments": [experiment]})


def test_shares_are_met_and_independent_of_layers_hold_outs_arms_and_other_salts():
    table = AssignmentTable({"a": 1.0, "b": 1.0}, "exp", 1)
    halves = {
        "share": [in_share("exp", 0.5, unit) for unit in UNITS],
        "other salt": [in_share("other", 0.5, unit) for unit in UNITS],
        "layer": [in_layer("exp", (0.0, 0.5), unit) for unit in UNITS],
        "hold-out": [held_out("exp", 0.5, unit) for unit in UNITS],
        "other hold-out": [held_out("other", 0.5, unit) for unit in UNITS],
        "arm": [table.assign(unit).arm == "a" for unit in UNITS],
    }
    for half, units in halves.items():
        assert stats.binomtest(sum(units), len(UNITS), 0.5).pvalue > 1e-4, half
        for other, other_units in halves.items():
            if half < other:
                both = sum(map(lambda x, y: x and y, units, other_units))
                assert stats.binomtest(both, len(UNITS), 0.25).pvalue > 1e-4, (half, other)
    for share in (0.001, 0.03, 0.9):
        for taken in (in_share, held_out):
            count = sum(taken("exp", share, unit) for unit in UNITS)
            assert stats.binomtest(count, len(UNITS), share).pvalue > 1e-4


@given(st.text(max_size=5), st.text(max_size=9), st.floats(0, 1), st.floats(0, 1))
def test_larger_shares_only_add_units(name, unit, smaller, other):
    low, high = sorted((smaller, other))
    for taken in (in_share, held_out):
        assert taken(name, low, unit) <= taken(name, high, unit)
        assert not taken(name, 0.0, unit) and taken(name, 1.0, unit)


def test_places_are_fixed_for_good():
    """Another value would mix the populations of running experiments."""
    assert [in_share("exp", 0.5, f"u{i}") for i in range(8)] == IN_SHARE
    assert [held_out("exp", 0.5, f"u{i}") for i in range(8)] == HELD_OUT


IN_SHARE = [True, False, False, False, False, True, True, True]
HELD_OUT = [False, True, False, False, True, False, True, False]


@given(
    st.dictionaries(st.sampled_from("xyz"), st.lists(VALUES, min_size=1, max_size=3)),
    st.dictionaries(st.sampled_from("xyz"), VALUES),
)
def test_a_unit_takes_part_that_has_a_wanted_value_of_every_name(wanted, attributes):
    def same(first: Any, other: Any) -> bool:
        return first == other and isinstance(first, bool) == isinstance(other, bool)

    expected = all(
        name in attributes and any(same(attributes[name], value) for value in values) for name, values in wanted.items()
    )
    population_config = population(attributes=wanted)
    assert population_config.includes("s", "u", attributes) is expected and population_config.may_include("s", "u")
    again = {name: values[::-1] + values for name, values in reversed(wanted.items())}
    assert population(attributes=again) == population_config


def test_another_population_is_another_epoch():
    config = {"salt": "s", "arms": {"a": {"digest": "d", "weight": 1.0}}}
    parts = [
        assignment_part(config | {"population": given})
        for given in ({}, {"share": 1.0, "attributes": {}}, {"share": 0.5}, {"attributes": {"x": [1]}})
    ]
    assert parts[0] == assignment_part(config) == parts[1]
    assert parts[2] != parts[0] != parts[3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 0}, "population.share"),
        ({"share": 1.5}, "population.share"),
        ({"attributes": {"x": []}}, "attributes.x: expected at least one value"),
        ({"attributes": {"x": [None]}}, "expected a boolean, a number, or a text of 1 to 256 printable characters"),
        ({"attributes": {"x": [float("inf")]}}, "expected a boolean, a number"),
        ({"attributes": {"x": [""]}}, "expected a boolean, a number"),
        ({"attributes": {"x\n": [1]}}, "expected printable names"),
        ({"attributes": {"x": "de"}}, "population.attributes.x"),
    ],
)
def test_bad_populations_are_named_in_one_line(given, message):
    with pytest.raises(MarlRayError) as caught:
        parse_config(ExperimentConfig, {"name": "e", "arms": {"a": {"bundle": "b"}}, "population": given})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_values_keep_their_types():
    given = {"attributes": {"x": [True, 1, 1.5, "1"]}}
    config = parse_config(ExperimentConfig, {"name": "e", "arms": {"a": {"bundle": "b"}}, "population": given})
    stored = config.model_dump(mode="json")
    assert list(map(repr, stored["population"]["attributes"]["x"])) == ["True", "1", "1.5", "'1'"]


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_hold_out_is_a_share_below_one(share):
    with pytest.raises(MarlRayError, match=r"holdouts\.game"):
        parse_config(GatewayConfig, {"holdouts": {"game": share}})


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
def test_bad_attributes_are_named(bundles, tmp_path, attributes, field, path):
    async def body(client):
        sent = {"session_id": "s", "attributes": attributes} | (
            {"observations": {"agent_0": [0, 1, 2]}} if "act" in path else {}
        )
        return await client.post(path, json=sent)

    answer = with_gateway(gateway(bundles, tmp_path), body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


def test_units_outside_of_the_population_are_with_the_control_and_not_counted(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"share": 0.5, "attributes": {"country": ["de", "at"], "paid": [True]}})

    async def body():
        async with serving(config) as (client, app):
            right = {
                f"s{k}": (await act(client, f"s{k}", attributes={"country": "at", "paid": True})) for k in range(80)
            }
            for k, wrong in enumerate(
                [{"country": "de"}, {"country": "fr", "paid": True}, {"country": "de", "paid": 1}]
            ):
                for n in range(10):
                    assert (await act(client, f"w{k}-{n}", attributes=wrong))["arm"] == "one"
            assert (await act(client, "none"))["arm"] == "one"
            app.service.exposures.flush()
            return (
                right,
                {unit for unit in right if app.service.store.assignment("exp", unit)},
                app.service.store.summary("exp"),
            )

    right, stored, summary = asyncio.run(body())
    assert stored == {unit for unit in right if in_share("exp", 0.5, unit)} and 20 < len(stored) < 60
    assert {right[unit]["arm"] for unit in right if unit not in stored} == {"one"}
    assert sum(arm.exposures for arm in summary.values()) == len(stored)


def test_clusters_take_part_or_are_held_out_as_wholes(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"share": 0.5}, holdouts={"exp": 0.3})
    config = config.model_copy(
        update={"experiments": [config.experiments[0].model_copy(update={"randomize": "cluster"})]}
    )

    async def body():
        async with serving(config) as (client, app):
            for cluster in (f"c{k}" for k in range(20)):
                answers = [await act(client, f"{cluster}-{k}", cluster_id=cluster) for k in range(2)]
                app.service.exposures.flush()
                out, inside = held_out("exp", 0.3, cluster), in_share("exp", 0.5, cluster)
                stored = [app.service.store.assignment("exp", f"{cluster}-{k}") is not None for k in range(2)]
                assert [answer.get("holdout", False) for answer in answers] == [out, out]
                assert stored == [inside and not out] * 2

    asyncio.run(body())


def test_a_unit_keeps_its_place_in_a_layer_in_whatever_cluster_it_comes(bundles, tmp_path):
    """Two experiments share an endpoint's clusters by halves; the second time a player comes in a match of the other's."""
    config = config_of(bundles, tmp_path / "x.db", names=("low", "high"))
    shares = {"low": (0.0, 0.5), "high": (0.5, 1.0)}
    more = {"randomize": "cluster", "layer": "l", "endpoint": "game"}
    given = [e.model_copy(update=more | {"layer_share": shares[e.name]}) for e in config.experiments]
    both = config.model_copy(update={"experiments": given})
    alone = config.model_copy(update={"experiments": given[:1]})
    clusters = {name: [f"c{k}" for k in range(40) if in_layer("l", share, f"c{k}")] for name, share in shares.items()}
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
    async def moved() -> tuple[Any, Any]:
        async with serving(both) as (client, _):
            return [
                await act(client, "new", cluster_id=clusters[name][0], experiment="game") for name in ("high", "low")
            ]

    unmoved, other = asyncio.run(moved())
    assert unmoved["experiment"] == other["experiment"] == "high" and unmoved["arm"] == other["arm"]


def test_treatments_get_no_copies_of_what_units_outside_of_the_population_ask(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"share": 0.5})
    config = config.model_copy(
        update={"experiments": [config.experiments[0].model_copy(update={"strategy": "shadow"})]}
    )

    async def body():
        async with serving(config) as (client, app):
            for k in range(20):
                await act(client, f"s{k}")
            shadows = app.service.endpoints.routers["exp"].shadows
            inside = sum(in_share("exp", 0.5, f"s{k}") for k in range(20))
            await until(lambda: shadows.totals["four"].acts >= inside)
            await shadows.close()
            assert shadows.totals["four"].acts == inside

    asyncio.run(body())


def test_what_a_unit_has_met_it_keeps_whatever_its_attributes_are_later(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"attributes": {"country": ["de"]}}, weights=(1.0, 1e6))
    inside, outside = {"attributes": {"country": "de"}}, {"attributes": {"country": "fr"}}

    async def body():
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

    asyncio.run(body())


@pytest.mark.parametrize("later", [{"share": 0.01}, {"attributes": {"country": ["de"]}}])
def test_a_population_that_changes_is_an_epoch_and_leaves_everyone_where_they_are(bundles, tmp_path, later):
    before = gateway(bundles, tmp_path, {"share": 0.5})
    after = gateway(bundles, tmp_path, later, weights=(1.0, 3.0))

    async def arms(config: GatewayConfig, expected_epoch: int) -> dict[str, tuple[str, bool]]:
        async with serving(config) as (client, app):
            assert app.service.endpoints.routers["exp"].state.epoch == expected_epoch
            arms_by_unit = {f"s{k}": (await act(client, f"s{k}"))["arm"] for k in range(60)}
            app.service.exposures.flush()
            return {
                unit: (arm, app.service.store.assignment("exp", unit) is not None) for unit, arm in arms_by_unit.items()
            }

    first, second = asyncio.run(arms(before, 1)), asyncio.run(arms(after, 2))
    assert 10 < sum(met for _, met in first.values()) < 50
    assert second == first


def test_units_that_never_can_have_been_in_are_not_looked_up(bundles, tmp_path, monkeypatch):
    async def body():
        for population in ({"share": 0.5}, {"share": 0.4}):
            async with serving(gateway(bundles, tmp_path, population)) as (client, app):
                units_read: list[str] = []
                read = app.service.assigner.look_ups.ask

                async def ask(experiment: str, unit: str, read=read, units_read=units_read) -> Any:
                    units_read.append(unit)
                    return await read(experiment, unit)

                monkeypatch.setattr(app.service.assigner.look_ups, "ask", ask)
                for k in range(60):
                    await act(client, f"s{population['share']}-{k}")
        return units_read

    units_read = asyncio.run(body())
    between = {
        f"s0.4-{k}" for k in range(60) if not in_share("exp", 0.4, f"s0.4-{k}") and in_share("exp", 0.5, f"s0.4-{k}")
    }
    assert set(units_read) == between and len(units_read) == len(between)


def test_units_that_are_held_out_meet_no_experiment_and_are_told_so(bundles, tmp_path):
    config = gateway(bundles, tmp_path, weights=(1.0, 1e6), holdouts={"exp": 0.3})

    async def body():
        async with serving(config) as (client, app):
            answers = {f"s{k}": await act(client, f"s{k}") for k in range(60)}
            report = await client.post(
                "/v1/assign", json={"session_id": next(u for u in answers if held_out("exp", 0.3, u))}
            )
            app.service.exposures.flush()
            stored = {unit for unit in answers if app.service.store.assignment("exp", unit)}
            return answers, report.json(), stored, (await client.get("/metrics")).text

    answers, report, stored, metrics = asyncio.run(body())
    out = {unit for unit in answers if held_out("exp", 0.3, unit)}
    assert {unit for unit, answer in answers.items() if answer.get("holdout")} == out and 5 < len(out) < 35
    assert all(answers[unit]["arm"] == "one" for unit in out) and stored == answers.keys() - out
    assert (report["holdout"], report["exposed"], report["arm"]) == (True, False, "one")
    assert f'marl_ray_gateway_holdouts_total{{endpoint="exp"}} {len(out) + 1}.0' in metrics


def test_a_hold_out_that_begins_later_leaves_units_with_what_they_have_met(bundles, tmp_path):
    async def body():
        async with serving(gateway(bundles, tmp_path, weights=(1.0, 1e6))) as (client, app):
            assert {(await act(client, f"s{k}"))["arm"] for k in range(20)} == {"four"}
            app.service.exposures.flush()
        async with serving(gateway(bundles, tmp_path, weights=(1.0, 1e6), holdouts={"exp": 0.5})) as (client, app):
            old = [await act(client, f"s{k}") for k in range(20)]
            new = [await act(client, f"t{k}") for k in range(20)]
            return old, new

    old, new = asyncio.run(body())
    assert all(answer["arm"] == "four" and "holdout" not in answer for answer in old)
    assert {answer["arm"] for answer in new} == {"one", "four"}
    assert all((answer["arm"] == "one") == answer.get("holdout", False) for answer in new)


def test_a_promoted_arm_is_for_those_outside_too_and_not_for_the_hold_out(bundles, tmp_path):
    config = gateway(bundles, tmp_path, {"share": 0.3}, holdouts={"exp": 0.3})

    async def body():
        async with serving(config) as (client, app):
            app.service.store.change("exp", Action.PROMOTE, epoch=1, actor="a", reason="r", arm="four")
            app.service.follower.look()
            return {f"s{k}": await act(client, f"s{k}") for k in range(40)}

    answers = asyncio.run(body())
    for unit, answer in answers.items():
        assert answer["arm"] == ("one" if held_out("exp", 0.3, unit) else "four")


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
            if country == "de" and in_share("exp", 0.7, unit):
                inside.add(unit)
            more = {} if country is None else {"attributes": {"country": country}}
            answer = await act(clients[second], unit, **more)
            assert answer["arm"] == ("four" if unit in inside else "one")
            for app in apps:
                app.service.exposures.flush()

    asyncio.run(play())
    assert {
        unit for unit in (f"h{history}-{k}" for k in range(4)) if apps[0].service.store.assignment("exp", unit)
    } == inside


@pytest.fixture
def histories(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(router, "OVERLAP_S", 0.0)
    where = {"share": 0.7, "attributes": {"country": ["de"]}}
    apps = [Gateway(gateway(bundles, tmp_path, where, weights=(1e-6, 1e6)), seed=0) for _ in range(2)]
    clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") for app in apps]
    yield clients, apps, itertools.count()
    for app in apps:
        app.service.close()
