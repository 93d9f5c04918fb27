"""Closing of several parts: one that fails leaves no other open."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Protocol, TypeVar


class Closable(Protocol):
    """Something that holds processes, files, threads or the like until it is closed."""

    def close(self) -> None:
        """Release what is held."""


ClosablePart = TypeVar("ClosablePart", bound=Closable)


class Unfinished(ExitStack):
    """Closes the parts of what cannot be made whole, the newest first; `pop_all` says that it is whole.

    Errors of closing are dropped, because the error that ended the making says more.
    """

    def keep(self, part: ClosablePart) -> ClosablePart:
        """Return a part that was just made."""

        def close() -> None:
            with suppress(Exception):
                part.close()

        self.callback(close)
        return part


def close_all(closers: Iterable[Callable[[], object]]) -> None:
    """Call each function, in this order. Whatever one raises, those after it are called before it is raised.

    Raises the last error of several.
    """
    with ExitStack() as closing:
        for close in reversed(list(closers)):  # a stack calls the last of its callbacks first
            closing.callback(close)
