"""The threads that follow the store do not undo what another thread does at the same moment."""

from toy_serving.gateways import serving

from marl_ray.serving.routing.shadow import ShadowTotals


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
