"""Failures of arms: one client's inputs, shared passes, circuits and their probes. Without Ray."""

import asyncio
import pickle
from collections import Counter

import numpy as np
import pytest
from toy_serving.fragile_arms import CLOSED, FAILING, GOOD, OPEN, ask, bundle, circuits, config_of_arms, errors_of
from toy_serving.gateways import serving
from waiting import until_async

from marl_ray.config import BreakerConfig, CacheConfig, ExperimentConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import ExperimentStatus
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.policies.bundles.loading import load_actor_critics
from marl_ray.serving.arms.actor_critic import ArmBatcher, PassBatcher
from marl_ray.serving.arms.errors import ArmError, NotFiniteError
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.routing.breaker import CircuitState


async def test_inputs_that_no_arm_can_take_end_nothing(tmp_path):
    arms = {"one": bundle(tmp_path, 1, True), "four": bundle(tmp_path, 4, True)}
    breaker = {"failures": 3, "on_open": "rollback", "rounds": 1}

    async with serving(config_of_arms(tmp_path, arms, breaker=breaker)) as (client, app):
        bad = [await ask(client, f"bad{k}", FAILING) for k in range(40)]
        good = [await ask(client, f"s{k}") for k in range(40)]
        states = circuits(app)
        errors = errors_of(app)
        state = app.service.stores.experiments.read("exp").state
    assert {answer.status_code for answer in bad} == {400}
    assert {answer.json()["error"]["field"] for answer in bad} == {"observations"}
    assert Counter(answer.json()["arm"] for answer in good).keys() == {"one", "four"}
    assert set(states.values()) == {CLOSED} and errors == {}
    assert (state.status, state.rolled_back) == (ExperimentStatus.RUNNING, frozenset())


async def test_an_input_that_one_arm_alone_cannot_take_is_that_arms_failure(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, True)}

    async with serving(config_of_arms(tmp_path, arms, breaker={"failures": 3, "open_s": 60})) as (client, app):
        answers = {f"s{k}": (await ask(client, f"s{k}", FAILING)).json() for k in range(40)}
        early, states = errors_of(app), circuits(app)
        app.service.endpoints.routers["exp"].circuits["four"].until = 0.0  # time for a probe
        later = {f"t{k}": (await ask(client, f"t{k}", FAILING)).json() for k in range(40)}
        errors = errors_of(app)
        rolled_back = app.service.stores.experiments.read("exp").state.rolled_back
    assert {answer["arm"] for answer in (answers | later).values()} == {"one"}
    failed, failed_later = (
        [s for s, answer in replies.items() if "fallback_for" in answer] for replies in (answers, later)
    )
    # The three that failed do not speak for those that came while the circuit was open, until a probe has failed as well.
    assert early == dict.fromkeys(failed[:3], 1.0) and len(failed) > 10
    assert errors == dict.fromkeys(failed[:3] + failed_later, 1.0) and len(failed_later) > 10
    assert states == {"one": CLOSED, "four": OPEN} and not rolled_back


async def test_one_session_opens_no_circuit_and_fails_for_nobody_else(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, True)}

    async with serving(config_of_arms(tmp_path, arms, breaker={"failures": 3})) as (client, app):
        table = app.service.endpoints.routers["exp"].rules.table
        session = next(f"s{k}" for k in range(99) if table.assign(f"s{k}").arm == "four")
        answers = [(await ask(client, session, FAILING)).json() for _ in range(40)]
        await asyncio.gather(*(ask(client, session, FAILING) for _ in range(40)))
        states = circuits(app)
        errors = errors_of(app)
    assert all(answer["fallback_for"] == "four" for answer in answers)
    assert errors == {session: 1.0} and set(states.values()) == {CLOSED}


async def test_inputs_that_the_control_alone_cannot_take_do_not_close_it_to_others(tmp_path):
    arms = {"one": bundle(tmp_path, 1, True), "four": bundle(tmp_path, 4, False)}

    async with serving(config_of_arms(tmp_path, arms, breaker={"failures": 3, "open_s": 60})) as (client, app):
        bad = {f"bad{k}": await ask(client, f"bad{k}", FAILING) for k in range(40)}
        good = [await ask(client, f"s{k}") for k in range(20)]
        states = circuits(app)
        errors = errors_of(app)
    refused = {session for session, answer in bad.items() if answer.status_code == 503}
    assert refused and {answer.status_code for answer in bad.values()} == {200, 503}
    assert all(int(bad[session].headers["retry-after"]) >= 1 for session in refused)
    assert errors == dict.fromkeys(refused, 1.0)  # as a treatment's would
    assert {answer.status_code for answer in good} == {200} and set(states.values()) == {CLOSED}


async def test_kept_answers_are_no_successes_of_an_arm(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, True)}
    config = config_of_arms(tmp_path, arms, breaker={"failures": 3, "open_s": 60, "probes": 2})

    async with serving(config.model_copy(update={"cache": CacheConfig()})) as (client, app):
        router = app.service.endpoints.routers["exp"]
        sessions = [session for k in range(99) if router.rules.table.assign(session := f"s{k}").arm == "four"]

        async def arm_of(session: str, observation: list[float]) -> str:
            answer = (await ask(client, session, observation, "greedy")).json()
            return str(answer["arm"])

        assert await arm_of(sessions[0], GOOD) == "four"  # now it is kept
        for session in sessions[1:4]:
            assert circuits(app)["four"] is CLOSED
            assert await arm_of(session, FAILING) == "one"
            if session != sessions[3]:
                assert await arm_of(session, GOOD) == "four"
        assert circuits(app)["four"] is OPEN  # three failures in a row, whatever was kept in between
        router.circuits["four"].until = 0.0  # time for probes
        assert [await arm_of(session, GOOD) for session in sessions[4:10]] == ["four"] * 6
        assert circuits(app)["four"] is CircuitState.HALF_OPEN
        fresh = [await arm_of(session, [k / 10] * 3) for k, session in enumerate(sessions[10:12], 1)]
        assert fresh == ["four"] * 2 and circuits(app)["four"] is CLOSED


async def test_a_strange_input_takes_none_of_its_pass_with_it(tmp_path, monkeypatch):
    original = ActorCriticBundle.act

    def picky(self, requests, noise=None, masks=(), act=None):
        if any(request["agent"][0] == 1 for request in requests):
            raise RuntimeError("what a strange input")
        return original(self, requests, noise, masks, act)

    monkeypatch.setattr(ActorCriticBundle, "act", picky)
    served = load_actor_critics(bundle(tmp_path, 1, False))

    batcher = ArmBatcher(served, PassBatcher(64, np.random.default_rng(0)))
    seen = [np.array(FAILING if k == 7 else GOOD, np.float32) for k in range(20)]
    results = await asyncio.gather(*(batcher.act({"agent": row}, False) for row in seen), return_exceptions=True)
    assert [k for k, result in enumerate(results) if isinstance(result, ArmError)] == [7]
    answers = [result for result in results if not isinstance(result, BaseException)]
    assert len(answers) == 19 and {int(answer["agent"][0]) for answer in answers} == {1}


@pytest.mark.parametrize("how", ["raises", "not finite"])
async def test_requests_that_share_a_failed_pass_count_once(tmp_path, monkeypatch, how):
    four = bundle(tmp_path, 4, False, broken=how == "not finite", units=16)  # of another size: it has passes of its own
    arms = {"one": bundle(tmp_path, 1, False), "four": four}
    digest = load_actor_critics(four).digest
    original = ActorCriticBundle.act

    def failing(self, requests, noise=None, masks=(), act=None):
        if how == "raises" and self.digest == digest:
            raise RuntimeError("out of memory")
        return original(self, requests, noise, masks, act)

    monkeypatch.setattr(ActorCriticBundle, "act", failing)

    async with serving(config_of_arms(tmp_path, arms, breaker={"failures": 3, "open_s": 60})) as (client, app):
        seen = []
        for batch in range(3):
            answers = await asyncio.gather(*(ask(client, f"s{batch}-{k}") for k in range(40)))
            assert {answer.json()["arm"] for answer in answers} == {"one"}
            seen.append(circuits(app)["four"])
        assert seen == [CLOSED, CLOSED, OPEN]


def test_circuits_fall_back_and_sessions_leave_a_rolled_back_arm_by_default():
    assert BreakerConfig().on_open == "fallback"
    assert parse_config(ExperimentConfig, {"name": "e", "arms": {"a": {"bundle": "a"}}}).on_rollback == "cut"


async def test_sessions_of_a_rolled_back_arm_go_on_with_the_control(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False)}

    async with serving(config_of_arms(tmp_path, arms)) as (client, app):
        before = {f"s{k}": (await ask(client, f"s{k}")).json()["arm"] for k in range(20)}
        router = app.service.endpoints.routers["exp"]
        app.service.roll_back(router, "four", "test")
        await until_async(lambda: "four" in router.rules.state.rolled_back, "the rollback")
        after = {session: (await ask(client, session)).json()["arm"] for session in before}
    assert set(before.values()) == {"one", "four"} and set(after.values()) == {"one"}


async def test_a_rollback_that_fails_in_a_way_nobody_expected_is_logged(tmp_path, monkeypatch, caplog):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False)}

    def fail(*_, **__):
        raise RuntimeError("a row of another version")

    async with serving(config_of_arms(tmp_path, arms)) as (_, app):
        monkeypatch.setattr(app.service.stores.experiments, "change", fail)
        app.service.roll_back(app.service.endpoints.routers["exp"], "four", "test")
        await until_async(lambda: caplog.records, "a line about the rollback")
    [record] = caplog.records
    assert record.getMessage() == "experiment exp: arm four is not rolled back"
    assert record.exc_info is not None and str(record.exc_info[1]) == "a row of another version"


async def test_weights_that_were_rolled_back_are_refused_under_another_runs_name(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False)}
    again = arms | {"four": bundle(tmp_path, 4, False, run="another")}
    assert again["four"] != arms["four"]

    async with serving(config_of_arms(tmp_path, arms)) as (_, app):
        app.service.roll_back(app.service.endpoints.routers["exp"], "four", "test")
        await until_async(lambda: app.service.endpoints.routers["exp"].rules.state.rolled_back, "the rollback")
    config = config_of_arms(tmp_path, again, name="next")
    with pytest.raises(MarlRayError, match=r"arms\.four: the weights of bundle .* have been rolled back in"):
        Gateway(config)


def test_errors_of_arms_cross_processes():
    error = pickle.loads(pickle.dumps(NotFiniteError("not finite", 7)))
    assert (type(error), str(error), error.pass_number) == (NotFiniteError, "not finite", 7)
