"""The ReAct format: instructions to an agent that uses tools, and observations that answer its calls.

The format is ReAct's (Yao et al. 2023, arXiv 2210.03629) with a JSON object as input:

    Thought: I need the product.
    Action: code_interpreter
    Input: {"code": "print(6 * 7)"}

One response makes one call, which may be written in other ways too (see `marl_ray.agents.calls`). An agent's mistakes
come back to it as observations; nothing that it writes raises.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marl_ray.agents.calls import CallFailure, ParsedCall
from marl_ray.agents.errors import ToolArgumentsError, ToolError, ToolTimeoutError
from marl_ray.agents.tools import Tool, truncate_middle
from marl_ray.errors import one_line
from marl_ray.json_types import JsonObject

_MAX_NAME_LENGTH = 60
"""Characters of an unknown tool's name that an observation quotes."""
_MAX_CHARACTERS = 1 << 16
"""Characters of a final answer that are kept, as many as `rewards.math_reward` reads."""
_LEFT_OUT = "(earlier turns are left out)\n"


@dataclass(frozen=True)
class CallResult:
    """Result of a call. `failure` is empty if the tool did its work."""

    observation: str
    failure: CallFailure = ""
    tool: str = ""
    """Name of the tool that ran; empty if none did."""
    ends: bool = False
    """True if the tool ends the episode; the observation is then the answer."""
    seconds: float = 0.0
    """Wall time of the tool, in seconds."""


@dataclass(frozen=True)
class ReactTurn:
    """One turn of an agent, as later prompts show it."""

    text: str
    observation: str


def make_call(call: ParsedCall, tools: Mapping[str, Tool], timeout_s: float, limit: int = 1000) -> CallResult:
    """Make a call and describe its result in at most `limit` characters.

    `tools` are by name. Every failure of the call or the tool is an observation. Raises MarlRayError only if this
    machine cannot run a tool at all.
    """
    if call.failure == "no_call":
        return CallResult(
            truncate_middle(f"No call found: {call.why}. Write Action: and Input: lines.", limit), call.failure
        )
    if call.failure == "bad_json" and not call.tool:
        return CallResult(
            truncate_middle(f"The call is not JSON of a name and arguments: {call.why}.", limit), call.failure
        )
    tool = find_tool(tools, call.tool)
    if tool is None:
        name, names = truncate_middle(call.tool, _MAX_NAME_LENGTH), ", ".join(tools)
        return CallResult(truncate_middle(f"No tool {name!r}. Tools: {names}.", limit), "unknown_tool")
    expected = f"Expected {write_signature(tool)}."
    arguments = _as_only_argument(tool, call.code) if call.arguments is None else call.arguments
    if arguments is None:
        return CallResult(truncate_middle(f"Input is not a JSON object: {call.why}. {expected}", limit), "bad_json")
    tool.prepare()
    failure: CallFailure = ""
    began = time.monotonic()
    try:
        text = tool.call(arguments, began + timeout_s)
    except ToolArgumentsError as error:
        return CallResult(truncate_middle(f"Wrong arguments: {error}. {expected}", limit), "wrong_arguments")
    except ToolTimeoutError:
        text, failure = f"{tool.name} gave no result within {timeout_s:g} s.", "timeout"
    except ToolError as error:
        text, failure = str(error), "failed"
    except Exception as error:  # whatever a tool of the user's raises is the agent's to read, not the run's to die of
        text, failure = f"{tool.name} failed: {type(error).__name__}: {one_line(error)}", "crash"
    ends = tool.ends and not failure
    return CallResult(
        truncate_middle(text, _MAX_CHARACTERS if ends else limit), failure, tool.name, ends, time.monotonic() - began
    )


def find_tool(tools: Mapping[str, Tool], name: str) -> Tool | None:
    """Return the tool of this name, or else of this name in other case; None if there is none."""
    return tools.get(name) or next(
        (tool for tool_name, tool in tools.items() if tool_name.lower() == name.lower()), None
    )


def write_instructions(tools: Mapping[str, Tool]) -> str:
    """Return the text that precedes a question: the format and the tools."""
    listed = "\n".join(f"{write_signature(tool)}: {tool.description}" for tool in tools.values())
    return (
        "Answer the question with the help of tools. Write one call per turn, as\n"
        "Thought: what to do and why\n"
        "Action: name of a tool\n"
        "Input: its arguments, a JSON object\n"
        f"Then the observation is shown. Tools:\n{listed}\n\n"
    )


def write_signature(tool: Tool) -> str:
    """Return a tool's name and arguments in one line, such as `answer {"answer": string}`.

    Optional arguments have a `?`.
    """
    required = tool.parameters.get("required", ())
    arguments = (
        f'"{name}"{"" if name in required else "?"}: {schema.get("type", "value")}'
        for name, schema in tool.parameters.get("properties", {}).items()
    )
    return f"{tool.name} {{{', '.join(arguments)}}}"


def _as_only_argument(tool: Tool, code: str | None) -> JsonObject | None:
    """Return a fenced block as the argument of a tool whose only argument is a text; None for other tools."""
    properties = tool.parameters.get("properties", {})
    names = [name for name, schema in properties.items() if schema.get("type") == "string"]
    return {names[0]: code} if code is not None and len(names) == len(properties) == 1 else None


def write_transcript(head: str, question: str, turns: Sequence[ReactTurn], limit: int, foot: str = "") -> str:
    """Return the next prompt: head, question, turns, foot.

    The earliest turns are left out to keep to `limit` characters. The latest turn always stands, without its
    middle if it must be; so do head, question and foot, whatever their length.
    """
    fixed = f"{head}Question: {question}\n"
    room = limit - len(fixed) - len(foot)
    shown = [f"{turn.text}\nObservation: {turn.observation}\n" for turn in turns]
    if sum(map(len, shown)) <= room:
        return f"{fixed}{''.join(shown)}{foot}"
    room -= len(_LEFT_OUT)
    shown_turns: list[str] = []
    for text in reversed(shown):
        if shown_turns and len(text) > room:
            break
        shown_turns.insert(0, truncate_middle(text, max(room, 0)))
        room -= len(shown_turns[0])
    left_out = _LEFT_OUT if len(shown_turns) < len(shown) else ""
    return f"{fixed}{left_out}{''.join(shown_turns)}{foot}"
