"""The gateway in this process: real bundles, a real SQLite file, no Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_ray.config import GatewayConfig, NetworkConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.store import ExperimentStore, StoreError
from marl_ray.policies.actor_critic import ActorCritic
from marl_ray.policies.bundle import Bundle, Lineage, PolicyParts, save_bundle
from marl_ray.serving import gateway as gateway_module
from marl_ray.serving.deploy import read_serve_config
from marl_ray.serving.exposures import ExposureLog
from marl_ray.serving.gateway import Gateway
from marl_ray.serving.http import route_path

# Ray's own models, at import.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")

OBSERVATION = spaces.MultiDiscrete([3, 4, 5])
ACTIONS = spaces.Discrete(6)
LINEAGE = Lineage(
    run="r",
    algorithm={"p": "ippo"},
    config_hash="c",
    code_version="v",
    seed=0,
    env={},
    steps=1,
    metrics={"return": 0.5},
)
AGENTS = ("agent_0", "agent_1")
SEES = {"agent_0": [0, 1, 2], "agent_1": [2, 3, 4]}


def make_bundle(folder: Path, action: int, observation=OBSERVATION, agents=AGENTS, actions=ACTIONS) -> str:
    """A small random policy that all but certainly takes one action."""
    torch.manual_seed(action)
    policy = ActorCritic(observation, actions, NetworkConfig(hidden=(8,)))
    with torch.no_grad():
        policy.actor.rest[-1].bias[action] = 30.0
    parts = PolicyParts(NetworkConfig(hidden=(8,)), observation, actions, policy.actor.state_dict())
    return str(save_bundle(folder, dict.fromkeys(agents, "p"), {"p": parts}, LINEAGE))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bundles")
    return {"one": make_bundle(folder, 1), "four": make_bundle(folder, 4)}


def gateway_config(
    bundles: dict[str, str], database: Path, weights=(1.0, 1.0), names=("exp",), **more: Any
) -> GatewayConfig:
    arms = {arm: {"bundle": bundles[arm], "weight": w} for arm, w in zip(("one", "four"), weights, strict=True)}
    experiments = [{"name": name, "arms": arms, "min_outcomes": 5} for name in names]
    return parse_config(GatewayConfig, {"experiments": experiments, "database": f"sqlite:///{database}"} | more)


@asynccontextmanager
async def serving(config: GatewayConfig) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway]]:
    app = Gateway(config, seed=0)
    app.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client, app
    finally:
        app.close()


def with_gateway(config: GatewayConfig, body: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with serving(config) as (client, _):
            return await body(client)

    return asyncio.run(run())


@pytest.fixture
def config(bundles, tmp_path) -> GatewayConfig:
    return gateway_config(bundles, tmp_path / "experiments.db")


async def act(client: httpx.AsyncClient, session: str, **more: Any) -> dict[str, Any]:
    answer = await client.post("/v1/act", json={"session_id": session, "observations": SEES} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_act_answers_with_the_arm_its_actions_and_log_probs(config):
    async def body(client):
        return [await act(client, f"s{i}", mode=("sample", "greedy")[i % 2]) for i in range(20)]

    for answer in with_gateway(config, body):
        action = {"one": 1, "four": 4}[answer["arm"]]
        assert answer["actions"] == dict.fromkeys(AGENTS, action)
        assert set(answer) == {"experiment", "arm", "epoch", "propensity", "actions", "log_probs"}
        assert (answer["experiment"], answer["epoch"], answer["propensity"]) == ("exp", 1, 0.5)
        assert all(-0.1 < answer["log_probs"][agent] <= 0 for agent in AGENTS)


def test_continuous_actions_are_lists_and_one_agent_may_act_alone(tmp_path):
    box, out = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-1, 1, (3,), np.float32)
    made = {arm: make_bundle(tmp_path, k, box, actions=out) for k, arm in enumerate(("one", "four"))}

    async def body(client):
        return await act(client, "s", observations={"agent_1": [0.5, -2]})

    actions = with_gateway(gateway_config(made, tmp_path / "x.db"), body)["actions"]
    assert list(actions) == ["agent_1"]
    assert len(actions["agent_1"]) == 3


def test_sessions_may_come_by_header_and_the_body_wins(config):
    async def body(client):
        by_body = [(await act(client, f"s{i}"))["arm"] for i in range(12)]
        by_header = []
        for i in range(12):
            answer = await client.post("/v1/act", json={"observations": SEES}, headers={"X-Session-Id": f"s{i}"})
            by_header.append(answer.json()["arm"])
        mixed = await client.post(
            "/v1/act", json={"session_id": "s0", "observations": SEES}, headers={"x-session-id": "other"}
        )
        report = (await client.get("/v1/experiments/exp")).json()
        return by_body, by_header, mixed.status_code, report

    by_body, by_header, status, report = with_gateway(config, body)
    assert by_body == by_header
    assert set(by_body) == {"one", "four"}
    assert status == 200
    assert sum(arm["exposures"] for arm in report["arms"].values()) == 12


BAD_ACTS = [
    (b"{", 400, "body", "malformed JSON"),
    (b"", 400, "body", "malformed JSON"),
    (b"[1]", 400, "body", "expected a JSON object, got list"),
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


def test_bad_acts_are_4xx_with_the_field_and_leave_no_exposure(config):
    async def body(client):
        answers = [await client.post("/v1/act", content=as_bytes(content)) for content, *_ in BAD_ACTS]
        return answers, (await client.get("/v1/experiments/exp")).json()

    answers, report = with_gateway(config, body)
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
def test_bad_outcomes_are_4xx_with_the_field(config, content, status, field):
    async def body(client):
        await act(client, "s")
        return await client.post("/v1/outcomes", content=content)

    answer = with_gateway(config, body)
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


def test_one_of_several_experiments_must_be_named(bundles, tmp_path):
    async def body(client):
        unnamed = await client.post("/v1/act", json={"session_id": "s", "observations": SEES})
        return unnamed, [await act(client, f"s{i}", experiment=e) for i in range(30) for e in ("x", "y")]

    unnamed, answers = with_gateway(gateway_config(bundles, tmp_path / "e.db", names=("x", "y")), body)
    assert (unnamed.status_code, unnamed.json()["error"]["field"]) == (400, "experiment")
    arms = {e: [a["arm"] for a in answers if a["experiment"] == e] for e in ("x", "y")}
    assert arms["x"] != arms["y"]  # salted by name


def test_masked_actions_are_never_taken_and_masks_are_checked(config):
    async def body(client):
        only = {"agent_0": [0, 0, 0, 0, 0, 1]}
        answers = [await act(client, f"s{k}", action_masks=only, mode=("sample", "greedy")[k % 2]) for k in range(8)]
        bad = []
        for masks in ({"agent_0": [1, 0]}, {"agent_0": [0] * 6}, {"agent_9": [1] * 6}, [1], {"agent_0": [2] * 6}):
            sent = {"session_id": "x", "observations": SEES, "action_masks": masks}
            bad.append(await client.post("/v1/act", json=sent))
        return answers, bad

    answers, bad = with_gateway(config, body)
    assert {answer["actions"]["agent_0"] for answer in answers} == {5}
    assert {answer["log_probs"]["agent_0"] for answer in answers} == {0.0}
    assert {answer["actions"]["agent_1"] for answer in answers} <= {1, 4}
    assert [answer.status_code for answer in bad] == [400] * 5
    assert all(answer.json()["error"]["field"].startswith("action_masks") for answer in bad)


def test_concurrent_requests_share_passes_and_never_mix_arms(config, monkeypatch):
    passes: list[tuple[str, int, bool]] = []
    original = Bundle.act

    def counted(self, requests, noise=None, masks=()):
        passes.append((self.digest, len(requests), noise is None))
        return original(self, requests, noise, masks)

    monkeypatch.setattr(Bundle, "act", counted)

    async def body(client):
        modes = ("sample", "greedy")
        return await asyncio.gather(*(act(client, f"s{i}", mode=modes[i % 2]) for i in range(200)))

    answers = with_gateway(config.model_copy(update={"max_batch": 64}), body)
    for answer in answers:
        assert answer["actions"] == dict.fromkeys(AGENTS, {"one": 1, "four": 4}[answer["arm"]])
    assert sum(size for _, size, _ in passes) == 200
    assert len(passes) < 40
    assert max(size for _, size, _ in passes) == 32  # two agents each


def test_a_failing_pass_is_a_500_without_internals_and_the_next_one_works(config, monkeypatch):
    original = Bundle.act
    failures = iter([True])

    def failing(self, requests, noise=None, masks=()):
        if next(failures, False):
            raise RuntimeError("secret")
        return original(self, requests, noise, masks)

    monkeypatch.setattr(Bundle, "act", failing)

    async def body(client):
        first = await client.post("/v1/act", json={"session_id": "s", "observations": SEES})
        return first, await act(client, "s"), (await client.get("/v1/experiments/exp")).json()

    first, _, report = with_gateway(config, body)
    assert first.status_code == 500
    assert "secret" not in first.text
    assert sum(arm["exposures"] for arm in report["arms"].values()) == 1  # it met its arm


def test_outcomes_join_at_once_are_idempotent_and_final(config):
    async def body(client):
        arm = (await act(client, "s"))["arm"]
        posts = [await client.post("/v1/outcomes", json={"session_id": "s", "value": v}) for v in (0.5, 0.5, 0.6)]
        return arm, posts, (await client.get("/v1/experiments/exp")).json()

    arm, posts, report = with_gateway(config, body)
    assert [post.status_code for post in posts] == [200, 200, 409]
    assert posts[0].json() == {"experiment": "exp", "arm": arm, "value": 0.5}
    assert posts[2].json()["error"] == {"field": "value", "message": "session 's' already has outcome 0.5, got 0.6"}
    assert (report["arms"][arm]["outcomes"], report["arms"][arm]["mean"]) == (1, 0.5)


def test_the_report_has_lineage_intervals_and_a_verdict(config):
    rng = np.random.default_rng(0)

    async def body(client):
        async def episode(i):
            arm = (await act(client, f"s{i}"))["arm"]
            value = float(rng.normal(0.9 if arm == "four" else 0.1, 0.1))
            assert (await client.post("/v1/outcomes", json={"session_id": f"s{i}", "value": value})).status_code == 200

        await asyncio.gather(*(episode(i) for i in range(60)))
        return (await client.get("/v1/experiments/exp")).json()

    report = with_gateway(config, body)
    one, four = report["arms"]["one"], report["arms"]["four"]
    assert report["control"] == "one"
    assert report["config"]["min_outcomes"] == 5
    assert "verdict" not in one
    assert four["verdict"] == "better"
    assert four["difference_interval"][0] < four["difference"] < four["difference_interval"][1]
    assert four["interval"][0] < four["mean"] < four["interval"][1]
    assert four["lineage"]["metrics"] == {"return": 0.5}
    assert len(four["digest"]) == 64
    assert one["exposures"] + four["exposures"] == one["outcomes"] + four["outcomes"] == 60


def test_a_fresh_experiment_knows_nothing_yet(config):
    async def body(client):
        return (await client.get("/v1/experiments/exp")).json()

    four = with_gateway(config, body)["arms"]["four"]
    assert (four["exposures"], four["outcomes"]) == (0, 0)
    assert {four[key] for key in ("mean", "variance", "interval", "difference", "difference_interval")} == {None}
    assert four["verdict"] == "undecided"


def test_metrics_are_prometheus_text(config):
    async def body(client):
        for _ in range(5):
            await act(client, "s")
        await client.get("/nowhere/at/all")
        return (await client.get("/metrics")).text

    text = with_gateway(config, body)
    assert 'marl_ray_gateway_requests_total{endpoint="/v1/act",status="200"} 5.0' in text
    assert 'marl_ray_gateway_errors_total{endpoint="other",status="404"} 1.0' in text
    assert 'marl_ray_gateway_act_seconds_bucket{le="0.0005"}' in text
    exposures = [line for line in text.splitlines() if line.startswith("marl_ray_gateway_exposures_total{")]
    assert [line.split()[-1] for line in exposures] == ["1.0"]


def test_a_session_keeps_its_arm_through_restarts_and_new_weights(bundles, tmp_path):
    database = tmp_path / "experiments.db"

    async def arms(client):
        return {f"s{i}": await act(client, f"s{i}") for i in range(20)}

    async def new_arms(client):
        return [(await act(client, f"n{i}")) for i in range(20)]

    first = with_gateway(gateway_config(bundles, database), arms)
    assert with_gateway(gateway_config(bundles, database), arms) == first
    moved = gateway_config(bundles, database, weights=(0.0, 1.0))
    assert with_gateway(moved, arms) == first  # also their epoch and propensity
    fresh = with_gateway(moved, new_arms)
    assert {(a["arm"], a["epoch"], a["propensity"]) for a in fresh} == {("four", 2, 1.0)}
    assert with_gateway(gateway_config(bundles, database, weights=(1.0, 0.0)), arms) == first


def test_exposures_survive_forgetting_and_a_full_queue(config, monkeypatch):
    monkeypatch.setattr("marl_ray.serving.router.REMEMBERED", 3)

    async def run():
        async with serving(config) as (client, app):
            for i in range(20):
                await act(client, f"s{i % 10}")
            assert len(app.routers["exp"]._remembered) == 3
            app._log._capacity = 0
            await act(client, "late")
            app._log._capacity = 10
            first = (await client.get("/v1/experiments/exp")).json()
            await act(client, "late")
            return app._log.dropped, first, (await client.get("/v1/experiments/exp")).json()

    dropped, first, second = asyncio.run(run())
    assert dropped == 1
    assert [sum(a["exposures"] for a in r["arms"].values()) for r in (first, second)] == [10, 11]


def test_closing_writes_what_is_queued(config):
    async def run():
        async with serving(config) as (client, app):
            app._log._interval_s = 1e6  # from the second round on
            await act(client, "s")

    asyncio.run(run())
    store = ExperimentStore(config.database)
    assert sum(arm.exposures for arm in store.summary("exp").values()) == 1


def test_the_lifespan_starts_and_stops(config):
    async def run():
        app, sent = Gateway(config), []
        messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive():
            return next(messages)

        async def send(message):
            sent.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        return sent

    assert asyncio.run(run()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_a_failing_database_is_a_503_and_loses_nothing(config, monkeypatch):
    original, broken = ExperimentStore.record_exposures, [True]

    def record(self, exposures):
        if broken and exposures:
            raise StoreError("experiment store: disk full")
        original(self, exposures)

    monkeypatch.setattr(ExperimentStore, "record_exposures", record)

    async def body(client):
        await act(client, "s")  # acting does not need the database
        down = await client.post("/v1/outcomes", json={"session_id": "s", "value": 1})
        broken.clear()
        return down, await client.post("/v1/outcomes", json={"session_id": "s", "value": 1})

    down, up = with_gateway(config, body)
    assert (down.status_code, up.status_code) == (503, 200)


def test_an_outcome_waits_for_another_replicas_exposure(bundles, tmp_path):
    config = gateway_config(bundles, tmp_path / "e.db", replicas=2)

    async def run():
        async with serving(config) as (one, app), serving(config) as (two, _):
            app._log.flush = lambda: None  # its exposure is under way ...
            await act(one, "s")
            post = asyncio.create_task(two.post("/v1/outcomes", json={"session_id": "s", "value": 1}))
            await asyncio.sleep(0.05)
            ExposureLog.flush(app._log)  # ... and arrives
            return await post

    assert asyncio.run(run()).status_code == 200


def test_arms_must_understand_the_same_requests(bundles, tmp_path):
    other = {
        "spaces": make_bundle(tmp_path, 2, observation=spaces.MultiDiscrete([3, 4, 6])),
        "agents": make_bundle(tmp_path, 2, agents=("solo",)),
        "missing": str(tmp_path / "nothing"),
    }
    messages = {
        "spaces": "agent 'agent_0' has other spaces",
        "agents": "plays agents solo",
        "missing": "no readable bundle",
    }
    for kind, message in messages.items():
        config = gateway_config(bundles | {"four": other[kind]}, tmp_path / "e.db")
        with pytest.raises(MarlRayError, match=rf"experiments\.exp\.arms\.four: .*{message}"):
            Gateway(config)


def serve_config(**changes: Any) -> dict[str, Any]:
    args = {"experiments": [{"name": "e", "arms": {"a": {"bundle": "a"}, "b": {"bundle": "b"}}}]}
    application = {"name": "x", "import_path": "marl_ray.serving.app:build", "args": args}
    return {"applications": [application | changes.pop("application", {})]} | changes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (serve_config(http_option={}), "unknown key 'http_option'"),
        (serve_config(http_options={"hosst": "x"}), "unknown key 'http_options.hosst'"),
        (serve_config(application={"arg": {}}), "unknown key 'applications.0.arg'"),
        (serve_config(application={"deployments": [{"name": "Gateway", "replicas": 2}]}), "deployments.0.replicas'"),
        (serve_config(application={"args": {"experiments": [], "x": 1}}), r"applications\.0\.args: "),
        (serve_config(application={"args": {}}), r"applications\.0\.args: missing key 'experiments'"),
        (serve_config(http_options={"port": "eighty"}), r"http_options\.port"),
        ({}, "applications"),
        ([], "cannot be read|expected a mapping"),
    ],
)
def test_serve_configs_are_checked_strictly(config, message, tmp_path):
    with pytest.raises(MarlRayError, match=message) as caught:
        if isinstance(config, list):
            (tmp_path / "list.yaml").write_text("- 1\n")
            config = tmp_path / "list.yaml"
        read_serve_config(config)
    assert "\n" not in str(caught.value)


def test_the_config_in_the_repository_is_valid():
    path = Path(__file__).parents[2] / "serve" / "configs" / "gridworld_ab.yaml"
    config = read_serve_config(path)
    assert config["http_options"]["host"] == "127.0.0.1"
    with pytest.raises(MarlRayError, match="cannot be read"):
        read_serve_config(path.with_name("none.yaml"))


def test_constants_fit_the_database():
    assert gateway_module.SESSION_LENGTH <= 256  # the column's width
