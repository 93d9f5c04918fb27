"""Tools: what an agent relies on when it calls one."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from marl_ray.agents.errors import ToolArgumentsError, ToolError, ToolTimeoutError
from marl_ray.agents.react_format import write_signature
from marl_ray.agents.tools import Tool, make_tool
from marl_ray.conformance.extensions.base import CheckedProperty, check_property
from marl_ray.errors import one_line
from marl_ray.json_types import JsonMapping

DEADLINE_S = 20.0
"""Seconds that a call may take; the environment's `timeout_s` by default."""
VARIANTS = 3
"""Calls with drawn arguments."""
THREADS = 8
"""Threads that call at once, as the environments of a worker do."""
MAX_DESCRIPTION_LENGTH = 200
"""Maximum number of characters of a description, which every prompt repeats."""


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Call a tool with arguments that fit its schema, and with one that does not; `settings` are its options.

    Raises MarlRayError where it cannot be made.
    """
    tool = make_tool(name, settings)
    tool.prepare()
    calls = [_arguments(tool.parameters, variant) for variant in range(VARIANTS)]
    results: list[str] = []

    def answers() -> str | None:
        results.extend(_result(tool, arguments) for arguments in calls)
        return None

    yield check_property(
        "description", f"agents read {write_signature(tool)}: {tool.description}", lambda: _description(tool)
    )
    called = check_property("calls", "a call that fits returns a text or raises ToolError, in time", answers)
    yield called
    yield check_property("arguments", "a call with an unknown argument is refused", lambda: _unknown(tool, calls[0]))
    if called.failure is None:
        yield check_property(
            "repeats", "the same call gives the same text again", lambda: _repeats(tool, calls, results)
        )
        yield check_property(
            "threads", "it gives the same text to several threads", lambda: _threads(tool, calls, results)
        )


def _result(tool: Tool, arguments: Mapping[str, object]) -> str:
    """Return the text that an agent reads. Raises ValueError where the tool does what it should not."""
    try:
        return tool.call(arguments, time.monotonic() + DEADLINE_S)
    except ToolError as error:
        return f"ToolError: {error}"
    except ToolArgumentsError as error:
        raise ValueError(f"{dict(arguments)} fits the schema and is refused: {error}") from error
    except ToolTimeoutError as error:
        raise ValueError(f"{dict(arguments)}: no result within {DEADLINE_S:g} s") from error
    except Exception as error:  # whatever the user's tool raises
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{dict(arguments)} raises {reason}; raise ToolError with what agents should read") from error


def _description(tool: Tool) -> str | None:
    length = len(tool.description)
    return (
        f"it has {length} characters, expected at most {MAX_DESCRIPTION_LENGTH}"
        if length > MAX_DESCRIPTION_LENGTH
        else None
    )


def _unknown(tool: Tool, arguments: Mapping[str, object]) -> str | None:
    try:
        tool.call({**arguments, "no_such_argument": 1}, time.monotonic() + DEADLINE_S)
    except ToolArgumentsError:
        return None
    return "it accepts the argument no_such_argument"


def _repeats(tool: Tool, calls: Sequence[Mapping[str, object]], results: Sequence[str]) -> str | None:
    for arguments, result in zip(calls, results, strict=True):
        again = _result(tool, arguments)
        if again != result:
            return f"{dict(arguments)} gave {result[:40]!r}, then {again[:40]!r}"
    return None


def _threads(tool: Tool, calls: Sequence[Mapping[str, object]], results: Sequence[str]) -> str | None:
    with ThreadPoolExecutor(THREADS) as threads:
        for again in threads.map(lambda _: [_result(tool, arguments) for arguments in calls], range(THREADS)):
            if again != list(results):
                return f"{THREADS} threads at once got {str(again)[:80]}, one alone {str(list(results))[:80]}"
    return None


def _arguments(schema: JsonMapping, variant: int) -> dict[str, object]:
    """Return the arguments that fit a tool's schema; the first variant leaves out those that may be."""
    definitions, required = schema.get("$defs", {}), schema.get("required", ())
    return {
        name: _value(part, definitions, variant)
        for name, part in schema["properties"].items()
        if variant or name in required
    }


def _value(schema: JsonMapping, definitions: JsonMapping, variant: int) -> object:
    """Return a value that fits a JSON schema as pydantic writes them for type hints."""
    if "$ref" in schema:
        return _value(definitions[schema["$ref"].rpartition("/")[2]], definitions, variant)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][variant % len(schema["enum"])]
    if "anyOf" in schema:
        return _value(schema["anyOf"][variant % len(schema["anyOf"])], definitions, variant)
    match schema.get("type"):
        case "string":
            return ("a", "", "K\u00f6ln 7\n{x}")[variant]
        case "integer":
            return max(schema.get("minimum", 0), (1, 0, 7)[variant])
        case "number":
            return max(schema.get("minimum", 0.0), (1.0, 0.0, 2.5)[variant])
        case "boolean":
            return variant % 2 == 1
        case "array":
            return [_value(schema.get("items", {}), definitions, variant)] * variant
        case "object":
            return _arguments({"properties": {}, **schema, "$defs": definitions}, variant)
    return None
