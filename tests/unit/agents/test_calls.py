"""The call in a response is found in every form that current models write, and in time linear in the response."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.agents.calls import parse_call
from marl_ray.agents.lenient_json import decode
from marl_ray.agents.react_format import make_call
from marl_ray.agents.tools import make_tools, tool_of

JSON = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
LLAMA = '{"name": "add", "parameters": {"a": 2, "b": 3}}'
THOUGHT = "Thought: I add."


def write(program: str) -> str:
    """Keeps a program."""
    return program


def mix(first: str, second: str) -> str:
    """Takes two texts."""
    return first + second


MAX_CPU_S = 20.0
"""CPU seconds for a long text, which takes hundredths if the time is linear in its length and minutes if it is quadratic."""
TOOLS = {tool.name: tool for tool in (tool_of(write), tool_of(mix), *make_tools([]).values())}


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{JSON}\n</tool_call>",
        f"{THOUGHT}\n<tool_call>{JSON}</tool_call>",
        f"<tool_call>{JSON}",
        f"<tool_call>\n```json\n{JSON}\n```\n</tool_call>",
        "<tool_call>{'name': 'add', 'arguments': {'a': 2, 'b': 3,},}</tool_call>",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 3}"}</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}</tool_call>',
        f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON.replace('2', '9')}</tool_call>",
        f"<|python_tag|>{LLAMA}",
        f"<|python_tag|>{LLAMA}; {LLAMA.replace('2', '9')}",
        LLAMA,
        f"I will add.\n{LLAMA}",
        '<function=add>{"a": 2, "b": 3}</function>',
        "[add(a=2, b=3)]",
        f"{THOUGHT}\nAction: add(a=2, b=3)\nObservation: 7",
        f'{{"tool_calls": [{{"type": "function", "function": {JSON}}}]}}',
        "I add.\n[add(a=2, b=3), add(a=9, b=3)]",
        "<|python_tag|>add(a=2, b=3)",
        "```tool_code\nprint(add(a=2, b=3))\n```",
        f"[TOOL_CALLS] [{JSON}]",
        f"[TOOL_CALLS] [{JSON}, {JSON.replace('2', '9')}]",
        '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}',
        '[TOOL_CALLS]add[CALL_ID]a1B2[ARGS]{"a": 2, "b": 3}',
        f" [{JSON}]",
        'add{"a": 2, "b": 3}',
        f"Here:\n```json\n{JSON}\n```",
        f"```tool_code\n{JSON}\n```",
        f"```\n{JSON}\n```",
        '{"tool": "add", "args": {"a": 2, "b": 3}}',
        '{"action": "add", "action_input": {"a": 2, "b": 3}}',
        f'{THOUGHT}\nAction: add\nInput:\n```python\n{{"a": 2, "b": 3}}\n```',
        f'{THOUGHT}\nAction: add\nInput:\n```\n{{"a": 2, "b": 3}}\n```',
        f'{THOUGHT}\nAction: add\nInput: ~~~json5\n{{"a": 2, "b": 3}}\n~~~',
        f'{THOUGHT}\nAction: add\nInput: `{{"a": 2, "b": 3}}`',
        f"{THOUGHT}\nAction: add\nInput: {{'a': 2, 'b': 3}}",
        f'{THOUGHT}\nAction: add\nInput: {{"a": 2, "b": 3,}}',
        f"{THOUGHT}\nInput: {LLAMA}",
        f'{THOUGHT}\nAction:\n```json\n{{"action": "add", "action_input": {{"a": 2, "b": 3}}}}\n```',
        f"{THOUGHT}\nAction: {JSON}",
        f"Input: what I was given.\n<tool_call>{JSON}</tool_call>",
        f"Action: I call a tool.\n<tool_call>{JSON}</tool_call>",
        f"<think>{JSON}\nAction: answer</think>\n<tool_call>{JSON}</tool_call>",
        f"<think>\n<tool_call>{JSON.replace('2', '9')}</tool_call>\n</think>\n\n{JSON}",
        f"Let me see, <tool_call>{JSON.replace('2', '9')}</tool_call> or so.\n</think>\n<tool_call>{JSON}</tool_call>",
        f"<think>Observation: it is 9</think>\n{THOUGHT}\nAction: add\nInput: {{'a': 2, 'b': 3}}",
        f"[THINK]{JSON.replace('2', '9')}[/THINK][TOOL_CALLS]add[ARGS]{{'a': 2, 'b': 3}}",
    ],
)
def test_a_call_is_found_in_every_form(text):
    call = parse_call(text)
    assert (call.tool, call.arguments, call.failure) == ("add", {"a": 2, "b": 3}, "")
    assert text.startswith(call.text)
    assert "9" not in call.text.replace("it is 9", "") or "think" in call.text.lower()


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (f"<think><tool_call>{JSON}</tool_call></think>The answer is 5.", "no_call"),
        (f"<think><tool_call>{JSON}</tool_call>", "no_call"),
        (f"<think>\n{JSON}", "no_call"),
        (f"so {JSON}\n</think>\nThe answer is 5.", "no_call"),
        ("<think>\nAction: add\nInput: {}\n", "no_call"),
        ('{"a": 2, "b": 3}', "no_call"),
        ('{"name": "Ann", "age": 3}', "no_call"),
        ("The set {1, 2} has two elements.", "no_call"),
        ("<tool_call>add(2, 3)</tool_call>", "bad_json"),
        ('<tool_call>{"a": 2}</tool_call>', "bad_json"),
        ('<tool_call>{"name": "add", "arguments": "2 and 3"}</tool_call>', "bad_json"),
        ("[TOOL_CALLS]add[ARGS]2", "bad_json"),
    ],
)
def test_what_is_no_call(text, failure):
    call = parse_call(text)
    assert (call.failure, call.arguments) == (failure, None)
    observation = make_call(call, TOOLS, 60.0).observation
    assert "\n" not in observation and "No tool ''" not in observation


def test_a_think_tag_inside_of_a_call_is_text():
    call = parse_call('<tool_call>{"name": "write", "arguments": {"program": "print(\'<think>\')"}}</tool_call>')
    assert call.arguments == {"program": "print('<think>')"}


def test_a_call_may_leave_its_arguments_out_behind_a_tag():
    assert parse_call('<tool_call>{"name": "look"}</tool_call>').arguments == {}


def test_the_call_of_a_response_is_said_with_its_end_and_without_what_follows():
    assert parse_call(f"<tool_call>{JSON}</tool_call>\nmore").text == f"<tool_call>{JSON}</tool_call>"
    assert parse_call(f"[TOOL_CALLS] [{JSON}] more").text == f"[TOOL_CALLS] [{JSON}]"


def test_a_fenced_program_is_the_argument_of_a_tool_that_takes_one_text():
    text = "Action: {}\nInput:\n```python\nprint('a')\n```\nObservation: a"
    result = make_call(parse_call(text.format("write")), TOOLS, 60.0)
    assert (result.failure, result.observation) == ("", "print('a')\n")
    assert make_call(parse_call(text.format("mix")), TOOLS, 60.0).failure == "bad_json"
    assert (
        make_call(parse_call(text.format("write").replace("\n```\n", "\n")), TOOLS, 60.0).failure == "bad_json"
    )  # truncated


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': True, 'b': None, 'c': [1, 2.5, -3e2,],}", {"a": True, "b": None, "c": [1, 2.5, -300.0]}),
        ("{'a': 'it\\'s', 'b': \"\\u00e9\\n\"}", {"a": "it's", "b": "é\n"}),
        ("{'a': '\\ud83d\\ude00'}", {"a": "\N{GRINNING FACE}"}),
        ("{}", {}),
        ("{'a': {'b': 'x\ny'}}", {"a": {"b": "x\ny"}}),
    ],
)
def test_json_as_models_write_it(text, value):
    assert decode(text + " and more") == (value, len(text))


@pytest.mark.parametrize(
    "text",
    [
        "{'a': }",
        "{'a' 1}",
        "{a: 1}",
        "{'a': 1",
        "{'a': 'it's'}",
        "{'a': __import__('os')}",
        "[" * 5000,
        "{'a': '\\ud83d'}",
    ],
)
def test_what_is_no_json_is_a_few_words(text):
    with pytest.raises(ValueError, match=r"^[^\n]{3,80}$"):
        decode(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("ab\"'\\\né,{}[]:", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(VALUES)
def test_json_and_what_python_writes_are_both_read(value):
    assert decode(json.dumps(value)) == (value, len(json.dumps(value)))
    assert decode(repr(value)) == (value, len(repr(value)))


PIECES = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", '"', "'", ",", ":",
    "add", "name", "arguments", JSON, LLAMA, "<think>", "</think>", "```", "json", "\n", " ", "Action:", "Input:", "\\",
    "Observation:", "<function=add>", "\ud800", "\x00",
]  # fmt: skip


def test_arguments_in_marks_are_texts():
    """So Qwen 3 Coder and GLM 4.5 write them; a tool's types make numbers of them."""
    program = 'print("<b>")\n  {x}'
    both = (("a", "2"), ("code", program))
    marked = [f"\n<parameter={key}>\n{value}\n</parameter>" for key, value in both]
    qwen = f"<tool_call>\n<function=add>{''.join(marked)}\n</function>\n</tool_call>"
    pairs = [
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in (("a", "2"), ("code", program))
    ]
    glm = f"<tool_call>add{''.join(pairs)}\n</tool_call>"
    for text in (qwen, glm, qwen.removeprefix("<tool_call>\n")):
        call = parse_call(f"I add.\n{text} and more")
        assert (call.tool, call.arguments, call.failure) == ("add", {"a": "2", "code": program}, "")
        assert call.text == f"I add.\n{text}" and call.thought == "I add."
    assert parse_call("<tool_call>now</tool_call>").arguments == parse_call("[now()]").arguments == {}
    for broken in ("<tool_call><function=add><parameter=a>2", "<function=add>"):
        assert parse_call(broken).failure == "bad_json"
    for broken in ("[add(2)]", "[add(a=2", "[add](b=2)"):
        assert parse_call(broken).failure == "no_call"
    assert (
        make_call(
            parse_call("<function=write><parameter=program>x = 1</parameter></function>"), TOOLS, 60.0
        ).observation
        == "x = 1"
    )


@settings(max_examples=200)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
def test_no_text_raises(text):
    call = parse_call(text)
    assert text.encode("utf-8", "replace").decode().startswith(call.text)
    assert (call.arguments is None) == bool(call.failure)
    make_call(call, TOOLS, 60.0)


@pytest.mark.parametrize(
    "piece",
    [
        *PIECES,
        "\n{",
        "\n[{",
        "\n```\n",
        "add ",
        "{'a':",
        "\nAction: ",
        "<think></think>",
        "\n#",
        "~",
        "\n[f(",
        "f(a=1,",
        "<parameter=a>",
        "<function=f>",
    ],
)
def test_a_long_text_is_read_in_linear_time(piece):
    text = piece * ((1 << 17) // len(piece))
    for given_text in (text, f"Action: add\nInput: {text}", f"<tool_call>{text}", f"x{text}{JSON}", f"[f(a={text}"):
        begin = time.process_time()
        parse_call(given_text)
        assert time.process_time() - begin < MAX_CPU_S
