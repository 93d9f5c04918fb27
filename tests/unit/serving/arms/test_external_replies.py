"""Replies of an external arm's server, one at a time: pieces, errors without the key, and events."""

import asyncio
import json
import threading

import httpx
import pytest
from toy_serving.external_servers import KEY, PRICE, Replies, chunk, external
from waiting import until_async

from marl_ray.config import ArmConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.serving.arms.errors import ArmError
from marl_ray.serving.arms.external import events as events_module
from marl_ray.serving.arms.external.arm import ExternalArm
from marl_ray.serving.arms.external.events import events_of
from marl_ray.serving.arms.external.model import external_model
from marl_ray.serving.arms.protocol import TextRequest
from marl_ray.serving.errors import BusyError
from marl_ray.serving.handlers.openai.tool_calls import ToolCallReader


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", KEY)


def arm_answer(replies: Replies, deadline_s: float = 5.0, price: object = PRICE):
    """Return what the arm makes of one response of its server: its pieces, or its error."""

    async def run():
        config = parse_config(ArmConfig, external("http://theirs/v1", price=price, deadline_s=deadline_s))
        arm = ExternalArm(external_model("http://theirs/v1", "m", None), config, 10.0)
        arm.transport = httpx.ASGITransport(replies)
        reply = arm.write(TextRequest("assistant", "hello", 1))
        try:
            pieces = [await reply.next()]
            while pieces[-1].finish is None:
                pieces.append(await reply.next())
        except Exception as error:
            return error
        finally:
            reply.leave()
            await asyncio.sleep(0)
        return pieces

    return asyncio.run(run())


def test_what_the_other_side_may_answer():
    busy = arm_answer(Replies(429, b"slow down", ((b"retry-after", b"7"),)))
    assert (type(busy), str(busy), busy.retry_after_s) == (BusyError, "the arm is busy: 429 slow down", 7.0)
    names = {
        "LostError": [Replies(502, b"bad gateway"), Replies(200, b"", hangs=True)],
        "ArmError": [
            Replies(400, b'{"error": "no"}'),
            Replies(401, f"wrong key {KEY}".encode()),
            Replies(200, b"data: {"),
            Replies(200, b'data: {"choices": 3}\n\n'),
            Replies(200, b'data: {"error": {"message": "broken"}}\n\n'),
            Replies(200, chunk(delta={"content": "a"})),
        ],
    }
    for name, answers in names.items():
        for answer in answers:
            error = arm_answer(answer, 0.2)
            assert type(error).__name__ == name, (answer.body, error)
            assert KEY not in str(error)
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
    text = chunk(delta={"content": "a b"}) + chunk(finish_reason="content_filter") + usage
    first, last = arm_answer(Replies(200, b": hello\n\n" + text))
    assert (first.text, last.finish, last.prompt_tokens, last.tokens) == ("a b", "stop", 10, 3)
    assert last.cost_usd == pytest.approx(0.004)
    [uncounted] = arm_answer(Replies(200, chunk(finish_reason="length")))
    assert (uncounted.finish, uncounted.tokens, uncounted.cost_usd) == ("length", 0, None)
    [unpriced] = arm_answer(Replies(200, chunk(finish_reason="length")), price=None)
    assert unpriced.cost_usd == 0.0


async def test_an_arm_that_a_thread_closes_keeps_its_client_until_the_event_loop_closes_it():
    config = parse_config(ArmConfig, external("http://theirs/v1"))
    arm = ExternalArm(external_model("http://theirs/v1", "m", None), config, 10.0)
    client = arm.client
    thread = threading.Thread(target=arm.close)
    thread.start()
    thread.join(60)
    assert arm.client is client and not client.is_closed
    await until_async(lambda: client.is_closed, "the event loop to close the client")


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_texts_may_have_what_else_breaks_lines(mark):
    """JSON may hold these as themselves, and events end at line feeds and carriage returns alone."""
    line = json.dumps({"choices": [{"delta": {"content": f"a{mark}b"}}]}, ensure_ascii=False).encode()
    first, last = arm_answer(Replies(200, b"\xef\xbb\xbfdata: " + line + b"\r\n\r\n" + chunk(finish_reason="stop")))
    assert (first.text, last.finish) == (f"a{mark}b", "stop")


def test_no_error_has_a_part_of_the_key(monkeypatch):
    secret = "sk-0123456789abcdef"
    monkeypatch.setenv("THEIR_KEY", secret)
    far = "x" * 190 + secret
    wrong = chunk(logprobs={"content": [{"token": "a", "logprob": f"Bearer {secret}"}]})
    answers = [Replies(status, far.encode()) for status in (401, 429)]
    answers += [Replies(200, b'data: {"error": "' + far.encode() + b'"}\n\n'), Replies(200, wrong)]
    for answer in answers:
        message = str(arm_answer(answer))
        assert "***" in message and secret[:3] not in message


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-s\u00e9cret", " sk-secret"])
def test_a_key_that_no_header_can_hold_is_refused_without_telling_it(key, monkeypatch):
    """Sent, it would be in the error of the library that sends it."""
    monkeypatch.setenv("THEIR_KEY", key)
    with pytest.raises(
        MarlRayError, match=r"^api_key_env: THEIR_KEY: expected printable ASCII without blanks around it$"
    ) as caught:
        arm_answer(Replies(200, b""))
    assert key.strip()[:4] not in str(caught.value)


def test_what_servers_do_that_are_almost_compatible():
    """An error that is null, a call without an index; content that is no text is no text."""
    text = b'data: {"error": null, "choices": [{"delta": {"content": "a"}}]}\n\n'
    assert [piece.text for piece in arm_answer(Replies(200, text + chunk(finish_reason="stop")))] == ["a", ""]
    names = [{"function": {"name": name, "arguments": '{"a": "</tool_call>"}'}} for name in ("f", "g")]
    parts = [chunk(delta={"tool_calls": [name]}) for name in names]
    [last] = arm_answer(Replies(200, b"".join(parts) + chunk(finish_reason="tool_calls")))
    _, calls = ToolCallReader({"f", "g"}, True).add(last.text, True)
    assert [call["function"] for call in calls] == [name["function"] for name in names]
    listed = chunk(delta={"content": [{"type": "text", "text": "a"}]}, finish_reason="stop")
    assert isinstance(arm_answer(Replies(200, listed)), ArmError)


async def read(*parts: bytes, ends: bool = True) -> list[str]:
    async def stream():
        for part in parts:
            yield part
        if not ends:
            await asyncio.sleep(60)

    async with asyncio.timeout(5):
        return [event async for event in events_of(stream())]


def events_in(*parts: bytes) -> list[str]:
    return asyncio.run(read(*parts))


def test_events_end_with_the_last_one_and_are_bounded(monkeypatch):
    text = b": c\ndata:1\r\n\r\nevent: x\rdata: \xc3\xa9\n\ndata: [DONE]\n\n"

    async def split_everywhere() -> list[list[str]]:
        return await asyncio.gather(*(read(text[:end], text[end:], ends=False) for end in range(len(text))))

    for events_read in asyncio.run(split_everywhere()):
        assert [event.strip() for event in events_read] == ["1", "\u00e9"]
    assert events_in(b"data:1\n\ndata:2") == ["1", "2"]
    monkeypatch.setattr(events_module, "MAX_LINE_BYTES", 10)
    with pytest.raises(ArmError, match="longer"):
        events_in(b"data: 123", b"4567890")
    monkeypatch.setattr(events_module, "MAX_RESPONSE_BYTES", 20)
    with pytest.raises(ArmError, match="longer"):
        events_in(*[b"data: 1\n\n"] * 3)
