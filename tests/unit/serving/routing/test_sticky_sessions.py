"""A session keeps its arm: whatever cluster it comes with later, and where a replica hears of new weights late."""

import asyncio

import pytest
from toy_serving.gateways import act, bearer, serving, write_keys

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.serving.routing.experiment import remembered_units

UNITS = [f"u{number}" for number in range(30)]


@pytest.fixture
def gateway(bundles, tmp_path):
    def config_of(**more) -> GatewayConfig:
        arms = {arm: {"bundle": bundle} for arm, bundle in bundles.items()}
        where = {"database": f"sqlite:///{tmp_path}/x.db", "spool": f"{tmp_path}/spool"}
        return parse_config(GatewayConfig, {"experiments": [{"name": "exp", "arms": arms} | more]} | where)

    return config_of


def test_a_session_that_comes_with_another_cluster_after_a_restart_keeps_its_arm(gateway):
    config = gateway(randomize="cluster")

    async def arms(cluster: str) -> list[str]:
        async with serving(config) as (client, _):
            return [(await act(client, unit, cluster_id=f"{cluster} {unit}"))["arm"] for unit in UNITS]

    first = asyncio.run(arms("a match"))
    assert set(first) == {"one", "four"}
    assert asyncio.run(arms("the next match")) == first


async def test_a_replica_that_was_cut_off_from_the_database_takes_up_what_others_assigned_meanwhile(
    gateway, monkeypatch
):
    monkeypatch.setattr(remembered_units, "OVERLAP_S", 0.0)
    config = gateway(strategy="thompson")

    async with serving(config) as (client, app), serving(config) as (other, there):
        app.service.follower.close()  # it hears nothing
        there.service.stores.experiments.reallocate(
            "exp", {"one": 0.05, "four": 1}, epoch=1, actor="gateway", reason="r"
        )
        there.service.follower.poll()
        of_other = [(await act(other, unit))["arm"] for unit in UNITS]
        there.service.exposures.flush()
        outdated = [(await act(client, unit))["arm"] for unit in UNITS]
        await asyncio.sleep(0.01)
        app.service.follower.poll()
        later = [(await act(client, unit))["arm"] for unit in UNITS]
    assert outdated != of_other
    assert later == of_other


async def test_a_new_session_asks_all_that_drain_at_its_endpoint_in_one_statement(bundles, tmp_path, monkeypatch):
    keys = write_keys(tmp_path / "keys.yaml", ops=("admin", "inference"))
    where = {"database": f"sqlite:///{tmp_path}/x.db", "spool": f"{tmp_path}/spool", "api_keys": keys}
    config = parse_config(GatewayConfig, where)
    arms = {arm: {"bundle": bundle} for arm, bundle in bundles.items()}
    statements = []

    async with serving(config) as (client, app):
        client.headers.update(bearer("ops"))
        for number in range(6):
            if number:
                await client.post(f"/v1/experiments/e{number - 1}/stop", json={"reason": "r"})
            new = {"name": f"e{number}", "endpoint": "game", "arms": arms, "reason": "r"}
            assert (await client.post("/v1/experiments", json=new)).status_code == 201
            await act(client, f"s{number}")
        app.service.exposures.flush()
        read = app.service.assigner.lookups.read

        def count_and_read(sessions):
            statements.append(len(sessions))
            return read(sessions)

        monkeypatch.setattr(app.service.assigner.lookups, "read", count_and_read)
        fresh = (await act(client, "new"))["experiment"]
        app.service.endpoints.routers["e2"].remembered.units.clear()  # as after a restart
        assert (fresh, (await act(client, "s2"))["experiment"]) == ("e5", "e2")
    assert statements == [5, 3]  # that s2 was not in e0 and e1 has just been told
