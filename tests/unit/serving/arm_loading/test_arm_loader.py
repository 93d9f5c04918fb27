"""Arms are loaded and dropped by several threads, and none undoes what another one does at the same moment."""

import threading
import time
from collections import UserDict

from toy_serving.gateways import serving
from watched_lock import watch_lock

from marl_ray.experiments.lifecycle import Action
from marl_ray.serving.arm_loading import arm_loader
from marl_ray.serving.arms.actor_critic import ArmBatcher
from marl_ray.serving.routing import endpoints as endpoints_module


async def test_an_arm_that_is_dropped_while_another_one_is_added_stays_dropped(config, monkeypatch):
    lock = watch_lock(monkeypatch, endpoints_module)
    async with serving(config) as (_, app):
        app.service.follower.close()
        endpoints = app.service.endpoints
        router = endpoints.routers["exp"]
        four = router.arms["four"]
        endpoints.drop_arms(router, {"four"})
        drop = threading.Thread(target=endpoints.drop_arms, args=(router, {"one"}))

        class Added(UserDict):
            def keys(self):
                drop.start()
                lock.wait_for_waiter()  # it waits until these are added
                return super().keys()

        endpoints.add_arms(router, Added(four=four))
        drop.join(60)
        assert router.arms == {"four": four}


async def test_arms_that_are_loaded_while_the_poll_goes_through_them_are_tended_again_at_once(config, monkeypatch):
    may_load, needed = threading.Event(), arm_loader.needed_arms  # type: ignore[attr-defined]  # the test replaces it

    def needed_while_a_thread_ends(*arguments):
        may_load.set()
        for thread in threading.enumerate():
            if thread.name == "load-exp":
                thread.join(60)
        return needed(*arguments)

    async with serving(config) as (_, app):
        follower, service = app.service.follower, app.service
        follower.close()
        load = service.bundles.load

        def load_late(*arguments):
            assert may_load.wait(60)
            return load(*arguments)

        monkeypatch.setattr(service.bundles, "load", load_late)
        router = service.endpoints.routers["exp"]
        service.endpoints.drop_arms(router, {"four"})
        service.stores.experiments.change("exp", Action.PAUSE, epoch=None, actor="ops", reason="r")
        follower.poll()
        assert follower.arm_loader.arm_states()["exp"] == {"one": "loaded", "four": "loading"}
        monkeypatch.setattr(arm_loader, "needed_arms", needed_while_a_thread_ends)
        service.stores.experiments.change("exp", Action.RESUME, epoch=router.rules.state.epoch, actor="ops", reason="r")
        follower.poll()
        assert follower.arm_loader.arm_states()["exp"] == {"one": "loaded", "four": "loaded"}
        assert follower.arm_loader.is_due(time.monotonic())


async def test_arms_of_a_round_that_fails_are_closed(config, monkeypatch):
    closed, close = [], ArmBatcher.close
    async with serving(config) as (_, app):
        app.service.follower.close()
        live_experiments = app.service.live_experiments
        router, make = live_experiments.endpoints.routers["exp"], live_experiments.start_arm
        live_experiments.endpoints.drop_arms(router, {"one", "four"})

        def make_all_but_four(experiment, arm, bundle):
            if arm == "four":
                raise RuntimeError("the deployment's process has died")
            return make(experiment, arm, bundle)

        def note_and_close(arm: ArmBatcher) -> None:
            closed.append(arm.bundle)
            close(arm)

        monkeypatch.setattr(live_experiments, "start_arm", make_all_but_four)
        monkeypatch.setattr(ArmBatcher, "close", note_and_close)
        loader = arm_loader.ArmLoader(live_experiments)
        loader.load_and_drop(app.service.stores.experiments.states(), {}, waits=True)
        assert loader.missing["exp"].keys() == {"one", "four"} and not router.arms
        assert len(closed) == 1
