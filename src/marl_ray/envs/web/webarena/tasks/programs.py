"""Programs that a WebArena task names as `func:NAME(ARGUMENTS)`, of a fixed list. Nothing is evaluated."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "func:"
LAST_URL = "__last_url__"
"""The address of the open page, in an argument."""
OPEN_PAGE = "__page__"
"""The open page, as an argument."""
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "shopping_get_latest_order_url": (),
    "shopping_get_sku_latest_review_author": ("sku",),
    "shopping_get_sku_latest_review_rating": ("sku",),
    "reddit_get_post_url": ("url",),
    "gitlab_get_project_memeber_role": ("page", "account_name"),  # spelled as WebArena spells it
}
"""Parameters by name: the five programs that the 812 tasks of WebArena name."""


@dataclass(frozen=True)
class ProgramCall:
    """A call of a program of `PROGRAMS`."""

    name: str
    arguments: tuple[str, ...] = ()
    """Texts, of which `OPEN_PAGE` stands for the open page."""


def is_program(text: str) -> bool:
    """Return True if a text is meant as the call of a program."""
    return text.startswith(PREFIX)


def parse_program(text: str) -> ProgramCall:
    """Return the call in `func:NAME(ARGUMENTS)`.

    Raises ValueError unless it is one call of a program of `PROGRAMS` with as many arguments as it has parameters, each a
    quoted text, or `__page__` for the page.
    """
    try:
        call = ast.parse(text.removeprefix(PREFIX).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords):
        raise ValueError(f"{text!r} is not a call such as func:reddit_get_post_url('{LAST_URL}')")
    name = call.func.id
    if name not in PROGRAMS:
        raise ValueError(f"{name!r} is not allowed; expected one of {', '.join(PROGRAMS)}")
    parameters = PROGRAMS[name]
    arguments = tuple(_argument(node) for node in call.args)
    if len(arguments) != len(parameters):
        raise ValueError(f"{name} takes {len(parameters)} arguments ({', '.join(parameters)}), got {len(arguments)}")
    if any(
        (argument == OPEN_PAGE) != (parameter == "page")
        for argument, parameter in zip(arguments, parameters, strict=True)
    ):
        raise ValueError(f"{text!r}: expected {OPEN_PAGE} for the parameter page, and nowhere else")
    return ProgramCall(name, arguments)


def _argument(node: ast.expr) -> str:
    if isinstance(node, ast.Name) and node.id == OPEN_PAGE:
        return OPEN_PAGE
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError(f"{ast.unparse(node)!r} is no quoted text")
