"""Checks tools for what an agent relies on when it calls one."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from marl_ray.agents.errors import ToolArgumentsError, ToolError, ToolTimeoutError
from marl_ray.agents.react_format import write_signature
from marl_ray.agents.tools import Tool, make_tool
from marl_ray.conformance.extensions.properties import CheckedProperty, check_property
from marl_ray.conformance.schema_values import NoFittingValueError, fitting_object
from marl_ray.errors import MarlRayError, one_line

DEADLINE_S = 20.0
"""Seconds that a call may take; the environment's `timeout_s` by default."""
VARIANTS = 3
"""Calls with drawn arguments."""
THREADS = 8
"""Threads that call at once, as the threads of a rollout do."""
MAX_DESCRIPTION_LENGTH = 200
"""Maximum number of characters of a description, which every prompt repeats."""


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Call a tool with arguments that fit its schema, and with one that does not.

    `settings` are its options. Raises MarlRayError where it cannot be made, or no value of an argument is known.
    """
    tool = make_tool(name, settings)
    tool.prepare()
    try:
        calls = [fitting_object(tool.parameters, variant) for variant in range(VARIANTS)]
    except NoFittingValueError as error:
        raise MarlRayError(f"tools: {tool.name}: {error}") from error
    results: list[str] = []

    def answers() -> str | None:
        results.extend(_call_tool(tool, arguments) for arguments in calls)
        return None

    yield check_property(
        "description", f"agents read {write_signature(tool)}: {tool.description}", lambda: _check_description(tool)
    )
    called = check_property("calls", "a call that fits returns a text or raises ToolError, in time", answers)
    yield called
    yield check_property(
        "arguments", "a call with an unknown argument is refused", lambda: _check_unknown_argument(tool, calls[0])
    )
    if called.failure is None:
        yield check_property(
            "repeats", "the same call gives the same text again", lambda: _check_repeats(tool, calls, results)
        )
        yield check_property(
            "threads", "it gives the same text to several threads", lambda: _check_threads(tool, calls, results)
        )


def _call_tool(tool: Tool, arguments: Mapping[str, object]) -> str:
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


def _check_description(tool: Tool) -> str | None:
    length = len(tool.description)
    return (
        f"it has {length} characters, expected at most {MAX_DESCRIPTION_LENGTH}"
        if length > MAX_DESCRIPTION_LENGTH
        else None
    )


def _check_unknown_argument(tool: Tool, arguments: Mapping[str, object]) -> str | None:
    try:
        tool.call({**arguments, "no_such_argument": 1}, time.monotonic() + DEADLINE_S)
    except ToolArgumentsError:
        return None
    return "it accepts the argument no_such_argument"


def _check_repeats(tool: Tool, calls: Sequence[Mapping[str, object]], results: Sequence[str]) -> str | None:
    for arguments, result in zip(calls, results, strict=True):
        again = _call_tool(tool, arguments)
        if again != result:
            return f"{dict(arguments)} gave {result[:40]!r}, then {again[:40]!r}"
    return None


def _check_threads(tool: Tool, calls: Sequence[Mapping[str, object]], results: Sequence[str]) -> str | None:
    with ThreadPoolExecutor(THREADS) as threads:
        for again in threads.map(lambda _: [_call_tool(tool, arguments) for arguments in calls], range(THREADS)):
            if again != list(results):
                return f"{THREADS} threads at once got {str(again)[:80]}, one alone {str(list(results))[:80]}"
    return None
