"""Tools of chats: how templates show them, how calls are found, and that forced ones are calls."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_models.tokenizers import CHATML, LLAMA31, MISTRAL, QWEN, bytes_with
from toy_serving.gateways import serving
from toy_serving.text_gateways import CHAT, events, make_text_bundle, post, rows, text_config

from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.decoding.json_guide import GuideState, advance
from marl_ray.policies.prompting.tool_template import HERMES, WrittenCall, call_guide, calls_in, encode_tool_chat
from marl_ray.serving.handlers.openai import tool_calls
from marl_ray.serving.handlers.openai.tool_calls import ToolCallReader
from marl_ray.serving.logs.act_reader import read_logged

TEMPLATES = {
    "qwen": bytes_with(
        QWEN, "<|im_start|>", "<|im_end|>", common=("<tool_call>", "</tool_call>"), eos_token="<|im_end|>"
    ),
    "llama": bytes_with(LLAMA31, "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", eos_token="<|eot_id|>"),
    "mistral": bytes_with(MISTRAL, "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", eos_token="</s>"),
}


def tool(name: str, **more: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}} | more}


USER = {"role": "user", "content": "how warm is it?"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "warmth", "arguments": {"city": "é"}}}],
}
WARM = {"name": "warmth", "arguments": '{"city": "é"}'}
RESULT = {"role": "tool", "content": "20 <|im_end|>", "tool_call_id": "call00001"}


def test_a_template_shows_tools_calls_and_results():
    tokenizer = TEMPLATES["qwen"]
    ids = encode_tool_chat(tokenizer, [USER, CALLED, RESULT], [tool("warmth", description="of <|im_end|>")], None)
    text = tokenizer.decode(ids)
    assert '"name": "warmth", "parameters"' in text and "of <|im_end|>" in text and "20 <|im_end|>" in text
    assert '<tool_call>\n{"name": "warmth", "arguments": {"city": "é"}}\n</tool_call><|im_end|>' in text
    # What clients write in them ends no turn: system, user, assistant and the result have one each.
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4


def test_what_a_template_leaves_out_is_refused():
    plain = bytes_with(CHATML, "<|im_start|>", "<|im_end|>", eos_token="<|im_end|>")
    with pytest.raises(MarlRayError, match="tools: the chat template"):
        encode_tool_chat(plain, [USER], [tool("warmth")], None)
    with pytest.raises(MarlRayError, match=r"^prompt: the chat template leaves out tool_calls$"):
        encode_tool_chat(plain, [USER, CALLED], [], None)
    with pytest.raises(MarlRayError, match="tools: the chat template"):
        encode_tool_chat(TEMPLATES["qwen"], [USER], [tool("warmth")], False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_forced_call_is_written_as_the_template_writes_calls(name):
    tokenizer = TEMPLATES[name]
    start = call_guide(tokenizer, ["warmth", "wind"])
    before = next(text for text in start.texts if "wind" in text)
    text = f'{before}{{"a": [1]}}{start.behind}'
    state: GuideState | None = start
    for character in text:
        assert state is not None, text
        state = advance(state, character)
    assert state is not None and state.mode == "done"
    reader = ToolCallReader({"warmth", "wind"}, True)
    content, [call] = reader.add(text, True)
    assert (content, call["function"]) == ("", {"name": "wind", "arguments": '{"a": [1]}'})


WEATHER = '{"name": "warmth", "arguments": {"city": "Ulm"}}'
CALL = [("warmth", '{"city": "Ulm"}')]
MARKED = '{"name": "warmth", "arguments": {"a": "</tool_call> \\" <tool_call>"}}'
MARKS = [("warmth", '{"a": "</tool_call> \\" <tool_call>"}')]
TEXTS = {
    "no call": ("It is {warm}.", "It is {warm}.", []),
    "a call": (f"<tool_call>\n{WEATHER}\n</tool_call>", "", CALL),
    "text before": (f"Let me see.\n<tool_call>{WEATHER}</tool_call>\n", "Let me see.", CALL),
    "the mark in an argument": (f"<tool_call>\n{MARKED}\n</tool_call>\n<tool_call>{WEATHER}</tool_call>", "", MARKS + CALL),
    "never closed but in an argument": (f"<tool_call>{MARKED}", "", MARKS),
    "open text": (f'<tool_call>{{"a</tool_call> b <tool_call>{WEATHER}</tool_call>', '<tool_call>{"a</tool_call> b', CALL),
    "two calls": (f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>", "", CALL * 2),
    "text between": (f"a <tool_call>{WEATHER}</tool_call> b", "a b", CALL),
    "never closed": (f"<tool_call>{WEATHER}", "", CALL),
    "truncated": ("a <tool_call>{\"name", "a <tool_call>{\"name", []),
    "no JSON": ("<tool_call>x</tool_call>", "<tool_call>x</tool_call>", []),
    "only JSON": (' {"name": "warmth", "parameters": {}}', "", [("warmth", "{}")]),
    "other JSON": ('{"name": "unknown"}', '{"name": "unknown"}', []),
    "a list": (f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", "", CALL * 2),
    "no Unicode": ('<tool_call>{"name": "warmth", "arguments": {"a": "\\ud800"}}</tool_call>',) * 2 + ([],),
    "in marks": (
        "<tool_call>\n<function=warmth>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>", "", CALL,
    ),
    "almost": ("a <tool_cal", "a <tool_cal", []),
    "blanks": (" a \n", " a \n", []),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
@given(part_ends=st.sets(st.integers(1, 120)))
def test_calls_are_found_however_the_text_comes(case, part_ends):
    text, content, called = TEXTS[case]
    reader = ToolCallReader({"warmth"}, True)
    ends = [*sorted(end for end in part_ends if end < len(text)), len(text)]
    parser_events = [reader.add(text[a:b], b == len(text)) for a, b in zip([0, *ends], ends, strict=False)]
    calls = [call for _, some in parser_events for call in some]
    assert "".join(part for part, _ in parser_events) == content
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == called
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)


@pytest.mark.parametrize(
    ("parts", "parses"),
    [
        (["word "] * 2_000, 2),  # the search for the block's end, and the block itself
        (["</tool", "_call> "] * 200, 202),
        (["</tool_call>"], 3),
    ],
    ids=["text", "marks in two parts", "one mark"],
)
def test_a_call_that_is_open_is_parsed_only_when_a_mark_may_close_it(parts, parses, monkeypatch):
    parsed = []

    def note_and_parse(text):
        parsed.append(text)
        return calls_in(text)

    monkeypatch.setattr(tool_calls, "calls_in", note_and_parse)
    reader = ToolCallReader({"x"}, True)
    before, behind = '<tool_call>{"name": "x", "arguments": {"a": "', '"}}</tool_call>'
    assert [reader.add(part, False) for part in (before, *parts)] == [("", [])] * (len(parts) + 1)
    content, [call] = reader.add(behind, False)
    assert (content, json.loads(call["function"]["arguments"])) == ("", {"a": "".join(parts)})
    assert len(parsed) == parses


def test_all_but_the_first_call_are_dropped_where_they_may_not_be_parallel():
    reader = ToolCallReader({"warmth"}, False)
    content, calls = reader.add(TEXTS["two calls"][0], True)
    assert (content, len(calls)) == ("", 1)


def test_hermes_is_its_own_form():
    text = f"{HERMES.before}f{HERMES.between}{{}}{HERMES.behind}"
    assert calls_in(text.removeprefix("<tool_call>").removesuffix("</tool_call>")) == [WrittenCall("f", "{}")]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A small random model whose template knows tools."""
    return make_text_bundle(tmp_path_factory.mktemp("caller"), 3, template=QWEN)


async def test_a_forced_call_and_an_object_come_from_the_gateway(caller, tmp_path):
    question = CHAT | {"tools": [tool("warmth"), tool("wind")], "max_tokens": 300}

    async with serving(text_config({"one": caller}, tmp_path)) as (client, app):
        path, called = "/v1/chat/completions", []
        for seed in range(3):
            for choice in ("required", {"type": "function", "function": {"name": "wind"}}):
                body = question | {"tool_choice": choice, "seed": seed, "logprobs": True}
                full = (await post(client, path, body))["choices"][0]
                parts = [part["choices"][0] for part in (await events(client, path, body))[:-1]]
                assert parts[-1]["finish_reason"] == full["finish_reason"]
                if full["finish_reason"] != "tool_calls":
                    continue
                [call] = full["message"]["tool_calls"]
                [joined] = [call for part in parts for call in part["delta"].get("tool_calls", [])]
                assert joined["function"] == call["function"] and isinstance(
                    json.loads(call["function"]["arguments"], strict=False), dict
                )
                assert full["message"]["content"] is None
                called.append(call["function"]["name"])
                back = [*CHAT["messages"], full["message"]]
                back.append({"role": "tool", "tool_call_id": call["id"], "content": "20"})
                await post(client, path, question | {"messages": back, "max_tokens": 2})
        assert "wind" in called
        free = (await post(client, path, question | {"tool_choice": "none", "max_tokens": 2}))["choices"][0]
        assert "tool_calls" not in free["message"]
        objects = 0
        for seed in range(4):
            body = CHAT | {"response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 300}
            choice = (await post(client, path, body))["choices"][0]
            if choice["finish_reason"] == "stop":
                objects += isinstance(json.loads(choice["message"]["content"], strict=False), dict)
        assert objects and rows(app) == 0


async def test_tools_calls_and_guides_are_in_the_log(caller, tmp_path):
    config = text_config({"one": caller}, tmp_path, decision_log=str(tmp_path / "log"))
    back = [*CHAT["messages"], CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"function": WARM}]}, RESULT]
    question = CHAT | {"tools": [tool("warmth")], "messages": back, "max_tokens": 8}

    async with serving(config) as (client, _):
        await post(client, "/v1/chat/completions", question)
        await post(client, "/v1/chat/completions", question | {"tool_choice": "required"})
        await post(client, "/v1/completions", {"model": "exp", "prompt": [1, 2, 3], "user": "s", "max_tokens": 2})
    free, forced, raw = read_logged(str(config.decision_log), "exp")
    assert list(free.messages) == [*CHAT["messages"], CALLED, RESULT] and list(free.tools) == [tool("warmth")]
    assert ("guide" in free.asked, "guide" in forced.asked) == (False, True)
    assert (raw.prompt, list(raw.messages), list(raw.prompt_ids)) == (None, [], [1, 2, 3])
