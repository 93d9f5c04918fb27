"""Parts that the calls of the API share: sources of configs, names of arguments, Ctrl-C and Ray."""

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeAlias, TypeVar

from marl_ray.config.load import read_yaml
from marl_ray.errors import FieldError, MarlRayError, did_you_mean, type_name
from marl_ray.json_types import JsonMapping

P = ParamSpec("P")
R = TypeVar("R")
MISSPELT_RATIO = 0.65
"""Likeness, as difflib's ratio, from which a name counts as a misspelt parameter although other names are allowed. `cfg` is
that close to `config`, and no key of a config comes that close to a parameter beside it."""
MAX_SHOWN = 80
"""Maximum number of characters that an error shows of a value."""
_INTERRUPT_MARK = "ends_marl_ray_call"
"""Attribute of a Ctrl-C that has ended a call of the API."""
ConfigSource: TypeAlias = str | Path | JsonMapping
"""A YAML file, or plain data."""


def data_of(
    source: ConfigSource, changes: Mapping[str, object], read: Callable[[str | Path], object] = read_yaml
) -> tuple[dict[str, object], str]:
    """Return the plain data of a config with the changes merged into it, and the name of its source for errors.

    `read` reads a file. A mapping in `changes` changes the keys that it names and leaves the others of its section; any
    other value replaces the key. Raises MarlRayError for a file that cannot be read, or one that holds no mapping.
    """
    if isinstance(source, str | Path):
        data, name = read(source), str(source)
    else:
        data, name = source, "config"
    if not isinstance(data, Mapping):
        raise MarlRayError(f"{name}: expected a mapping of keys at the top, got {type_name(data)}")
    for key, value in changes.items():
        section, dot, inner = key.partition(".")
        if dot:
            raise MarlRayError(f"{key}: expected the section as an argument: {section}={{{inner!r}: {value!r}}}")
    return merge_changes(data, changes), name


def merge_changes(data: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of the data with the changes, section by section."""
    result = dict(data)
    for key, value in changes.items():
        section = result.get(key)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            value = merge_changes(section, value)
        result[key] = value
    return result


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with a check of its arguments' names: a misspelt one is a FieldError that says what was meant.

    Where the function takes any other name too, such as keys of a config, only one that is very close to a parameter that is
    not given counts as misspelt.
    """
    signature = inspect.signature(function)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    parameters = [
        name for name, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD
    ]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        not_passed = [name for name in parameters[len(args) :] if name not in kwargs]
        for name in kwargs:
            if name in parameters:
                continue
            if not takes_any:
                check_known(name, [known for known in parameters if known != "self"])
            elif close := difflib.get_close_matches(name, not_passed, 1, MISSPELT_RATIO):
                raise FieldError(name, f"is unknown; did you mean {close[0]}?")
        return function(*args, **kwargs)

    return call


def check_known(name: str, known: Collection[str]) -> None:
    """Raise FieldError for an argument that has none of the known names; it says which one was meant."""
    if name not in known:
        raise FieldError(name, f"is unknown{did_you_mean(name, known)}")


def short_repr(value: object) -> str:
    """Return a value as Python shows it, in one line of at most MAX_SHOWN characters, for errors."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


@contextmanager
def short_interrupt() -> Iterator[None]:
    """Let a Ctrl-C within the block end a script with one line instead of a traceback.

    KeyboardInterrupt is raised all the same, so that a caller which catches it continues.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        # A mark, because a hook that knew the interrupt itself would keep all variables of its traceback alive.
        vars(interrupt)[_INTERRUPT_MARK] = True
        if not isinstance(sys.excepthook, _ShortInterruptHook):
            sys.excepthook = _ShortInterruptHook(sys.excepthook)
        raise


@dataclass(frozen=True)
class _ShortInterruptHook:
    """Show a marked interrupt in one line, and any other error by the hook that was there before."""

    previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if hasattr(error, _INTERRUPT_MARK):
            print("marl-ray: interrupted", file=sys.stderr)
        else:
            self.previous_hook(kind, error, trace)


def cluster_of_call() -> str | None:
    """Return the cluster that exists already; None if the call starts its own Ray.

    The cluster is the one that this process is connected to, or that of RAY_ADDRESS.
    """
    import ray

    return "the Ray of this process" if ray.is_initialized() else os.environ.get("RAY_ADDRESS")


@contextmanager
def ray_of_call() -> Iterator[None]:
    """Yield the Ray that this process is connected to, or else that of `ensure_ray` within the block."""
    import ray

    from marl_ray.cluster.local_ray import ensure_ray

    if ray.is_initialized():
        yield
        return
    with ensure_ray():
        yield
