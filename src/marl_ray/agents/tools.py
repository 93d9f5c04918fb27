"""Tools that language agents call: typed functions, and classes whose instances are called."""

import functools
import inspect
import queue
import re
import threading
import time
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from marl_ray.agents.errors import ToolArgumentsError, ToolTimeoutError
from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.errors import MarlRayError, one_line
from marl_ray.extensions import TOOL, check_options, make_from_options

MAX_ABANDONED_CALLS = 64
"""Maximum number of calls of one tool at a time, including those whose caller no longer waits."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_STRICT_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
_CLASS_ATTRIBUTES = ("ends", "bounded", "prepare")
"""Fields of `Tool` that a class says of its instances."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A typed function that an agent may call. Made by `tool_of`."""

    name: str
    description: str
    """One line that describes the tool to agents."""
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    function: Callable[..., object] = field(repr=False)
    arguments: TypeAdapter[Any] = field(repr=False)
    wants_deadline: bool = False
    ends: bool = False
    """True if a call ends the episode; its result is then the answer."""
    bounded: bool = False
    """True if the function keeps its deadline by itself, so that no thread has to watch it."""
    prepare: Callable[[], object] = field(default=lambda: None, repr=False)
    """Called before every call. Raises MarlRayError if the tool cannot work on this machine."""
    _room: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(MAX_ABANDONED_CALLS), repr=False
    )

    def call(self, arguments: Mapping[str, object], deadline: float) -> str:
        """Return the result as text. `deadline` is a time of `time.monotonic`.

        Raises ToolArgumentsError, ToolTimeoutError, or what the function raises; RuntimeError for an exit. A function that
        passes the deadline continues in its thread, because Python cannot end it; with 64 such calls of a tool, further
        calls time out at once.
        """
        try:
            accepted = dict(self.arguments.validate_python(dict(arguments)))
        except ValidationError as error:
            raise ToolArgumentsError(first_mistake(error, arguments)) from None
        if self.wants_deadline:
            accepted["deadline"] = deadline
        if self.bounded:
            try:
                return str(self.function(**accepted))
            except SystemExit as error:  # as of a parser of command lines; an agent's text must not end the run
                raise RuntimeError(type(error).__name__) from error
        if not self._room.acquire(timeout=0):
            raise ToolTimeoutError
        results: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put((str(self.function(**accepted)), None))
            except BaseException as raised:
                results.put(("", raised))
            finally:
                self._room.release()

        threading.Thread(target=work, name=f"tool {self.name}", daemon=True).start()
        try:
            text, failure = results.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise ToolTimeoutError from None
        if failure is not None:
            raise failure if isinstance(failure, Exception) else RuntimeError(type(failure).__name__)
        return text


def tool_of(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> Tool:
    """Make a tool from a function: its name, its docstring as description, and a schema of arguments from its type hints.

    `fixed` are keyword arguments that the agent neither sees nor gives. The caller gives a parameter `deadline` (float, of
    `time.monotonic`). `attributes` are further fields of `Tool`. Raises MarlRayError naming the function and what it lacks.
    """
    fixed = fixed or {}
    name = str(name or getattr(function, "__name__", type(function).__name__))
    if not _NAME.fullmatch(name):
        raise MarlRayError(f"tools: {name!r} is no name for a tool; expected letters, digits and _, at most 64")
    called = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = typing.get_type_hints(called, include_extras=True)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise MarlRayError(f"tools: the type hints of {name} cannot be read ({one_line(error)})") from error
    if wrong := [key for key in fixed if key not in parameters]:
        raise MarlRayError(f"tools: {name} has no parameter {wrong[0]!r}; expected {', '.join(parameters)}")
    fields: dict[str, object] = {}
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise MarlRayError(f"tools: parameter {key!r} of {name} cannot be given by name, as a tool's must")
        if key in fixed or key == "deadline":
            continue
        if key not in hints:
            raise MarlRayError(f"tools: parameter {key!r} of {name} has no type hint")
        fields[key] = hints[key] if parameter.default is parameter.empty else NotRequired[hints[key]]
    try:
        arguments = TypeAdapter(with_config(_STRICT_CONFIG)(TypedDict(name, fields)))  # type: ignore[operator]
        schema = arguments.json_schema()
    except PydanticUserError as error:
        raise MarlRayError(f"tools: no JSON schema from the type hints of {name} ({one_line(error)})") from error
    summary = (description or inspect.getdoc(function) or "").strip().split("\n\n")[0]
    if not summary:
        raise MarlRayError(f"tools: {name} has no docstring, which is what an agent is told of it")
    return Tool(
        name,
        " ".join(summary.split()),
        {"properties": {}, **schema},
        functools.partial(function, **fixed),
        arguments,
        wants_deadline="deadline" in parameters and "deadline" not in fixed,
        **attributes,
    )


def make_tools(selection: Iterable[str] | Mapping[str, Mapping[str, object] | None]) -> dict[str, Tool]:
    """Return the tools by name, from names or from names with options; `answer` is always among them.

    Raises MarlRayError naming a tool that is unknown or whose options are wrong.
    """
    options_of = selection if isinstance(selection, Mapping) else dict.fromkeys(map(str, selection))
    if isinstance(selection, str) or not all(isinstance(options or {}, Mapping) for options in options_of.values()):
        raise MarlRayError(f"tools: expected a list of names or a mapping of names to options, not {selection!r}")
    tools: dict[str, Tool] = {}
    for name, options in {**options_of, "answer": options_of.get("answer")}.items():
        tool = make_tool(name, options or {})
        if tool.name in tools:
            raise MarlRayError(f"tools: two of the name {tool.name!r}")
        tools[tool.name] = tool
    return tools


def make_tool(name: str, options: Mapping[str, object]) -> Tool:
    """Make the tool that a name of `extensions.TOOL` or `package.module:NAME` means.

    Built-ins are made as users' are. A function is the tool itself, and options are arguments that it always gets. A
    class is made with the options, and its `__call__` is the tool. It may have attributes of the names of `Tool`'s
    fields: `name` (its own name in small letters where it has none), `ends`, `bounded`, `prepare`. Raises MarlRayError
    naming what is wrong.
    """
    try:
        target = TOOL.load(name)
        if not callable(target):
            raise MarlRayError(f"{name!r} is not callable")
        if not inspect.isclass(target):
            check_options(name, target, options, "deadline")
        instance: Any = make_from_options(name, target, options) if inspect.isclass(target) else None
    except MarlRayError as error:
        raise MarlRayError(f"tools: {error}") from error
    if instance is None:
        return tool_of(target, fixed=options)
    tool_name = getattr(instance, "name", None) or target.__name__.lower()
    attributes = {
        attribute: getattr(instance, attribute) for attribute in _CLASS_ATTRIBUTES if hasattr(instance, attribute)
    }
    return tool_of(instance, name=tool_name, description=inspect.getdoc(target), **attributes)


def truncate_middle(text: str, limit: int) -> str:
    """Return the text without its middle if it is longer than `limit` characters.

    Characters that UTF-8 cannot hold are left out too.
    """
    text = replace_surrogates(text)
    if len(text) <= limit:
        return text
    mark = " ... "
    if limit <= len(mark):
        return text[:limit]
    head = (limit - len(mark) + 1) // 2
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head) :]


def replace_surrogates(text: str) -> str:
    """Return the text with a question mark for each character that UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()
