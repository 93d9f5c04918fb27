"""Threads change the arms and the table of an experiment while requests read them."""

import threading
from collections import UserDict
from dataclasses import replace

import pytest
from toy_serving.gateways import SEES, bearer, serving, write_keys
from watched_lock import watch_lock

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.experiments.assignment.rendezvous import AssignmentTable, PastTables
from marl_ray.serving.arms.actor_critic import ArmBatcher, PassBatcher
from marl_ray.serving.arms.protocol import TextRequest
from marl_ray.serving.errors import WrongKindError
from marl_ray.serving.handlers.texts.records import shadow_text
from marl_ray.serving.handlers.texts.written_response import WrittenResponse
from marl_ray.serving.logs.act_reader import read_logged
from marl_ray.serving.logs.acts import LoggedAct
from marl_ray.serving.routing.assignment import Assigner
from marl_ray.serving.routing.experiment import router as router_module


@pytest.fixture
def gateway(bundles, tmp_path):
    def config_of(strategy="thompson", arms=None, **more) -> GatewayConfig:
        arms = arms or {arm: {"bundle": bundle} for arm, bundle in bundles.items()}
        where = {"database": f"sqlite:///{tmp_path}/x.db", "spool": f"{tmp_path}/spool"}
        return parse_config(
            GatewayConfig, {"experiments": [{"name": "exp", "arms": arms, "strategy": strategy}]} | where | more
        )

    return config_of


async def test_a_session_is_drawn_by_the_table_that_agrees_with_its_past(gateway, monkeypatch):
    async with serving(gateway()) as (_, app):
        app.service.follower.close()
        router, weights = app.service.endpoints.routers["exp"], {"one": 0.05, "four": 1.0}
        later = AssignmentTable(weights, router.rules.state.salt, 2)
        unit = next(f"u{k}" for k in range(99) if router.rules.table.assign(f"u{k}").arm != later.assign(f"u{k}").arm)
        first = router.rules.table.assign(unit)
        app.service.stores.experiments.reallocate("exp", weights, epoch=1, actor="gateway", reason="r")
        agree = PastTables.agree

        def follow_meanwhile(past, unit):
            app.service.follower.poll()
            return agree(past, unit)

        monkeypatch.setattr(PastTables, "agree", follow_meanwhile)
        recalled = router.known_arm(unit, None)
        assert recalled is not None and recalled.assignment == first
        assert router.rules.state.epoch == 2 and router.known_arm(unit, None) is None


async def test_an_arm_that_is_added_while_a_state_is_followed_answers(gateway, monkeypatch):
    lock = watch_lock(monkeypatch, router_module)
    async with serving(gateway()) as (_, app):
        app.service.follower.close()
        endpoints, router = app.service.endpoints, app.service.endpoints.routers["exp"]
        control, four = router.arms["one"], router.arms["four"]
        add = threading.Thread(target=endpoints.add_arms, args=(router, {"four": four}))

        class Lacking(UserDict):
            is_read_by_follow = False

            def __contains__(self, name):
                if name == "four" and self.is_read_by_follow and not add.ident:
                    add.start()
                    lock.wait_for_waiter()  # it waits until the state is followed
                return super().__contains__(name)

        arms = Lacking(one=control)
        router.replace_arms(arms)
        assert router.arms.answering_arms("four") == ["one"]
        arms.is_read_by_follow = True
        router.follow(router.rules.state)
        add.join(60)
        assert router.arms.answering_arms("four") == ["four", "one"]


async def test_an_act_whose_arm_is_dropped_meanwhile_is_answered_and_logged(gateway, tmp_path, monkeypatch):
    async with serving(gateway(decision_log=f"{tmp_path}/acts")) as (client, app):
        app.service.follower.close()
        endpoints, router = app.service.endpoints, app.service.endpoints.routers["exp"]
        four, act = router.arms["four"], ArmBatcher.act
        session = next(f"s{k}" for k in range(99) if router.rules.table.assign(f"s{k}").arm == "four")

        def act_and_drop(arm, *request):
            answer = act(arm, *request)
            for dropped in endpoints.drop_arms(router, {"four"}):
                dropped.close()
            return answer

        monkeypatch.setattr(ArmBatcher, "act", act_and_drop)
        response = await client.post("/v1/act", json={"session_id": session, "observations": SEES})
        assert (response.status_code, response.json()["arm"]) == (200, "four")
        assert list(router.arms) == ["one"]
    [logged] = read_logged(f"{tmp_path}/acts", "exp")
    assert isinstance(logged, LoggedAct) and (logged.arm, logged.digest) == ("four", four.bundle.digest)
    assert logged.actions == response.json()["actions"]


async def test_a_state_that_assigns_to_an_arm_that_the_config_lacks_is_refused(gateway):
    async with serving(gateway()) as (_, app):
        app.service.follower.close()
        router = app.service.endpoints.routers["exp"]
        rules, arms = router.rules, router.arms
        with pytest.raises(ValueError, match=r"^the state assigns \['two'\], configured are \['four', 'one'\]$"):
            router.follow(replace(rules.state, weights={"one": 1.0, "two": 1.0}))
        assert (router.rules, router.arms) == (rules, arms)


class DropsFourOnceRead(UserDict):
    """Arms of which another thread drops `four` as soon as somebody has looked it up, once `router` is set."""

    router = None

    def __getitem__(self, name):
        if self.router is not None and name == "four":
            self.router.replace_arms({"one": self.data["one"]})
        return super().__getitem__(name)


def drop_four_once_read(router):
    arms = DropsFourOnceRead(router.arms)
    router.replace_arms(arms)
    arms.router = router


async def test_an_act_whose_shadow_is_dropped_meanwhile_is_answered(gateway):
    async with serving(gateway("shadow")) as (client, app):
        app.service.follower.close()
        router = app.service.endpoints.routers["exp"]
        assert router.rules.state.shadows == ("four",)
        drop_four_once_read(router)
        response = await client.post("/v1/act", json={"session_id": "s", "observations": SEES})
        assert (response.status_code, response.json()["arm"], list(router.arms)) == (200, "one", ["one"])


async def test_a_text_whose_shadow_is_dropped_meanwhile_is_sent_to_it(gateway):
    written = WrittenResponse(
        text="a",
        ids=[],
        log_probs=[],
        finish="stop",
        prompt_tokens=1,
        names=[],
        tops=[],
        start=None,
        tokens=1,
        cost_usd=0.0,
    )
    arms = {arm: {"url": "http://127.0.0.1:9/v1", "model": arm} for arm in ("one", "four")}
    async with serving(gateway("shadow", arms)) as (_, app):
        app.service.follower.close()
        router = app.service.endpoints.routers["exp"]
        drop_four_once_read(router)
        shadow_text(router, TextRequest("agent", "a", seed=0), written)
        assert (list(router.arms), router.shadows.under_way) == (["one"], 1)


async def test_a_session_whose_arms_are_dropped_while_it_is_exposed_is_assigned(gateway, monkeypatch):
    async with serving(gateway()) as (client, app):
        app.service.follower.close()
        router, expose = app.service.endpoints.routers["exp"], Assigner.expose

        def expose_and_drop(assigner, session_arm):
            app.service.endpoints.drop_arms(router, {"one", "four"})
            return expose(assigner, session_arm)

        monkeypatch.setattr(Assigner, "expose", expose_and_drop)
        arm = router.rules.table.assign("s").arm
        response = await client.post("/v1/assign", json={"session_id": "s"})
        assert (response.status_code, response.json().get("arm")) == (200, arm)
        response = await client.post("/v1/assign", json={"session_id": "other"})
        assert response.status_code == 503 and "other" not in router.remembered.units


async def test_an_arm_of_the_other_kind_is_refused_by_name(gateway):
    async with serving(gateway()) as (_, app):
        router = app.service.endpoints.routers["exp"]
        assert router.arms.actor("one") is router.arms["one"]
        with pytest.raises(WrongKindError, match=r"^'exp' serves actor_critic policies, expected token policies$"):
            router.arms.writer("one")


async def test_of_an_arm_that_two_threads_have_loaded_the_second_is_closed(gateway):
    class Closing(ArmBatcher):
        is_closed = False

        def close(self):
            self.is_closed = True
            super().close()

    async with serving(gateway()) as (client, app):
        app.service.follower.close()
        endpoints, router = app.service.endpoints, app.service.endpoints.routers["exp"]
        four = router.arms["four"]
        second = Closing(four.bundle, PassBatcher(64, None))
        endpoints.add_arms(router, {"four": second})
        assert router.arms["four"] is four and second.is_closed
        answer = await client.post("/v1/act", json={"session_id": "s", "observations": SEES})
        assert answer.status_code == 200


async def test_an_experiment_that_cannot_be_opened_closes_the_arms_that_it_has_made(
    gateway, bundles, tmp_path, monkeypatch
):
    keys = write_keys(tmp_path / "keys.yaml", ops=("admin",))
    closed, close = [], ArmBatcher.close

    def note_and_close(arm: ArmBatcher) -> None:
        closed.append(arm.bundle)
        close(arm)

    async with serving(gateway(experiments=[], api_keys=keys)) as (client, _):
        client.headers.update(bearer("ops"))
        monkeypatch.setattr(ArmBatcher, "close", note_and_close)
        arms = {"one": {"bundle": bundles["one"]}, "four": {"bundle": bundles["four"], "engine": "vllm"}}
        answer = await client.post("/v1/experiments", json={"name": "e", "arms": arms, "reason": "r"})
        assert answer.status_code == 409 and "holds actor-critics" in answer.text
        assert len(closed) == 1
