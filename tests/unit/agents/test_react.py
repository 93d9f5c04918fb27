"""Agents' texts are read without a mistake of ours, and agents learn of every mistake of theirs."""

import json
import sys
import threading
import time
import types
from typing import Annotated, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from marl_ray.agents.calls import parse_call
from marl_ray.agents.errors import ToolError, ToolTimeoutError
from marl_ray.agents.react_format import ReactTurn, make_call, write_instructions, write_signature, write_transcript
from marl_ray.agents.tools import MAX_ABANDONED_CALLS, Tool, make_tool, make_tools, tool_of, truncate_middle
from marl_ray.errors import MarlRayError


def add(a: int, b: int = 1) -> str:
    """Adds
    two numbers.

    More that no agent is told.
    """  # noqa: D205  its first sentence has two lines, which are joined for an agent
    return str(a + b)


may_return = threading.Event()


def misbehave(how: Literal["crash", "fail", "exit", "wait", "junk"]) -> str:
    """Does what no tool should."""
    if how == "crash":
        raise ValueError("first line\nsecond line")
    if how == "fail":
        raise ToolError("Not today.")
    if how == "exit":
        raise SystemExit(3)
    if how == "wait":
        may_return.wait(60)
    return "\ud800" + 5000 * "x"


TOOLS: dict[str, Tool] = {tool.name: tool for tool in (tool_of(add), tool_of(misbehave), *make_tools([]).values())}
ONE_LINE = r"^[^\n]*$"
CALL = 'Thought: I add.\nAction: add\nInput: {"a": 2, "b": 3}'


def reply(text: str, timeout_s: float = 5.0) -> tuple[str, str]:
    """Problem and observation of a response."""
    result = make_call(parse_call(text), TOOLS, timeout_s)
    return result.failure, result.observation


def test_a_call_is_read_and_made():
    call = parse_call(CALL)
    assert (call.text, call.thought, call.tool, call.arguments) == (CALL, "I add.", "add", {"a": 2, "b": 3})
    result = make_call(call, TOOLS, 60.0)
    assert (result.observation, result.failure, result.tool, result.ends) == ("5", "", "add", False)


@pytest.mark.parametrize(
    "text",
    [
        'THOUGHT: I add.\nACTION: ADD\nINPUT: {"a": 2, "b": 3}',
        'I add.\r\naction :  `add`\r\nAction Input:\n```json\n{"a": 2, "b": 3}\n```',
        'Thought: I add.\n**Action:** add(a, b)\n**Input:** {"a": "2",\n "b": 3}',
        'Thought: I add.\nAction: add\nInput: {"name": "subtract", "arguments": {"a": 2, "b": 3}} and more',
        'Thought: I add.\nInput: {"name": "add", "arguments": {"a": 2, "b": 3}}',
        CALL + '\nAction: add\nInput: {"a": 9}',
        CALL + '\nObservation: 6\nThought: done.\nAction: answer\nInput: {"answer": "6"}',
    ],
)
def test_other_ways_to_write_the_same_call(text):
    assert (parse_call(text).thought, reply(text)) == ("I add.", ("", "5"))


def test_what_follows_the_first_call_is_not_repeated():
    assert parse_call(CALL + '\nAction: add\nInput: {"a": 9}').text == CALL
    assert parse_call(CALL + "\nObservation: 6").text == CALL
    assert parse_call("Thought: hm\nobservation: 6").text == "Thought: hm"
    assert parse_call('Thought: hm\nObservation: 6\nAction: answer\nInput: {"answer": "6"}').failure == "no_call"


def test_programs_with_real_line_breaks_are_strings():
    assert parse_call('Action: x\nInput: {"code": "a = 1\nprint(a)\t#"}').arguments == {"code": "a = 1\nprint(a)\t#"}


@pytest.mark.parametrize(
    ("text", "failure", "words"),
    [
        ("", "no_call", "No call found: no line `Action:`"),
        ("The answer is 5.", "no_call", "Write Action: and Input: lines."),
        ('Input: {"a": 2}', "no_call", "Action:"),
        ('Action: multiply\nInput: {"a": 2}', "unknown_tool", "No tool 'multiply'. Tools: add, misbehave, answer."),
        ("Action: multiply", "unknown_tool", "multiply"),
        ("Action: add", "bad_json", 'no line `Input:` after `Action:`. Expected add {"a": integer, "b"?: integer}.'),
        ('Action: add\nAction: answer\nInput: {"answer": "1"}', "bad_json", "no line `Input:`"),
        ('Action: add\nInput: {"a": 2', "bad_json", "Input is not a JSON object: Expecting ',' delimiter."),
        ("Action: add\nInput: a=2", "bad_json", "Expecting value"),
        ("Action: add\nInput: [2, 3]", "bad_json", "expected an object {...}"),
        ("Action: add\nInput: " + 200_000 * '{"a":', "bad_json", "too deep, too large"),
        ('Action: add\nInput: {"a": ' + 5000 * "9" + "}", "bad_json", "too deep, too large"),
        ('Action: add\nInput: {"b": 2}', "wrong_arguments", "Wrong arguments: missing key 'a'. Expected add"),
        ('Action: add\nInput: {"a": "two"}', "wrong_arguments", "a: expected a whole number, got 'two'"),
        ('Action: add\nInput: {"a": 2, "c": 2}', "wrong_arguments", "unknown key 'c'"),
        ('Action: answer\nInput: {"answer": "\\ud800"}', "bad_json", "not Unicode"),
        ('Action: misbehave\nInput: {"how": "crash"}', "crash", "misbehave failed: ValueError: first line"),
        ('Action: misbehave\nInput: {"how": "exit"}', "crash", "misbehave failed: RuntimeError: SystemExit"),
        ('Action: misbehave\nInput: {"how": "fail"}', "failed", "Not today."),
    ],
)
def test_every_mistake_is_an_observation(text, failure, words):
    action, observation = reply(text)
    assert action == failure
    assert words in observation
    assert "\n" not in observation


def test_a_tool_has_until_its_deadline():
    late = 'Action: misbehave\nInput: {"how": "wait"}'
    may_return.clear()
    assert reply(late, 0.05) == ("timeout", "misbehave gave no result within 0.05 s.")
    may_return.set()
    assert reply(late)[0] == ""


def test_calls_that_were_left_behind_do_not_pile_up():
    over = threading.Event()
    calls: list[int] = []

    def wait(n: int) -> str:
        """Waits for the end of the test."""
        calls.append(n)
        over.wait(60)
        return ""

    tool = tool_of(wait)
    for n in range(MAX_ABANDONED_CALLS + 5):
        with pytest.raises(ToolTimeoutError):
            tool.call({"n": n}, time.monotonic())
    assert len(calls) == MAX_ABANDONED_CALLS
    over.set()


def test_observations_are_cut_and_can_be_encoded():
    result = make_call(parse_call('Action: misbehave\nInput: {"how": "junk"}'), TOOLS, 60.0, limit=100)
    assert len(result.observation) == 100
    result.observation.encode()


def test_the_answer_ends_and_is_never_truncated():
    result = make_call(parse_call('Action: answer\nInput: {"answer": "' + 200 * "x" + '"}'), TOOLS, 60.0, limit=20)
    assert (result.ends, result.observation) == (True, 200 * "x")
    assert make_call(parse_call('Action: answer\nInput: {"answer": 4.5}'), TOOLS, 60.0).observation == "4.5"


WORDS = [
    "Thought:",
    "Action:",
    "Input:",
    "Observation:",
    "add",
    "misbehave",
    "answer",
    "\n",
    " ",
    '{"a": 1}',
    "```json\n",
]
WORDS += [
    '{"name": "add", "arguments": {}}',
    '{"how": "junk"}',
    "{",
    "}",
    "[",
    '"',
    "\\ud800",
    "*",
    "\r",
    "\x00",
    "\ud800",
]


@settings(max_examples=100)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS)).map("".join)))
@example("Action: add\nInput: " + 100_000 * "[")
@example("Input:" + 10_000 * "\nAction:")
def test_no_text_raises(text):
    call = parse_call(text)
    assert text.encode("utf-8", "replace").decode().startswith(call.text)
    assert (call.arguments is None) == bool(call.failure)
    result = make_call(call, TOOLS, 60.0, limit=200)
    assert result.ends or len(result.observation) <= 200
    result.observation.encode()


@settings(max_examples=50)
@given(
    st.text("abc \n:", max_size=20),
    st.sampled_from([*TOOLS]),
    st.dictionaries(
        st.text(max_size=5) | st.sampled_from(["name", "arguments"]), st.text(max_size=9) | st.just({"a": 1})
    ),
)
def test_what_is_written_by_the_format_is_read_back(thought, tool, arguments):
    wrapped = set(arguments) == {"name", "arguments"} and isinstance(arguments["arguments"], dict)
    thought = " ".join(thought.replace(":", " ").split())
    call = parse_call(f"Thought: {thought}\nAction: {tool}\nInput: {json.dumps(arguments)}\nThought: more")
    assert (call.tool, call.failure) == (tool, "")
    assert call.arguments == (arguments["arguments"] if wrapped else arguments)


def test_instructions_name_tools_and_arguments():
    text = write_instructions(TOOLS)
    assert 'add {"a": integer, "b"?: integer}: Adds two numbers.\n' in text
    assert write_signature(TOOLS["answer"]) == 'answer {"answer": string}'


@settings(max_examples=50)
@given(st.lists(st.tuples(st.text("ab", max_size=40), st.text("ab", max_size=40)), max_size=6), st.integers(0, 500))
def test_a_prompt_keeps_its_limit_and_the_latest_turns(pairs, extra):
    turns = [ReactTurn(*pair) for pair in pairs]
    fixed = len(write_transcript("head\n", "what?", [], 0, "foot\n"))
    text = write_transcript("head\n", "what?", turns, fixed + 40 + extra, "foot\n")
    assert len(text) <= fixed + 40 + extra
    assert text.startswith("head\nQuestion: what?\n")
    assert text.endswith("foot\n")
    turns_text = "".join(f"{turn.text}\nObservation: {turn.observation}\n" for turn in turns)
    if len(turns_text) <= 40 + extra:
        assert text == f"head\nQuestion: what?\n{truncate_middle(turns_text, 10_000)}foot\n"
    else:
        assert "(earlier turns are left out)" in text or len(turns) == 1


def test_the_oldest_turns_go_first():
    turns = [ReactTurn(f"said {i}", f"saw {i}") for i in range(9)]
    text = write_transcript("", "q", turns, 110)
    numbers = [i for i in range(9) if f"said {i}" in text]
    assert numbers == list(range(numbers[0], 9))
    assert 0 < numbers[0] < 8


def test_types_become_a_schema():
    def look(
        place: Annotated[str, Field(description="Where.")], near: list[int] | None = None, *, deadline: float
    ) -> str:
        """Looks."""
        return f"{place} {near} {deadline - time.monotonic() > 1}"

    tool = tool_of(look)
    assert tool.parameters["properties"]["place"] == {"type": "string", "title": "Place", "description": "Where."}
    assert tool.parameters["required"] == ["place"]
    assert tool.parameters["additionalProperties"] is False
    assert set(tool.parameters["properties"]) == {"place", "near"}
    assert tool.call({"place": "here", "near": [1, "2"]}, time.monotonic() + 60) == "here [1, 2] True"


def untyped(a) -> str:
    """Has no types."""
    return ""


def many(*args: int) -> str:
    """Takes what cannot be named."""
    return ""


def odd(a: threading.Lock) -> str:
    """Has no schema."""
    return ""


def silent(a: int) -> str:
    return ""


def lost(a: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Has a type that is not there."""
    return ""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untyped, "parameter 'a' of untyped has no type hint"),
        (many, "parameter 'args' of many cannot be given by name"),
        (odd, "no JSON schema from the type hints of odd"),
        (silent, "silent has no docstring"),
        (lost, "type hints of lost cannot be read"),
        (lambda: "", "'<lambda>' is no name for a tool"),
    ],
)
def test_a_function_that_is_no_tool_is_one_line(function, words):
    with pytest.raises(MarlRayError, match=ONE_LINE) as error:
        tool_of(function)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (["code_interpreters"], "tools: 'code_interpreters' is unknown; did you mean code_interpreter?"),
        (
            ["xyz"],
            "'xyz' is unknown; expected one of answer, code_interpreter, google_search_serper or package.module:",
        ),
        ("answer", "expected a list of names"),
        ({"code_interpreter": 3}, "expected a list of names or a mapping of names to options"),
        (
            {"code_interpreter": {"timeout_s": 0}},
            "tools: code_interpreter rejected {'timeout_s': 0} (timeout_s=0, expected seconds, more than 0",
        ),
        (
            {"code_interpreter": {"memory_bytes": 1 << 70}},
            f"(memory_bytes={1 << 70}, expected a whole number of bytes, at least 64 MiB",
        ),
        ({"code_interpreter": {"output_characters": 0}}, "(output_characters=0, expected a whole number, more than 0)"),
        ({"code_interpreter": {"timeout_s": "3"}}, "tools: code_interpreter rejected {'timeout_s': '3'}"),
        (["no.such.module:f"], "tools: cannot import 'no.such.module' of 'no.such.module:f' (ModuleNotFoundError"),
        (["math:nothing"], "tools: 'nothing' of 'math:nothing' is not in the module"),
        (["math:pi"], "tools: 'math:pi' is not callable"),
        (
            {"code_interpreter": {"timeout": 3}},
            "tools: code_interpreter has no option 'timeout'; did you mean timeout_s?",
        ),
        ({"answer": {"loud": True}}, "tools: answer has no option 'loud'; it has no options"),
        ({"math:gcd_of": {}}, "tools: 'gcd_of' of 'math:gcd_of' is not in the module; did you mean gcd?"),
    ],
)
def test_a_wrong_choice_of_tools_is_one_line(chosen, words):
    with pytest.raises(MarlRayError, match=ONE_LINE) as error:
        make_tools(chosen)
    assert words in str(error.value)


def test_options_of_a_function_are_fixed_and_unseen():
    tool = tool_of(add, fixed={"b": 40})
    assert set(tool.parameters["properties"]) == {"a"}
    assert tool.call({"a": 2}, time.monotonic() + 60) == "42"
    with pytest.raises(MarlRayError, match=r"^tools: add has no parameter 'c'; expected a, b$"):
        tool_of(add, fixed={"c": 1})
    assert make_tool("answer", {}).ends


class Surrender:
    """Gives the question up."""

    name = "give_up"
    ends = True
    prepared = 0

    def __init__(self, words: str = "I do not know"):
        self.words = words

    def prepare(self) -> None:
        type(self).prepared += 1

    def __call__(self) -> str:
        return self.words


def test_a_class_says_its_name_that_it_ends_the_episode_and_how_it_prepares(monkeypatch):
    module = types.ModuleType("surrendering")
    module.Surrender = Surrender  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "surrendering", module)
    tools = make_tools({"surrendering:Surrender": {"words": "No."}})
    result = make_call(parse_call("Action: give_up\nInput: {}"), tools, 60.0)
    assert (result.observation, result.ends, Surrender.prepared) == ("No.", True, 1)
    assert write_signature(tools["give_up"]) == "give_up {}"


@pytest.mark.parametrize("bounded", [True, False])
def test_a_tool_that_exits_ends_no_run(bounded):
    def leave(a: int) -> str:
        """Leave, as a parser of command lines does."""
        raise SystemExit(a)

    with pytest.raises(RuntimeError, match=r"^SystemExit$"):
        tool_of(leave, bounded=bounded).call({"a": 2}, time.monotonic() + 60)
