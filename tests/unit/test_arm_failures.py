"""Whose failure it is: one client's inputs, shared passes, lost calls, overload, circuits and their probes. Without Ray."""

import asyncio
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from gymnasium import spaces
from migrated import migrated
from toy_gateways import LINEAGE, serving, until

from marl_ray.config import BreakerConfig, ExperimentConfig, GatewayConfig, NetworkConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.lifecycle import ExperimentStatus, RolloutStep
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.sequential import harm
from marl_ray.experiments.store.store import ExperimentStore, Exposure, Report
from marl_ray.policies.actor_critic.actor_critic import ActorCritic
from marl_ray.policies.bundles.actor_critic import Bundle, PolicyParts, load_actor_critics, save_bundle
from marl_ray.serving.arms import actor_critic
from marl_ray.serving.arms.actor_critic import ArmBatcher, Passes
from marl_ray.serving.arms.errors import ArmError, LostError, NotFiniteError
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.evidence.rollout_control import ERRORS, config_of, decide, findings
from marl_ray.serving.http.protocol import RequestError
from marl_ray.serving.routing.breaker import CircuitState

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
GOOD, STRANGE = [0.5, 0.5, 0.5], [1.0, -1.0, 0.0]


def bundle(folder: Path, action: int, fragile: bool, run: str = "r", broken: bool = False) -> str:
    """A policy that takes one action. A fragile one makes NaN of all observations but constant ones, a broken one of
    all."""
    torch.manual_seed(action)
    network = NetworkConfig(hidden=(8,), activation="relu")
    policy = ActorCritic(SPACE, spaces.Discrete(6), network)
    with torch.no_grad():
        policy.actor.rest[-1].bias[action] = np.nan if broken else 30.0
        if fragile:  # its input is normalized: hidden units are infinite or zero, and their sum has both signs
            policy.actor.first.linear.weight.copy_(torch.tensor([3e38, 0.0, 0.0]).expand(8, 3))
            policy.actor.rest[-1].weight.copy_(torch.tensor([1.0, -1.0] * 4).expand(6, 8))
    parts = PolicyParts(network, SPACE, spaces.Discrete(6), policy.actor.state_dict())
    lineage = LINEAGE.model_copy(update={"run": run})
    return str(save_bundle(folder, {"agent": "p"}, {"p": parts}, lineage))


def config_of_arms(folder: Path, arms: dict[str, str], **more: Any) -> GatewayConfig:
    experiment = {"name": "exp", "arms": {arm: {"bundle": path} for arm, path in arms.items()}, "min_outcomes": 5}
    where = {"database": f"sqlite:///{folder}/experiments.db", "spool": f"{folder}/spool"}
    return parse_config(GatewayConfig, {"experiments": [experiment | more]} | where)


async def ask(client: httpx.AsyncClient, session: str, observation: list[float] = GOOD) -> httpx.Response:
    return await client.post("/v1/act", json={"session_id": session, "observations": {"agent": observation}})


def errors_of(app: Gateway) -> dict[str, float]:
    """Session -> its `error`, of those that are stored."""
    app.service.unit_reports.write()
    return dict(app.service.store.metric_values("exp", "error"))


def circuits(app: Gateway) -> dict[str, CircuitState]:
    return {arm: circuit.state for arm, circuit in app.service.endpoints.routers["exp"].circuits.items()}


CLOSED, OPEN, _ = CircuitState


def test_inputs_that_no_arm_can_take_end_nothing(tmp_path):
    arms = {"one": bundle(tmp_path, 1, True), "four": bundle(tmp_path, 4, True)}
    breaker = {"failures": 3, "on_open": "rollback", "rounds": 1}

    async def body():
        async with serving(config_of_arms(tmp_path, arms, breaker=breaker)) as (client, app):
            bad = [await ask(client, f"bad{k}", STRANGE) for k in range(40)]
            good = [await ask(client, f"s{k}") for k in range(40)]
            return bad, good, circuits(app), errors_of(app), app.service.store.experiment("exp").state

    bad, good, states, errors, state = asyncio.run(body())
    assert {answer.status_code for answer in bad} == {400}
    assert {answer.json()["error"]["field"] for answer in bad} == {"observations"}
    assert Counter(answer.json()["arm"] for answer in good).keys() == {"one", "four"}
    assert set(states.values()) == {CLOSED} and errors == {}
    assert (state.status, state.rolled_back) == (ExperimentStatus.RUNNING, frozenset())


def test_an_input_that_one_arm_alone_cannot_take_is_that_arms_failure(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, True)}

    async def body():
        async with serving(config_of_arms(tmp_path, arms, breaker={"failures": 3, "open_s": 60})) as (client, app):
            answers = {f"s{k}": (await ask(client, f"s{k}", STRANGE)).json() for k in range(40)}
            early, states = errors_of(app), circuits(app)
            app.service.endpoints.routers["exp"].circuits["four"]._until = 0.0  # time for a probe
            later = {f"t{k}": (await ask(client, f"t{k}", STRANGE)).json() for k in range(40)}
            return answers, later, states, early, errors_of(app), app.service.store.experiment("exp").state.rolled_back

    answers, later, states, early, errors, rolled_back = asyncio.run(body())
    assert {answer["arm"] for answer in (answers | later).values()} == {"one"}
    failed, failed_later = ([s for s, answer in of.items() if "fallback_for" in answer] for of in (answers, later))
    # The three that failed do not speak for those that came while the circuit was open, until a probe has failed as well.
    assert early == dict.fromkeys(failed[:3], 1.0) and len(failed) > 10
    assert errors == dict.fromkeys(failed[:3] + failed_later, 1.0) and len(failed_later) > 10
    assert states == {"one": CLOSED, "four": OPEN} and not rolled_back


def test_one_session_opens_no_circuit_and_fails_for_nobody_else(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, True)}

    async def body():
        async with serving(config_of_arms(tmp_path, arms, breaker={"failures": 3})) as (client, app):
            table = app.service.endpoints.routers["exp"].table
            session = next(f"s{k}" for k in range(99) if table.assign(f"s{k}").arm == "four")
            answers = [(await ask(client, session, STRANGE)).json() for _ in range(40)]
            await asyncio.gather(*(ask(client, session, STRANGE) for _ in range(40)))
            return session, answers, circuits(app), errors_of(app)

    session, answers, states, errors = asyncio.run(body())
    assert all(answer["fallback_for"] == "four" for answer in answers)
    assert errors == {session: 1.0} and set(states.values()) == {CLOSED}


def test_inputs_that_the_control_alone_cannot_take_do_not_close_it_to_others(tmp_path):
    arms = {"one": bundle(tmp_path, 1, True), "four": bundle(tmp_path, 4, False)}

    async def body():
        async with serving(config_of_arms(tmp_path, arms, breaker={"failures": 3, "open_s": 60})) as (client, app):
            bad = {f"bad{k}": await ask(client, f"bad{k}", STRANGE) for k in range(40)}
            good = [await ask(client, f"s{k}") for k in range(20)]
            return bad, good, circuits(app), errors_of(app)

    bad, good, states, errors = asyncio.run(body())
    refused = {session for session, answer in bad.items() if answer.status_code == 503}
    assert refused and {answer.status_code for answer in bad.values()} == {200, 503}
    assert all(int(bad[session].headers["retry-after"]) >= 1 for session in refused)
    assert errors == dict.fromkeys(refused, 1.0)  # as a treatment's would
    assert {answer.status_code for answer in good} == {200} and set(states.values()) == {CLOSED}


def test_a_strange_input_takes_none_of_its_pass_with_it(tmp_path, monkeypatch):
    original = Bundle.act

    def picky(self, requests, noise=None, masks=(), act=None):
        if any(request["agent"][0] == 1 for request in requests):
            raise RuntimeError("what a strange input")
        return original(self, requests, noise, masks, act)

    monkeypatch.setattr(Bundle, "act", picky)
    served = load_actor_critics(bundle(tmp_path, 1, False))

    async def run():
        batcher = ArmBatcher(served, Passes(64, np.random.default_rng(0)))
        seen = [np.array(STRANGE if k == 7 else GOOD, np.float32) for k in range(20)]
        return await asyncio.gather(*(batcher.act({"agent": one}, False) for one in seen), return_exceptions=True)

    found = asyncio.run(run())
    assert [k for k, one in enumerate(found) if isinstance(one, ArmError)] == [7]
    assert {int(one["agent"][0]) for k, one in enumerate(found) if k != 7} == {1}


@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_requests_that_share_a_failed_pass_count_once(tmp_path, monkeypatch, how):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False, broken=how == "not finite")}
    digest = load_actor_critics(arms["four"]).digest
    original = Bundle.act
    monkeypatch.setattr(actor_critic, "stackable", lambda bundles: False)  # each arm has passes of its own

    def failing(self, requests, noise=None, masks=(), act=None):
        if how == "raises" and self.digest == digest:
            raise RuntimeError("out of memory")
        return original(self, requests, noise, masks, act)

    monkeypatch.setattr(Bundle, "act", failing)

    async def body():
        async with serving(config_of_arms(tmp_path, arms, breaker={"failures": 3, "open_s": 60})) as (client, app):
            seen = []
            for batch in range(3):
                answers = await asyncio.gather(*(ask(client, f"s{batch}-{k}") for k in range(40)))
                assert {answer.json()["arm"] for answer in answers} == {"one"}
                seen.append(circuits(app)["four"])
            return seen

    assert asyncio.run(body()) == [CLOSED, CLOSED, OPEN]


class Call:
    """A response of Serve that is not there yet."""

    def __init__(self, found: Any):
        self._found, self.cancelled = found, False

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def cancel(self) -> None:
        self.cancelled = True


def calls(*found: Any) -> tuple[Any, list[Call]]:
    """What sends calls that end so, and those that were sent."""
    sent: list[Call] = []

    def send() -> Call:
        sent.append(Call(found[len(sent)]))
        return sent[-1]

    return send, sent


@pytest.mark.parametrize("how", ["died", "connection", "cancelled"])
def test_a_lost_call_is_sent_once_more(how):
    from ray.exceptions import ActorDiedError

    from marl_ray.serving.arms.remote import answer_of

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

    from marl_ray.serving.arms.remote import answer_of

    send, sent = calls(RayTaskError("act", "Traceback ...", ValueError("x")), "answer")
    with pytest.raises(ArmError) as caught:
        asyncio.run(answer_of(send))
    assert not isinstance(caught.value, LostError) and len(sent) == 1
    send, sent = calls(BackPressureError(9, 8), "answer")
    with pytest.raises(RequestError, match="the arm is busy") as refused:
        asyncio.run(answer_of(send))
    assert refused.value.status == 503 and refused.value.headers == ((b"retry-after", b"1"),) and len(sent) == 1


class Handle:
    """A deployment's handle in Serve's throughput mode: it can be used on an event loop alone, the one it was made on."""

    def __init__(self, answer: Any, loop: Any = None):
        self._answer, self._loop = answer, loop

    def options(self, **options: Any) -> "Handle":
        return Handle(self._answer, asyncio.get_running_loop())

    def remote(self, *arguments: Any) -> Any:
        assert self._loop is asyncio.get_running_loop()
        return self._answer(*arguments)


def test_an_arm_that_is_made_in_a_thread_uses_its_handle_on_the_loop(tmp_path):
    from marl_ray.serving.arms.remote import RemoteArm

    served = load_actor_critics(bundle(tmp_path, 1, False))

    async def answer(requests: Any) -> Any:
        return served.act([observations for observations, _, _ in requests])

    async def body() -> Any:
        arm = await asyncio.to_thread(RemoteArm, served, Handle(answer), 5.0, 1)
        return [await arm.act({"agent": np.array(GOOD, np.float32)}, True) for _ in range(2)]

    assert [int(found["agent"][0]) for found in asyncio.run(body())] == [1, 1]


class Elsewhere:
    """An arm in another process, whose calls end as `ends` says."""

    def __init__(self, served: Bundle, *ends: Exception):
        self.bundle, self._here = served, ArmBatcher(served, Passes(64, np.random.default_rng(0)))
        self.ends = list(ends)

    async def act(self, observations, greedy, masks=None):
        if self.ends:
            raise self.ends.pop(0)
        return await self._here.act(observations, greedy, masks)


def elsewhere(tmp_path: Path, treatment: list[Exception], control: list[Exception], **more: Any):
    """A gateway whose arms are in other processes."""
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False)}
    config = config_of_arms(tmp_path, arms, placement="deployment", **more)
    ends = {arms["one"]: control, arms["four"]: treatment}
    migrated(config.database)
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
    app = elsewhere(tmp_path, [RequestError(503, None, "the arm is busy", 1.0)] * 30, [], breaker={"failures": 2})

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
        return answers, errors_of(app), app.service.store.experiment("exp").state.rolled_back

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
            await until(lambda: app.service.endpoints.routers["exp"].state.rolled_back)
        return app.service.store.experiment("exp").state.rolled_back, app.service.store.audit("exp")[-1].reason

    rolled_back, reason = with_arms(app, body)
    if outage == 3:  # two failures and one round of probes
        assert rolled_back == frozenset()
    else:
        assert rolled_back == {"four"} and "circuit open through 3 rounds of probes" in reason


def test_circuits_fall_back_and_sessions_leave_a_rolled_back_arm_by_default():
    assert BreakerConfig().on_open == "fallback"
    assert parse_config(ExperimentConfig, {"name": "e", "arms": {"a": {"bundle": "a"}}}).on_rollback == "cut"


def test_sessions_of_a_rolled_back_arm_go_on_with_the_control(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False)}

    async def body():
        async with serving(config_of_arms(tmp_path, arms)) as (client, app):
            before = {f"s{k}": (await ask(client, f"s{k}")).json()["arm"] for k in range(20)}
            router = app.service.endpoints.routers["exp"]
            app.service.roll_back(router, "four", "test")
            await until(lambda: "four" in router.state.rolled_back)
            return before, {session: (await ask(client, session)).json()["arm"] for session in before}

    before, after = asyncio.run(body())
    assert set(before.values()) == {"one", "four"} and set(after.values()) == {"one"}


def test_every_experiment_has_a_guardrail_on_errors(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False, broken=True)}

    async def body():
        async with serving(config_of_arms(tmp_path, arms)) as (client, app):
            for k in range(30):
                await ask(client, f"s{k}")
            app.service.unit_reports.write()
            record = app.service.store.experiment("exp")
            (found,) = findings(app.service.store, record, config_of(record)).guardrails
            return found, (await client.get("/v1/experiments/exp")).json()["guardrails"]

    found, (told,) = asyncio.run(body())
    assert (found.name, found.arm, found.margin, found.alpha) == ("error", "four", 0.01, 0.01)
    assert (told["name"], told["margin"]) == ("error", 0.01)


def test_weights_that_were_rolled_back_are_refused_under_another_runs_name(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False)}
    again = arms | {"four": bundle(tmp_path, 4, False, run="another")}
    assert again["four"] != arms["four"]

    async def body():
        async with serving(config_of_arms(tmp_path, arms)) as (_, app):
            app.service.roll_back(app.service.endpoints.routers["exp"], "four", "test")
            await until(lambda: app.service.endpoints.routers["exp"].state.rolled_back)

    asyncio.run(body())
    config = config_of_arms(tmp_path, again, name="next")
    with pytest.raises(MarlRayError, match=r"arms\.four: the weights of bundle .* have been rolled back in"):
        Gateway(config)


def test_errors_of_arms_cross_processes():
    found = pickle.loads(pickle.dumps(NotFiniteError("not finite", 7)))
    assert (type(found), str(found), found.of) == (NotFiniteError, "not finite", 7)


def counted(failed: int, of: int) -> Summary:
    share = failed / of
    return Summary(of, share, of * share * (1 - share) / (of - 1))


@pytest.mark.parametrize(
    ("treatment", "control", "low", "high"),
    [(0.1, 0.0, 0.99, 1.0), (1.0, 0.0, 1.0, 1.0), (0.1, 0.1, 0.0, 0.01), (0.02, 0.01, 0.0, 0.01), (0.0, 0.0, 0.0, 0.0)],
)
def test_the_guardrail_on_errors_finds_what_it_should_and_nothing_else(treatment, control, low, high):
    """Of 400 experiments, each looked at 25 times: how many have a treatment rolled back, at these rates of failure."""
    rng, looks = np.random.default_rng(0), np.unique(np.geomspace(50, 3_000, 25).astype(int))
    asked = {"alpha": ERRORS.alpha, "margin": ERRORS.margin, "min_outcomes": 50, "higher_is_better": False}
    rolled_back = 0
    for _ in range(400):
        one, other = (np.cumsum(rng.random(3_000) < rate)[looks - 1] for rate in (treatment, control))
        rolled_back += any(
            harm(counted(int(a), int(n)), counted(int(b), int(n)), binary=True, **asked).proven
            for a, b, n in zip(one, other, looks, strict=True)
        )
    assert low <= rolled_back / 400 <= high


@pytest.mark.parametrize("also_control", [False, True])
def test_a_treatment_that_fails_a_tenth_of_its_sessions_is_rolled_back_unless_the_control_does_too(
    tmp_path, also_control
):
    now = [1_000_000.0]
    store = ExperimentStore(f"sqlite:///{tmp_path}/experiments.db", clock=lambda: now[0])
    config = parse_config(ExperimentConfig, {"name": "exp", "arms": {arm: {"bundle": arm} for arm in "ab"}})
    stored = config.model_dump(mode="json") | {"salt": "s", "control": "a"}
    for arm in "ab":
        stored["arms"][arm]["digest"] = arm
    store.open_experiment("exp", stored)
    arms = {f"u{k}": "ab"[k % 2] for k in range(1_000)}
    store.record_exposures([Exposure("exp", unit, Assignment(arm, 1, 0.5), now[0]) for unit, arm in arms.items()])
    failing = [f"u{k}" for k in range(1_000) if k // 2 % 10 == 0 and (also_control or arms[f"u{k}"] == "b")]
    store.record("exp", [Report(unit, {"error": 1.0}) for unit in failing], "gateway")
    decision = decide(store, config)
    assert decision is not None and decision.step is RolloutStep.HOLD  # no session's window is over
    now[0] += config.outcome_window_s + 2
    decision = decide(store, config)
    assert decision is not None
    assert (decision.step, decision.reason == "harm proven by error") == (
        (RolloutStep.HOLD, False) if also_control else (RolloutStep.ROLLBACK, True)
    )
    store.close()
