"""Closing of several parts: one that fails leaves no other open."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack


def close_all(closers: Iterable[Callable[[], object]]) -> None:
    """Call each function, in this order. Whatever one raises, those after it are called before it is raised.

    Raises the last error of several.
    """
    with ExitStack() as closing:
        for close in reversed(list(closers)):  # a stack calls the last of its callbacks first
            closing.callback(close)
