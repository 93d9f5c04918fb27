"""OpenAI's official client against the gateway, over real HTTP; and with arms in deployments of their own."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import torch
import uvicorn
from toy_models.tokenizers import QWEN
from toy_serving.gateways import write_keys
from toy_serving.text_gateways import make_text_bundle, text_config
from toy_serving.undeploying import undeploy
from waiting import until

from marl_ray.cluster.local_ray import LocalRay, free_port
from marl_ray.serving.administration.deploy import deploy
from marl_ray.serving.administration.remote_experiments import deploy_bundle, report_lines
from marl_ray.serving.asgi import Gateway

pytestmark = pytest.mark.shared_ray("two")

torch.set_num_threads(1)
WAIT_S = 30.0
CONTEXT = 4096
HELLO: dict[str, Any] = {"model": "exp", "messages": [{"role": "user", "content": "hello"}], "seed": 5}
LONG: dict[str, Any] = HELLO | {"max_tokens": CONTEXT - 20, "temperature": 0}


class Site(NamedTuple):
    url: str
    app: Gateway

    def client(self, key: str = "game", timeout: float = WAIT_S) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=timeout)

    @property
    def rows(self) -> int:
        return sum(arm.rows for arm in self.app.service.endpoints.routers["exp"].arms.values())

    def wait_until_idle(self) -> None:
        until(lambda: self.rows == 0, "the end of all responses", details=lambda: f"{self.rows} are still written")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway with keys and two arms, on its own port."""
    folder = tmp_path_factory.mktemp("openai")
    bundles = {arm: make_text_bundle(folder, seed, context=CONTEXT) for seed, arm in enumerate(("one", "two"))}
    keys = write_keys(folder / "keys.yaml", game=("inference", "outcomes"), ops=("admin",))
    app = Gateway(text_config(bundles, folder, api_keys=keys), seed=0)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    yield Site(f"http://127.0.0.1:{listening.getsockname()[1]}", app)
    server.should_exit = True
    thread.join(WAIT_S)
    listening.close()
    assert not thread.is_alive()


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    with site.client() as made:
        yield made


def test_a_streamed_chat_is_the_whole_one_in_parts(client):
    full = client.chat.completions.create(**HELLO, user="s", logprobs=True)
    chunks = list(
        client.chat.completions.create(**HELLO, user="s", stream=True, stream_options={"include_usage": True})
    )
    [choice] = full.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert len(choice.logprobs.content) == full.usage.completion_tokens == 12
    assert full.usage.total_tokens == full.usage.prompt_tokens + 12 and full.system_fingerprint
    assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == choice.message.content
    assert chunks[-1].usage == full.usage and chunks[-2].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    sent_back = [*HELLO["messages"], choice.message, {"role": "user", "content": "more"}]
    client.chat.completions.create(**HELLO | {"messages": sent_back})


def test_models_are_endpoints(client):
    [model] = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("exp", "model", "marl-ray")


def test_a_session_keeps_its_arm_and_tells_its_outcome(site, client):
    arms = {}
    for k in range(8):
        met = set()
        for _ in range(3):
            answer = client.chat.completions.with_raw_response.create(**HELLO, user=f"user-{k}")
            met.add(answer.headers["x-arm"])
            fingerprint = answer.parse().system_fingerprint
        with client.chat.completions.with_streaming_response.create(**HELLO, user=f"user-{k}", stream=True) as streamed:
            met.add(streamed.headers["x-arm"])
        [arms[k]] = met
        router = site.app.service.endpoints.routers["exp"]
        assert router.arms[arms[k]].bundle.digest.startswith(fingerprint)
        response = httpx.post(
            f"{site.url}/v1/outcomes",
            json={"session_id": f"user-{k}", "value": 1},
            headers={"authorization": "Bearer game"},
        )
        assert response.json()["arm"] == arms[k]
    assert set(arms.values()) == {"one", "two"}


async def test_many_streams_at_once(site):
    async def ask_once(client: openai.AsyncOpenAI, k: int) -> str:
        stream = await client.chat.completions.create(**HELLO | {"seed": k}, user="s", stream=True)
        return "".join([chunk.choices[0].delta.content async for chunk in stream])

    options: dict[str, Any] = {"base_url": f"{site.url}/v1", "api_key": "game", "timeout": WAIT_S}
    async with openai.AsyncOpenAI(**options) as client:
        together = await asyncio.gather(*(ask_once(client, k) for k in range(12)))
        alone = [await ask_once(client, k) for k in range(12)]
    assert together == alone and len(set(together)) > 1


def test_errors_are_openais(site, client):
    with pytest.raises(openai.NotFoundError) as no_model:
        client.chat.completions.create(**HELLO | {"model": "none"})
    assert (no_model.value.code, no_model.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(**HELLO | {"messages": [{"role": "user", "content": "x" * CONTEXT}]})
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as two_choices:
        client.chat.completions.create(**HELLO, n=2, stream=True)
    assert (two_choices.value.type, two_choices.value.param) == ("invalid_request_error", "n")
    with site.client("wrong") as stranger, pytest.raises(openai.AuthenticationError) as wrong_key:
        stranger.chat.completions.create(**HELLO)
    assert wrong_key.value.code == "invalid_api_key"
    with site.client("ops") as admin, pytest.raises(openai.PermissionDeniedError):
        admin.chat.completions.create(**HELLO)
    with pytest.raises(openai.InternalServerError, match="no answer within"):
        client.chat.completions.create(**LONG, extra_headers={"x-request-timeout-seconds": "0.01"})


def test_a_client_that_gives_up_frees_its_row(site):
    site.wait_until_idle()
    with site.client(timeout=0.1) as impatient, pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(**LONG)
    site.wait_until_idle()


def test_a_client_that_leaves_a_stream_frees_its_row(site, client):
    with client.chat.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        assert site.rows == 1
    site.wait_until_idle()
    client.chat.completions.create(**HELLO)


@contextmanager
def nan_weights(norms):
    """Fill the weights of modules with NaN, and restore them, however the body ends: the arms are of the whole file."""
    saved_weights = [norm.weight.detach().clone() for norm in norms]
    try:
        with torch.no_grad():
            for norm in norms:
                norm.weight.fill_(torch.nan)
        yield
    finally:
        with torch.no_grad():
            for norm, weight in zip(norms, saved_weights, strict=True):
                norm.weight.copy_(weight)


def test_an_arm_that_fails_in_mid_response_is_an_error_in_the_stream(site, client):
    streams = [client.chat.completions.create(**LONG, stream=True) for _ in range(2)]
    parts = [iter(stream) for stream in streams]
    for part in parts:
        next(part)
    norms = [arm.bundle.policies["lm"].lm.model.norm for arm in site.app.service.endpoints.routers["exp"].arms.values()]
    with nan_weights(norms):
        for part in parts:
            with pytest.raises(openai.APIError, match="failed in mid-response"):
                list(part)
    client.chat.completions.create(**HELLO)


def test_a_deployed_bundle_is_a_model(site, client, tmp_path, monkeypatch):
    """This is `marl-ray deploy BUNDLE --endpoint solver`, called twice."""
    monkeypatch.setenv("MARL_RAY_API_KEY", "ops")
    bundles = [make_text_bundle(tmp_path, seed) for seed in (7, 8)]
    for bundle in bundles:
        report = deploy_bundle(site.url, bundle, "ab", "solver", {}, "a test")
    assert (
        [line.split()[0] for line in report_lines(report)][3:5] == list(report["arms"]) == ["production", "candidate"]
    )
    assert {model.id for model in client.models.list()} == {"exp", "solver"}
    client.chat.completions.create(**HELLO | {"model": "solver"})


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def test_tools_are_called_and_objects_written_whole_and_streamed(site, client, tmp_path, monkeypatch):
    """Whole, streamed, and as the client's own helper for streams puts them together; then the tool's answer."""
    monkeypatch.setenv("MARL_RAY_API_KEY", "ops")
    deploy_bundle(site.url, make_text_bundle(tmp_path, 3, template=QWEN), "ab", "caller", {}, "a test")
    question: dict[str, Any] = HELLO | {"model": "caller", "tools": [WEATHER], "max_tokens": 400, "user": "s"}
    for seed in range(1, 11):
        full = client.chat.completions.create(**question | {"seed": seed, "tool_choice": "required"})
        with client.chat.completions.stream(**question | {"seed": seed, "tool_choice": "required"}) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].finish_reason == full.choices[0].finish_reason
        if full.choices[0].finish_reason == "tool_calls":
            break
    else:
        raise AssertionError("none of ten seeds calls the tool")
    [choice], [streamed] = full.choices, final.choices
    [call], [other] = choice.message.tool_calls, streamed.message.tool_calls
    assert (call.function.name, call.function.arguments) == (other.function.name, other.function.arguments)
    assert isinstance(json.loads(call.function.arguments), dict)
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    client.chat.completions.create(**question | {"messages": [*HELLO["messages"], choice.message, result]})
    objects = [
        client.chat.completions.create(
            **HELLO | {"model": "caller", "response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 400}
        ).choices[0]
        for seed in range(4)
    ]
    complete = [json.loads(item.message.content) for item in objects if item.finish_reason == "stop"]
    assert complete and all(isinstance(item, dict) for item in complete)
    with pytest.raises(openai.BadRequestError, match="shows its model no tools"):
        client.chat.completions.create(**question | {"model": "exp"})


def test_completions_and_models_by_name(client):
    prompts = ["hello", "good bye"]
    request: dict[str, Any] = {"model": "exp", "prompt": prompts, "seed": 5, "logprobs": 2, "user": "s", "top_p": 0.9}
    full = client.completions.create(**request)
    texts = ["", ""]
    for part in client.completions.create(**request, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in full.choices] == texts and full.usage.completion_tokens == 24
    tops = [len(top) for top in full.choices[0].logprobs.top_logprobs]  # tokens of one text count once
    assert len(tops) == 12 and set(tops) == {1, 2}
    assert client.models.retrieve("exp").id == "exp"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


@pytest.fixture(scope="module")
def deployed(ray_cluster: LocalRay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway on Ray Serve whose arms are deployments of their own, and write one response at a time."""
    folder: Path = tmp_path_factory.mktemp("deployed")
    arms = {
        arm: {"bundle": make_text_bundle(folder, seed, context=100_000), "cpus": 0.1}
        for seed, arm in enumerate(("one", "two"))
    }
    args = {
        "experiments": [
            {"name": "exp", "arms": arms, "placement": "deployment"},
            {"name": "watched", "arms": arms, "placement": "deployment", "strategy": "shadow"},
        ],
        "decision_log": str(folder / "log"),
        "database": f"sqlite:///{folder}/experiments.db",
        "spool": str(folder / "spool"),
        "cpus_per_replica": 0.5,
        "max_batch": 1,
        "request_timeout_s": 60,
    }
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [
            {"name": "text", "route_prefix": "/text", "import_path": "marl_ray.serving.app:build", "args": args}
        ],
    }
    yield deploy(config, ray_cluster.dashboard_url).urls["text"]
    undeploy(ray_cluster.dashboard_url)


@pytest.mark.long
def test_a_shadow_in_a_deployment_writes_and_reads_texts(deployed):
    with httpx.Client(base_url=deployed, timeout=60) as client:
        body = {"experiment": "watched", "session_id": "s", "prompt": "hello", "max_tokens": 4}
        assert client.post("/generate", json=body).json()["arm"] == "one"

        def compared() -> dict[str, Any] | None:
            """Return the counts of the shadow; None while it has compared no token."""
            two = client.get("/v1/experiments/watched").json()["shadow"].get("two", {})
            return two if two.get("decisions") else None

        two = until(compared, "the shadow's copy of the text", look_s=0.2)
    assert (two["acts"], two["errors"], two["decisions"], two["tokens"]) == (1, 0, 1, 4)
    assert two["log_prob"] < two["served_log_prob"] < 0


@pytest.mark.long
def test_arms_in_deployments_stream_and_free_their_rows(deployed):
    """The response that nobody reads would hold the only row of its arm for minutes."""
    options: dict[str, Any] = {"base_url": f"{deployed}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
    with openai.OpenAI(**options) as client:
        full = client.chat.completions.create(**HELLO, user="s")
        streamed = list(client.chat.completions.create(**HELLO, user="s", stream=True))
        assert "".join(c.choices[0].delta.content for c in streamed) == full.choices[0].message.content
        endless = HELLO | {"max_tokens": 90_000, "temperature": 0}
        with client.chat.completions.create(**endless, user="s", stream=True) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1).chat.completions.create(**endless, user="s")
        again = client.chat.completions.create(**HELLO, user="s")
        assert again.choices[0].message == full.choices[0].message
        with pytest.raises(openai.BadRequestError, match="context"):
            client.chat.completions.create(**HELLO | {"max_tokens": 100_000}, user="s")
