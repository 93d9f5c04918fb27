"""The threads that follow the store do not undo what others do: another thread now, or a gateway whose config is newer."""

from pathlib import Path

import pytest
from toy_serving.gateways import acts_of, make_bundle, serving

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.experiments.lifecycle import Action
from marl_ray.serving.routing.shadow import ShadowTotals

UNITS = [f"u{number}" for number in range(60)]


def config_with(folder: Path, bundles: dict[str, str], spool: str, **more: object) -> GatewayConfig:
    """A gateway whose experiment `exp` has these arms; a second one, `later`, always has two."""
    arms = {arm: {"bundle": bundle} for arm, bundle in bundles.items()}
    two = {arm: arms[arm] for arm in ("one", "four")}
    experiments = [{"name": "exp", "arms": arms} | more, {"name": "later", "arms": two}]
    where = {"database": f"sqlite:///{folder}/experiments.db", "spool": f"{folder}/{spool}"}
    return parse_config(GatewayConfig, {"experiments": experiments} | where)


@pytest.fixture
def three(bundles, tmp_path) -> dict[str, str]:
    return bundles | {"two": make_bundle(tmp_path / "two", 2)}


@pytest.mark.parametrize("on_rollback", ["cut", "drain"])
async def test_a_rollback_reaches_a_gateway_whose_config_lacks_an_arm_of_the_experiment(
    bundles, three, tmp_path, caplog, on_rollback
):
    old = config_with(tmp_path, bundles, "old", on_rollback=on_rollback)
    new = config_with(tmp_path, three, "new", on_rollback=on_rollback)
    async with serving(old) as (client, app):
        app.service.follower.close()
        router, first = app.service.endpoints.routers["exp"], await acts_of(client, UNITS, experiment="exp")
        app.service.exposures.flush()
        async with serving(new) as (other, there):
            there.service.follower.close()
            fresh = [f"new {unit}" for unit in UNITS]
            assigned = await acts_of(other, fresh, experiment="exp")
            there.service.exposures.flush()
            assert {answer["arm"] for answer in assigned} == {"one", "four", "two"}
            for _ in range(2):
                app.service.follower.poll(waits=True)
            assert router.rules.state.weights == {"one": 1.0, "four": 1.0}
            assert await acts_of(client, UNITS, experiment="exp") == first
            experiments = there.service.stores.experiments
            for name in ("exp", "later"):
                experiments.change(name, Action.ROLLBACK, epoch=None, actor="ops", reason="harm", arm="four")
        app.service.follower.poll(waits=True)
        assert app.service.endpoints.routers["later"].rules.state.rolled_back == {"four"}
        assert (router.rules.state.weights, router.rules.state.rolled_back) == ({"one": 2.0, "four": 0.0}, {"four"})
        arms_again = [answer["arm"] for answer in await acts_of(client, UNITS, experiment="exp")]
        newest = {answer["arm"] for answer in await acts_of(client, [f"z{unit}" for unit in UNITS], experiment="exp")}
        moved = [answer["arm"] for answer in await acts_of(client, fresh, experiment="exp")]
    assert newest == {"one"}
    assert arms_again == [answer["arm"] if on_rollback == "drain" else "one" for answer in first]
    # What the other gateway assigned to an arm that this one lacks is the control's here.
    assert moved == [
        answer["arm"] if answer["arm"] == "four" and on_rollback == "drain" else "one" for answer in assigned
    ]
    messages = [record.message for record in caplog.records if "last known weights" in record.message]
    assert messages == [
        "experiment exp: its last known weights stay in force here but for rollbacks: this gateway's config has no arm "
        "two, which another one's has"
    ]


async def test_an_end_that_leaves_no_unknown_arm_with_weight_is_followed_whole(bundles, three, tmp_path):
    async with serving(config_with(tmp_path, bundles, "old")) as (_, app):
        app.service.follower.close()
        router = app.service.endpoints.routers["exp"]
        async with serving(config_with(tmp_path, three, "new")) as (_, there):
            there.service.follower.close()
            there.service.stores.experiments.change("exp", Action.ROLLBACK, epoch=None, actor="ops", reason="harm")
        app.service.follower.poll(waits=True)
        assert router.rules.state == app.service.stores.experiments.assignment_state("exp")
        assert router.rules.state.is_over and router.rules.state.rolled_back == {"four", "two"}


async def test_a_shadow_arm_that_begins_while_the_others_are_recorded_harms_nothing(config):
    async with serving(config) as (_, app):
        app.service.follower.close()
        totals = app.service.endpoints.routers["exp"].shadows.totals

        class Read(ShadowTotals):
            def __getattribute__(self, name: str):
                totals.setdefault("four", ShadowTotals(acts=2))  # as the event loop does
                return super().__getattribute__(name)

        totals["one"] = Read(acts=1)
        recorded = []
        for _ in range(2):
            app.service.follower.decide()
            stored = app.service.stores.units.shadow_totals("exp")
            recorded.append({arm: counts["acts"] for arm, counts in stored.items()})
    assert recorded == [{"one": 1}, {"one": 1, "four": 2}]
