"""Language models as shadows: what they would have written, and what they think of what was served."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from toy_serving.gateways import serving
from toy_serving.text_gateways import ASK, CHAT, events, make_text_bundle, post, text_config
from waiting import until_async

from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.serving.arms.errors import ArmError
from marl_ray.serving.arms.protocol import ResponseChunk, TextRequest
from marl_ray.serving.arms.text.batcher import TextBatcher
from marl_ray.serving.routing.shadow import Shadows

REQUEST = TextRequest("writer", "hello", 5)


async def test_copies_of_every_route_are_written_and_compared(text_bundles, tmp_path):
    arms = {"one": text_bundles["one"], "same": text_bundles["one"], "four": text_bundles["four"]}
    shadowing = {"name": "exp", "strategy": "shadow", "arms": {arm: {"bundle": b} for arm, b in arms.items()}}

    async with serving(text_config({}, tmp_path, experiments=[shadowing])) as (client, app):
        answers = [
            await post(client, "/generate", ASK),
            (await events(client, "/generate", ASK | {"seed": 6}))[-1],
            await post(client, "/v1/act", {"session_id": "s", "observations": {"writer": "hello"}}),
        ]
        await post(client, "/v1/chat/completions", CHAT)
        totals = app.service.endpoints.routers["exp"].shadows.totals
        await until_async(lambda: [t.acts for t in totals.values()] == [4, 4], "four copies of each treatment")
        app.service.follower.decide()
        shadow = (await client.get("/v1/experiments/exp")).json()["shadow"]
        page = (await client.get("/ui/experiments/exp")).text
    assert {answer["arm"] for answer in answers} == {"one"}
    same, four = shadow["same"], shadow["four"]
    assert (same["acts"], same["decisions"], same["agreed"], same["errors"]) == (4, 4, 4, 0)
    assert (four["acts"], four["decisions"], four["agreed"], four["errors"]) == (4, 4, 0, 0)
    tokens = same["tokens"]
    assert tokens == four["tokens"] > 40
    assert same["log_prob"] == pytest.approx(same["served_log_prob"], abs=1e-3)
    assert four["log_prob"] < four["served_log_prob"] - 10 and four["served_log_prob"] == same["served_log_prob"]
    assert "Nats per served token" in page and f"{four['log_prob'] / tokens:.2f} (served" in page


async def test_a_text_of_another_tokenizer_is_read_in_the_arms_own_tokens(text_bundles):
    arm = TextBatcher(load_bundle(text_bundles["one"]), 4, 60.0)
    try:
        prompt = [104, 105]
        own_score = await arm.score("writer", prompt, [120, 121], "xy")
        unknown = await arm.score("writer", prompt, [999_999], "xy")
        other = await arm.score("writer", prompt, [65], "xy")
    finally:
        arm.close()
    assert own_score[0] == 2 and unknown == pytest.approx(own_score) and other == pytest.approx(own_score)


async def test_what_cannot_be_read_or_written_is_the_copys_error_alone(text_bundles, tmp_path):
    broken = make_text_bundle(tmp_path, 4, broken=True)

    shadows, failing = Shadows(2), TextBatcher(load_bundle(broken), 4, 60.0)
    short = TextBatcher(load_bundle(make_text_bundle(tmp_path, 1, context=16)), 4, 60.0)
    try:
        with pytest.raises(ArmError, match=r"^a text of 20 tokens cannot be read here$"):
            await short.score("writer", [104], [65] * 20, "A" * 20)
        assert shadows.send_text("failing", failing, REQUEST, [65], [-1.0], "A")
        too_long = replace(REQUEST, changes={"max_tokens": 4000})
        assert shadows.send_text("short", short, too_long, [65], [-1.0], "A")
        assert not shadows.send_text("short", short, REQUEST, [65], [-1.0], "A")  # two are under way
        await until_async(lambda: not shadows.under_way, "the end of both copies")
        totals = shadows.totals
    finally:
        failing.close()
        short.close()
    assert [(t.acts, t.errors, t.dropped) for t in (totals["failing"], totals["short"])] == [(0, 1, 0), (0, 1, 1)]


async def test_copies_that_wait_to_be_read_hold_up_no_client(text_bundles, monkeypatch):
    arm, free = TextBatcher(load_bundle(text_bundles["one"]), 4, 60.0), threading.Event()
    expected, score = await arm.score("writer", [1], [2], "x"), arm.model("writer").score
    monkeypatch.setattr(arm.model("writer"), "score", lambda *arguments: free.wait(60) and score(*arguments))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    scores = [asyncio.create_task(arm.score("writer", [1], [2], "x")) for _ in range(4)]
    await asyncio.sleep(0)
    reply = arm.write(REQUEST)
    try:
        piece = await asyncio.wait_for(reply.next(), 60)
        reply.leave()
        scores[3].cancel()  # as a copy's deadline does
        free.set()
        assert await asyncio.gather(*scores[:3]) == [expected] * 3
        assert bool(piece.ids)
    finally:
        free.set()
        arm.close()


async def test_an_arm_that_tells_no_tokens_is_compared_by_its_text(text_bundles):
    class Teller:
        def __init__(self, text: str):
            self.text, self.was_left = text, False

        def write(self, request: TextRequest) -> "Teller":
            return self

        async def next(self) -> ResponseChunk:
            return ResponseChunk(self.text, [], [], "stop", 3, [])

        def leave(self) -> None:
            self.was_left = True

    arm = TextBatcher(load_bundle(text_bundles["one"]), 4, 60.0)
    shadows, tellers = Shadows(4), {"right": Teller("A"), "wrong": Teller("B")}
    for name, teller in tellers.items():
        shadows.send_text(name, teller, REQUEST, [65], [-1.0], "A")
    shadows.send_text("own", arm, REQUEST, [], [], "what somebody else's model said")
    await until_async(lambda: not shadows.under_way, "the end of all copies")
    arm.close()
    assert all(teller.was_left for teller in tellers.values())
    totals = shadows.totals
    counts = {name: (t.agreed, t.decisions, t.tokens, t.errors) for name, t in totals.items()}
    assert counts == {"right": (1, 1, 0, 0), "wrong": (0, 1, 0, 0), "own": (0, 1, 0, 0)}
