"""Language models in the gateway when arms break, clients leave, queues are full and time runs out."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from toy_serving.gateways import serving
from toy_serving.text_gateways import ASK, CHAT, CONTEXT, events, make_text_bundle, post, rows, text_config
from waiting import until_async

LONG = {"max_tokens": CONTEXT - 20, "temperature": 0}


def paused(step: Callable[[int], Any], pauses: Iterator[float]) -> Callable[[int], Any]:
    """A step of a batch that sleeps before it works, for the next of `pauses` seconds while there is one."""

    def pause_and_step(number: int) -> Any:
        time.sleep(next(pauses, 0.0))
        return step(number)

    return pause_and_step


async def test_the_control_answers_for_a_broken_arm(text_bundles, tmp_path):
    bundles = {"one": text_bundles["one"], "four": make_text_bundle(tmp_path, 4, broken=True)}

    async with serving(text_config(bundles, tmp_path)) as (client, app):
        answers = [await post(client, "/generate", ASK | {"session_id": f"s{k}"}) for k in range(16)]
        assert app.service.endpoints.routers["exp"].circuits["four"].opened == 1
        app.service.unit_reports.write()
        errors = dict(app.service.stores.units.metric_values("exp", "error"))
    assert {answer["arm"] for answer in answers} == {"one"}
    stood_in = [f"s{k}" for k, answer in enumerate(answers) if answer.get("fallback_for") == "four"]
    assert errors == dict.fromkeys(stood_in, 1.0) and len(stood_in) > 3


@pytest.mark.parametrize(("path", "field"), [("/generate", None), ("/v1/act", "observations")])
async def test_a_prompt_that_every_arm_fails_on_counts_against_none(tmp_path, path, field):
    bundles = {"one": make_text_bundle(tmp_path, 1, broken=True), "four": make_text_bundle(tmp_path, 4, broken=True)}
    body = {"prompt": "hello"} if path == "/generate" else {"observations": {"writer": "hello"}}

    async with serving(text_config(bundles, tmp_path)) as (client, app):
        answers = [await client.post(path, json=body | {"session_id": f"s{k}"}) for k in range(12)]
        app.service.unit_reports.write()
        opened = [circuit.opened for circuit in app.service.endpoints.routers["exp"].circuits.values()]
        errors = dict(app.service.stores.units.metric_values("exp", "error"))
    assert {(answer.status_code, answer.json()["error"]["field"]) for answer in answers} == {(400, field)}
    assert opened == [0, 0] and errors == {}


@pytest.mark.parametrize("part", ["add", "step"])  # reading prompts, and writing tokens
async def test_an_arm_that_hangs_has_failed_also_those_that_wait_for_it(text_gateway, monkeypatch, part):
    async with serving(text_gateway) as (client, app):
        router = app.service.endpoints.routers["exp"]
        hung, stuck, going_on = router.arms["four"], threading.Event(), threading.Event()
        hung.patience_s = 0.3
        batch = hung.batch("writer")
        work = getattr(batch, part)

        def hang(argument):
            stuck.set()
            going_on.wait(60)
            return work(argument)

        monkeypatch.setattr(batch, part, hang)
        first = [asyncio.create_task(post(client, "/generate", ASK | {"session_id": f"s{k}"})) for k in range(8)]
        await until_async(stuck.is_set, "the step that hangs")
        others = [post(client, "/generate", ASK | {"session_id": f"t{k}"}) for k in range(8)]
        answers = await asyncio.gather(*first, *others)
        opened = router.circuits["four"].opened
        going_on.set()
    assert {answer["arm"] for answer in answers} == {"one"}
    assert sum(answer.get("fallback_for") == "four" for answer in answers) > 3
    assert opened == 0  # all of one step


async def test_requests_that_a_hung_arm_lost_leave_its_queue(text_gateway, monkeypatch):
    monkeypatch.setattr("marl_ray.serving.arms.text.batcher.MAX_WAITING", 2)
    async with serving(text_gateway) as (client, app):
        hung, going_on = app.service.endpoints.routers["exp"].arms["four"], threading.Event()
        hung.patience_s = 0.1
        batch = hung.batch("writer")
        step = batch.step
        batch.step = lambda number: (going_on.wait(60), step(number))[-1]
        # One after the other, so that never more than one of them waits.
        answers = [await post(client, "/generate", ASK | {"session_id": f"s{k}"}) for k in range(16)]
        going_on.set()
    assert {answer["arm"] for answer in answers} == {"one"}
    assert sum(answer.get("fallback_for") == "four" for answer in answers) > 4


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/act"])
async def test_a_client_that_leaves_frees_its_row(text_gateway, path):
    """Over raw ASGI: the client hangs up while the text is written."""
    bodies = {
        "/generate": ASK | LONG,
        "/v1/chat/completions": CHAT | LONG | {"stream": True},
        "/v1/act": {"session_id": "s", "observations": {"writer": "hello"}},
    }
    patient = text_gateway.model_copy(update={"access_log": "all"})

    async with serving(patient) as (client, app):
        if path == "/v1/act":  # whose responses are short
            for arm in app.service.endpoints.routers["exp"].arms.values():
                model = arm.model("writer")
                model.generation = model.generation.model_copy(update={"max_tokens": CONTEXT - 20})
        sent, disconnected = [], asyncio.Event()
        received = iter([{"type": "http.request", "body": json.dumps(bodies[path]).encode()}])

        async def receive():
            if (message := next(received, None)) is not None:
                return message
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        task = asyncio.create_task(app(scope, receive, send))
        await until_async(lambda: rows(app) == 1, "the first row")
        disconnected.set()
        await asyncio.wait_for(task, 60)
        await until_async(lambda: rows(app) == 0, "the end of the row")
        assert all(b"DONE" not in message.get("body", b"") for message in sent)
        await post(client, "/generate", ASK)  # and the arm continues


async def test_a_deadline_frees_the_row(text_gateway):
    async with serving(text_gateway) as (client, app):
        late = await client.post("/generate", json=ASK | LONG, headers={"x-request-timeout-seconds": "0.01"})
        await until_async(lambda: rows(app) == 0, "the end of the row")
        assert late.status_code == 504


async def test_closing_is_not_the_arms_fault(text_gateway):
    async with serving(text_gateway) as (client, app):
        calls = [asyncio.create_task(client.post("/generate", json=ASK | LONG | {"seed": k})) for k in range(8)]
        await until_async(lambda: rows(app) == 8, "eight rows")
        await asyncio.to_thread(app.service.endpoints.routers["exp"].arms.close)
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {503} and "closing" in answers[0].text
        assert all(not circuit.opened for circuit in app.service.endpoints.routers["exp"].circuits.values())


async def test_a_full_queue_is_a_503_with_retry_after(text_gateway, monkeypatch):
    monkeypatch.setattr("marl_ray.serving.arms.text.batcher.MAX_WAITING", 2)

    async with serving(text_gateway.model_copy(update={"max_batch": 1})) as (client, _):
        calls = [client.post("/generate", json=ASK | {"max_tokens": 100, "seed": k}) for k in range(12)]
        answers = await asyncio.gather(*calls)
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503}
    busy = answers[statuses.index(503)]
    assert "busy" in busy.text and int(busy.headers["retry-after"]) >= 1


async def test_waiting_too_long_for_a_turn_is_not_the_arms_fault(text_gateway, monkeypatch):
    async with serving(text_gateway.model_copy(update={"max_batch": 1})) as (client, app):
        for arm in app.service.endpoints.routers["exp"].arms.values():
            arm.patience_s = 2.0
            batch = arm.batch("writer")  # a text takes longer than the arm is waited for, a token does not
            monkeypatch.setattr(batch, "step", paused(batch.step, itertools.repeat(0.2)))
        calls = [client.post("/generate", json=ASK | {"max_tokens": 20, "temperature": 0}) for _ in range(4)]
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {200, 503}
        assert all("no room in the batch" in answer.text for answer in answers if answer.status_code == 503)
        assert all(not circuit.opened for circuit in app.service.endpoints.routers["exp"].circuits.values())
        await until_async(lambda: rows(app) == 0, "the end of all rows")


async def test_a_whole_answer_may_take_longer_than_a_token_may(text_gateway, monkeypatch):
    async with serving(text_gateway) as (client, app):
        for arm in app.service.endpoints.routers["exp"].arms.values():
            arm.patience_s = 4.0
            batch, pauses = arm.batch("writer"), iter([1.5, 1.5, 1.5])  # together longer than the arm is waited for
            monkeypatch.setattr(batch, "step", paused(batch.step, pauses))
        full, parts = await asyncio.gather(
            post(client, "/generate", ASK | {"max_tokens": 12, "temperature": 0}),
            events(client, "/generate", ASK | {"max_tokens": 12, "temperature": 0}),
        )
        assert len(full["tokens"]) == 12
        assert full["text"] == "".join(part["text"] for part in parts)
