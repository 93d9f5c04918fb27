"""The gateway in this process: requests and answers. Real bundles, a real SQLite file, no Ray."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from toy_serving.gateways import AGENTS, SEES, act, gateway_config, make_bundle, serving, with_gateway

from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.serving.http.messages import route_path


async def test_act_answers_with_the_arm_its_actions_and_log_probs(config):
    async with serving(config) as (client, _):
        answers = [await act(client, f"s{i}", mode=("sample", "greedy")[i % 2]) for i in range(20)]
    for answer in answers:
        action = {"one": 1, "four": 4}[answer["arm"]]
        assert answer["actions"] == dict.fromkeys(AGENTS, action)
        assert set(answer) == {"experiment", "arm", "epoch", "propensity", "actions", "log_probs"}
        assert (answer["experiment"], answer["epoch"], answer["propensity"]) == ("exp", 1, 0.5)
        assert all(-0.1 < answer["log_probs"][agent] <= 0 for agent in AGENTS)


async def test_an_answer_that_nobody_takes_ends_with_the_deadline_of_a_request(bundles, tmp_path, caplog):
    config = gateway_config(bundles, tmp_path / "x.db", request_timeout_s=0.1)

    async def hang(*_: object) -> Any:
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/nowhere",
        "headers": [(b"x-request-id", b"r1")],
        "query_string": b"",
    }
    async with serving(config) as (_, gateway):
        async with asyncio.timeout(30):
            await gateway(scope, hang, hang)
    assert caplog.messages[-1] == "request r1: the answer was not taken within 0.1 s"


async def test_continuous_actions_are_lists_and_one_agent_may_act_alone(tmp_path):
    box, out = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-1, 1, (3,), np.float32)
    made = {arm: make_bundle(tmp_path, k, box, actions=out) for k, arm in enumerate(("one", "four"))}

    async with serving(gateway_config(made, tmp_path / "x.db")) as (client, _):
        actions = (await act(client, "s", observations={"agent_1": [0.5, -1]}))["actions"]
    assert list(actions) == ["agent_1"]
    assert len(actions["agent_1"]) == 3


async def test_sessions_may_come_by_header_and_the_body_wins(config):
    async with serving(config) as (client, _):
        by_body = [(await act(client, f"s{i}"))["arm"] for i in range(12)]
        by_header = []
        for i in range(12):
            answer = await client.post("/v1/act", json={"observations": SEES}, headers={"X-Session-Id": f"s{i}"})
            by_header.append(answer.json()["arm"])
        mixed = await client.post(
            "/v1/act", json={"session_id": "s0", "observations": SEES}, headers={"x-session-id": "other"}
        )
        report = (await client.get("/v1/experiments/exp")).json()
        status = mixed.status_code
    assert by_body == by_header
    assert set(by_body) == {"one", "four"}
    assert status == 200
    assert sum(arm["exposures"] for arm in report["arms"].values()) == 12


BAD_ACTS = [
    (b"{", 400, "body", "malformed JSON"),
    (b"", 400, "body", "malformed JSON"),
    (b"[1]", 400, "body", "expected a JSON object, got list"),
    (b"null", 400, "body", "expected a JSON object, got nothing"),
    (b"\xff\xfe", 400, "body", "malformed JSON"),
    ({"observations": SEES}, 400, "session_id", "expected 1 to 256 printable characters"),
    ({"session_id": "", "observations": SEES}, 400, "session_id", "printable"),
    ({"session_id": 7, "observations": SEES}, 400, "session_id", "printable"),
    ({"session_id": "a\u0000b", "observations": SEES}, 400, "session_id", "printable"),
    ({"session_id": "x" * 257, "observations": SEES}, 400, "session_id", "printable"),
    ({"session_id": "s"}, 400, "observations", "at least one agent"),
    ({"session_id": "s", "observations": {}}, 400, "observations", "at least one agent"),
    ({"session_id": "s", "observations": [1, 2, 3]}, 400, "observations", "at least one agent"),
    ({"session_id": "s", "observations": {"who": [0, 0, 0]}}, 400, "observations.who", "unknown agent"),
    ({"session_id": "s", "observations": {"agent_0": [0, 0]}}, 400, "observations.agent_0", "shape [3]"),
    ({"session_id": "s", "observations": {"agent_0": [0, 0, 9]}}, 400, "observations.agent_0", "out of range"),
    ({"session_id": "s", "observations": {"agent_0": [0, 0, -1]}}, 400, "observations.agent_0", "out of range"),
    ({"session_id": "s", "observations": {"agent_0": [0, 0.5, 1]}}, 400, "observations.agent_0", "fractional"),
    ({"session_id": "s", "observations": {"agent_0": [0, "a", 1]}}, 400, "observations.agent_0", "shape [3]"),
    ({"session_id": "s", "observations": {"agent_0": [[0], 1, 2]}}, 400, "observations.agent_0", "shape [3]"),
    ({"session_id": "s", "observations": {"agent_0": None}}, 400, "observations.agent_0", "shape [3]"),
    ({"session_id": "s", "observations": {"agent_0": [10**18, 1, 1]}}, 400, "observations.agent_0", "out of range"),
    ({"session_id": "s", "observations": SEES, "mode": "best"}, 400, "mode", 'expected "sample" or "greedy"'),
    ({"session_id": "s", "observations": SEES, "mode": ["greedy"]}, 400, "mode", 'expected "sample" or "greedy"'),
    ({"session_id": "s", "observations": SEES, "moode": "greedy"}, 400, "moode", "unknown field"),
    ({"session_id": "s", "observations": SEES, "experiment": "none"}, 404, "experiment", "expected one of exp"),
    ({"session_id": "s", "observations": SEES, "experiment": 3}, 400, "experiment", "expected one of exp"),
]


def as_bytes(content: Any) -> bytes:
    return content if isinstance(content, bytes) else json.dumps(content).encode()


async def test_bad_acts_are_4xx_with_the_field_and_leave_no_exposure(config):
    async with serving(config) as (client, _):
        answers = [await client.post("/v1/act", content=as_bytes(content)) for content, *_ in BAD_ACTS]
        report = (await client.get("/v1/experiments/exp")).json()
    for answer, (content, status, field, message) in zip(answers, BAD_ACTS, strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["field"]) == (status, field), (content, error)
        assert message in error["message"]
        assert "\n" not in error["message"]
    assert all(arm["exposures"] == 0 for arm in report["arms"].values())


@pytest.mark.parametrize(
    ("content", "status", "field"),
    [
        (b'{"session_id": "s", "value": NaN}', 400, "body"),
        (b'{"session_id": "s", "value": 1e999}', 400, "body"),
        (b'{"session_id": "s", "value": 1e200}', 400, "value"),
        (b'{"session_id": "s", "value": "1"}', 400, "value"),
        (b'{"session_id": "s", "value": true}', 400, "value"),
        (b'{"session_id": "s"}', 400, "value"),
        (b'{"value": 1}', 400, "session_id"),
        (b'{"session_id": "s", "value": 1, "arm": "one"}', 400, "arm"),
        (b'{"session_id": "never acted", "value": 1}', 404, "session_id"),
    ],
)
async def test_bad_outcomes_are_4xx_with_the_field(config, content, status, field):
    async with serving(config) as (client, _):
        await act(client, "s")
        answer = await client.post("/v1/outcomes", content=content)
    assert (answer.status_code, answer.json()["error"]["field"]) == (status, field)


def test_paths_methods_and_sizes(config):
    async def body(client):
        big = b'{"session_id": "' + b"x" * 2_000_000 + b'"}'

        async def chunks():  # no content-length
            for _ in range(20):
                yield b" " * 100_000

        return {
            "unknown": await client.get("/v2/act"),
            "method": await client.get("/v1/act"),
            "method 2": await client.post("/v1/experiments/exp"),
            "experiment": await client.get("/v1/experiments/none"),
            "declared": await client.post("/v1/act", content=big),
            "streamed": await client.post("/v1/act", content=chunks()),
            "health": await client.get("/health"),
            "list": await client.get("/v1/experiments/"),
        }

    answers = with_gateway(config, body)
    codes = [answer.status_code for answer in answers.values()]
    assert codes == [404, 405, 405, 404, 413, 413, 200, 200]
    assert answers["method"].headers["allow"] == "POST"
    assert all(answers[key].json()["error"]["message"] for key in list(answers)[:6])
    assert answers["health"].json() == {"status": "ok", "experiments": ["exp"]}
    assert answers["list"].json()["experiments"][0]["arms"] == {"one": 0.5, "four": 0.5}


def test_a_mount_prefix_is_taken_off():
    assert route_path({"path": "/ab/v1/act", "root_path": "/ab"}) == "/v1/act"
    assert route_path({"path": "/v1/act/", "root_path": ""}) == "/v1/act"
    assert route_path({"path": "/abc", "root_path": "/ab"}) == "/abc"
    assert route_path({"path": "/ab", "root_path": "/ab"}) == "/"


async def test_one_of_several_experiments_must_be_named(bundles, tmp_path):
    async with serving(gateway_config(bundles, tmp_path / "e.db", names=("x", "y"))) as (client, _):
        unnamed = await client.post("/v1/act", json={"session_id": "s", "observations": SEES})
        answers = [await act(client, f"s{i}", experiment=e) for i in range(30) for e in ("x", "y")]
    assert (unnamed.status_code, unnamed.json()["error"]["field"]) == (400, "experiment")
    arms = {e: [a["arm"] for a in answers if a["experiment"] == e] for e in ("x", "y")}
    assert arms["x"] != arms["y"]  # salted by name


async def test_masked_actions_are_never_taken_and_masks_are_checked(config):
    async with serving(config) as (client, _):
        only = {"agent_0": [0, 0, 0, 0, 0, 1]}
        answers = [await act(client, f"s{k}", action_masks=only, mode=("sample", "greedy")[k % 2]) for k in range(8)]
        bad = []
        for masks in ({"agent_0": [1, 0]}, {"agent_0": [0] * 6}, {"agent_9": [1] * 6}, [1], {"agent_0": [2] * 6}):
            sent = {"session_id": "x", "observations": SEES, "action_masks": masks}
            bad.append(await client.post("/v1/act", json=sent))
    assert {answer["actions"]["agent_0"] for answer in answers} == {5}
    assert {answer["log_probs"]["agent_0"] for answer in answers} == {0.0}
    assert all(answer["actions"]["agent_1"] == {"one": 1, "four": 4}[answer["arm"]] for answer in answers)
    assert [answer.status_code for answer in bad] == [400] * 5
    assert all(answer.json()["error"]["field"].startswith("action_masks") for answer in bad)


async def test_concurrent_requests_share_passes_and_never_mix_arms(config, monkeypatch):
    passes: list[tuple[str, int, bool]] = []
    original = ActorCriticBundle.act

    def counted(self, requests, noise=None, masks=(), act=None):
        passes.append((self.digest, len(requests), noise is None))
        return original(self, requests, noise, masks, act)

    monkeypatch.setattr(ActorCriticBundle, "act", counted)

    async with serving(config.model_copy(update={"max_batch": 64})) as (client, _):
        modes = ("sample", "greedy")
        answers = await asyncio.gather(*(act(client, f"s{i}", mode=modes[i % 2]) for i in range(200)))
    for answer in answers:
        assert answer["actions"] == dict.fromkeys(AGENTS, {"one": 1, "four": 4}[answer["arm"]])
    assert sum(size for _, size, _ in passes) == 200
    assert len(passes) < 40
    assert max(size for _, size, _ in passes) == 32  # two agents each


def fail_passes(monkeypatch, count):
    """Let the next passes of any arm fail."""
    original, failures = ActorCriticBundle.act, iter([True] * count)

    def failing(self, requests, noise=None, masks=(), act=None):
        if next(failures, False):
            raise RuntimeError("secret")
        return original(self, requests, noise, masks, act)

    monkeypatch.setattr(ActorCriticBundle, "act", failing)


def session_of(app, arm):
    table = app.service.endpoints.routers["exp"].rules.table
    return next(f"s{i}" for i in range(99) if table.assign(f"s{i}").arm == arm)


async def test_the_control_answers_for_a_treatment_only_in_the_pass_that_fails(config, monkeypatch):
    async with serving(config) as (client, app):
        session = session_of(app, "four")
        fail_passes(monkeypatch, 1)
        first, second = [await act(client, session) for _ in range(2)]
    assert (first["arm"], first["fallback_for"], first["actions"]) == ("one", "four", dict.fromkeys(AGENTS, 1))
    assert (second["arm"], second["actions"]) == ("four", dict.fromkeys(AGENTS, 4)) and "fallback_for" not in second


@pytest.mark.parametrize(("arm", "passes"), [("one", 1), ("four", 2)])
async def test_an_act_whose_passes_all_fail_is_refused_and_the_next_one_is_answered(config, monkeypatch, arm, passes):
    async with serving(config) as (client, app):
        body = {"session_id": session_of(app, arm), "observations": SEES}
        fail_passes(monkeypatch, passes)
        first, second = [await client.post("/v1/act", json=body) for _ in range(2)]
        report = (await client.get("/v1/experiments/exp")).json()
    assert first.status_code == 503
    assert "secret" not in first.text
    assert second.status_code == 200 and second.json()["arm"] == arm and "fallback_for" not in second.json()
    assert {name: entry["exposures"] for name, entry in report["arms"].items() if entry["exposures"]} == {arm: 1}
