"""Calls of arms in other processes: lost ones, refused ones, and the circuits that they open. Without Ray."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from stores.migrated import migrate
from toy_serving.fragile_arms import CLOSED, GOOD, OPEN, ask, bundle, circuits, config_of_arms, errors_of
from waiting import until_async

from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.policies.bundles.loading import load_actor_critics
from marl_ray.serving.arms.actor_critic import ArmBatcher, PassBatcher
from marl_ray.serving.arms.errors import ArmError, LostError
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.errors import BusyError


class Call:
    """A response of Serve that is not there yet."""

    def __init__(self, result: Any):
        self._result, self.cancelled = result, False

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def cancel(self) -> None:
        self.cancelled = True


class Hung(Call):
    """A response of Serve that does not come."""

    def __init__(self):
        super().__init__(None)
        self.begun = asyncio.Event()

    def __await__(self):
        self.begun.set()
        yield from asyncio.sleep(60).__await__()


def calls(*results: Any) -> tuple[Any, list[Call]]:
    """A sender of calls that end so, and the calls that were sent."""
    sent: list[Call] = []

    def send() -> Call:
        sent.append(Call(results[len(sent)]))
        return sent[-1]

    return send, sent


@pytest.mark.parametrize("how", ["died", "connection", "cancelled"])
def test_a_lost_call_is_sent_once_more(how):
    from ray.exceptions import ActorDiedError

    from marl_ray.serving.arms.handle_calls import answer_of

    ends = {"died": ActorDiedError(), "connection": ConnectionError("reset"), "cancelled": asyncio.CancelledError()}
    lost = ends[how]
    send, sent = calls(lost, "answer")
    assert asyncio.run(answer_of(send)) == "answer" and len(sent) == 2
    send, sent = calls(lost, lost, "answer")
    with pytest.raises(LostError, match="two calls were lost"):
        asyncio.run(answer_of(send))
    assert len(sent) == 2


def test_what_the_arms_own_code_raises_and_a_full_queue_are_no_lost_calls():
    from ray.exceptions import RayTaskError
    from ray.serve.exceptions import BackPressureError

    from marl_ray.serving.arms.handle_calls import answer_of

    send, sent = calls(RayTaskError("act", "Traceback ...", ValueError("x")), "answer")
    with pytest.raises(ArmError) as caught:
        asyncio.run(answer_of(send))
    assert not isinstance(caught.value, LostError) and len(sent) == 1
    send, sent = calls(BackPressureError(9, 8), "answer")
    with pytest.raises(BusyError, match="the arm is busy") as refused:
        asyncio.run(answer_of(send))
    assert refused.value.retry_after_s == 1 and len(sent) == 1


class Handle:
    """A deployment's handle in Serve's throughput mode: it can be used on an event loop alone, the one it was made on."""

    def __init__(self, answer: Any, loop: Any = None):
        self._answer, self._loop = answer, loop

    def options(self, **options: Any) -> "Handle":
        return Handle(self._answer, asyncio.get_running_loop())

    def remote(self, *arguments: Any) -> Any:
        assert self._loop is asyncio.get_running_loop()
        return self._answer(*arguments)


async def test_an_arm_that_is_made_in_a_thread_uses_its_handle_on_the_loop(tmp_path):
    from marl_ray.serving.arms.remote import RemoteArm

    served = load_actor_critics(bundle(tmp_path, 1, False))

    async def answer(requests: Any) -> Any:
        return served.act([observations for observations, _, _ in requests])

    arm = await asyncio.to_thread(RemoteArm, served, Handle(answer), 5.0, 1)
    assert [
        int(actions["agent"][0])
        for actions in [await arm.act({"agent": np.array(GOOD, np.float32)}, True) for _ in range(2)]
    ] == [1, 1]


async def test_the_scoring_of_a_text_fails_as_an_arm_does_and_is_cancelled_with_its_caller():
    from ray.exceptions import ActorDiedError, RayTaskError

    from marl_ray.serving.arms.text.remote import RemoteTextArm

    def arm_of(*results: Any) -> tuple[RemoteTextArm, list[Call]]:
        send, sent = calls(*results)
        return RemoteTextArm(None, Handle(lambda *_: send()), 5.0), sent

    arm, sent = arm_of(ActorDiedError(), (3, -1.5))
    assert await arm.score("a", [1], [2, 3, 4], "abc") == (3, -1.5) and len(sent) == 2
    arm, sent = arm_of(RayTaskError("score", "Traceback ...", ValueError("x")))
    with pytest.raises(ArmError, match="ValueError"):
        await arm.score("a", [1], [2, 3, 4], "abc")
    hung = Hung()
    task = asyncio.ensure_future(RemoteTextArm(None, Handle(lambda *_: hung), 5.0).score("a", [1], [2], "b"))
    await until_async(hung.begun.is_set, "the call")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hung.cancelled


class Elsewhere:
    """An arm in another process, whose calls end as `ends` says."""

    def __init__(self, served: ActorCriticBundle, *ends: Exception):
        self.bundle, self._batcher = served, ArmBatcher(served, PassBatcher(64, np.random.default_rng(0)))
        self.ends = list(ends)

    async def act(self, observations, greedy, masks=None):
        if self.ends:
            raise self.ends.pop(0)
        return await self._batcher.act(observations, greedy, masks)

    def close(self):
        self._batcher.close()


def elsewhere(tmp_path: Path, treatment: list[Exception], control: list[Exception], **more: Any):
    """A gateway whose arms are in other processes."""
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False)}
    config = config_of_arms(tmp_path, arms, placement="deployment", **more)
    ends = {arms["one"]: control, arms["four"]: treatment}
    migrate(config.database)
    return Gateway(config, seed=0, host=lambda served, path, _: Elsewhere(served, *ends[path]))


def with_arms(app: Gateway, body: Any) -> Any:
    async def run() -> Any:
        app.service.start()
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
                return await body(client)
        finally:
            app.service.close()

    return asyncio.run(run())


def test_an_arm_that_is_busy_has_not_failed(tmp_path):
    app = elsewhere(tmp_path, [BusyError("the arm is busy")] * 30, [], breaker={"failures": 2})

    async def body(client):
        return [await ask(client, f"s{k}") for k in range(40)], circuits(app), errors_of(app)

    answers, states, errors = with_arms(app, body)
    assert {answer.status_code for answer in answers} == {200, 503}
    assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status_code == 503)
    assert set(states.values()) == {CLOSED} and errors == {}


def test_lost_calls_open_the_controls_circuit_too(tmp_path):
    app = elsewhere(tmp_path, [], [LostError("gone", k) for k in range(99)], breaker={"failures": 2, "open_s": 30})

    async def body(client):
        return [await ask(client, f"s{k}") for k in range(40)], circuits(app), errors_of(app)

    answers, states, errors = with_arms(app, body)
    assert {answer.json()["arm"] for answer in answers if answer.status_code == 200} == {"four"}
    last = [answer for answer in answers if answer.status_code == 503][-1]
    assert 25 <= int(last.headers["retry-after"]) <= 30
    assert states == {"one": OPEN, "four": CLOSED} and len(errors) == 2


def test_when_both_arms_are_lost_no_session_has_failed(tmp_path):
    lost = [LostError("gone", k) for k in range(99)]
    breaker = {"failures": 2, "open_s": 0.02, "on_open": "rollback", "rounds": 1}
    app = elsewhere(tmp_path, lost, lost[::-1], breaker=breaker)

    async def body(client):
        answers = []
        for k in range(30):
            answers.append(await ask(client, f"s{k}"))
            await asyncio.sleep(0.005)
        return answers, errors_of(app), app.service.stores.experiments.read("exp").state.rolled_back

    answers, errors, rolled_back = with_arms(app, body)
    assert {answer.status_code for answer in answers} == {503} and errors == {} and not rolled_back


@pytest.mark.parametrize("outage", [3, 99])
def test_a_treatment_is_rolled_back_for_its_circuit_only_if_it_stays_open_through_its_probes(tmp_path, outage):
    breaker = {"failures": 2, "open_s": 0.02, "probes": 1, "on_open": "rollback", "rounds": 3}
    app = elsewhere(tmp_path, [LostError("gone", k) for k in range(outage)], [], breaker=breaker, on_rollback="drain")

    async def body(client):
        for k in range(60):
            assert (await ask(client, f"s{k}")).status_code == 200
            await asyncio.sleep(0.005)
        if outage > 5:
            await until_async(lambda: app.service.endpoints.routers["exp"].rules.state.rolled_back, "the rollback")
        return app.service.stores.experiments.read("exp").state.rolled_back, app.service.stores.experiments.audit(
            "exp"
        )[-1].reason

    rolled_back, reason = with_arms(app, body)
    if outage == 3:  # two failures and one round of probes
        assert rolled_back == frozenset()
    else:
        assert rolled_back == {"four"} and "circuit open through 3 rounds of probes" in reason
