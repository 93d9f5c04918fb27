"""The checker of tools passes what agents can use, and names what they cannot."""

import sys
import threading
import types
from collections.abc import Iterator
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from marl_ray.agents.errors import ToolError
from marl_ray.conformance.extensions import tool as checker
from marl_ray.conformance.extensions.tool import check
from marl_ray.errors import MarlRayError


class Place(BaseModel):
    """A place on a map."""

    row: int
    name: str | None = None


def travel(where: Place, how: Literal["walk", "ride"], stops: list[str], days: int = 1, *, price: float = 1.0) -> str:
    """Plans a journey."""
    if not stops:
        raise ToolError("Name some stops.")
    return f"{how} to {where.row} {where.name} by {stops} in {days} at {price}"


def divide(a: int, b: int) -> str:
    """Divides."""
    return str(a / b)


def waits(a: int) -> str:
    """Waits for the end of the test."""
    over.wait(60)
    return ""


def counts(a: int = 0, *, seen: Any = None) -> str:
    """Counts its calls."""
    counted.append(a)
    return str(len(counted))


def rolls(
    sides: Annotated[int, Field(ge=2, le=6)],
    throws: Annotated[list[int], Field(min_length=1)],
    day: date,
    code: Annotated[str, Field(pattern="^[A-Z]{2}$", examples=["DE", "NL"])],
    note: Annotated[str, Field(pattern="^no text is known$")] = "",
) -> str:
    """Rolls dice."""
    return f"{sides} {throws} {day} {code} {note}"


def knocks(code: Annotated[str, Field(pattern="^[A-Z]{2}$")]) -> str:
    """Knocks at a door."""
    return code


def talks(a: int) -> str:
    return str(a)


talks.__doc__ = "Talks. " * 50
counted: list[int] = []
over = threading.Event()


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("checked_tools")
    for function in (travel, divide, waits, counts, rolls, knocks, talks):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "checked_tools", module)
    over.clear()
    yield
    over.set()


@pytest.mark.parametrize(
    ("name", "failures"),
    [
        ("travel", []),
        ("rolls", []),
        (
            "divide",
            ["calls: ValueError: {'a': 0, 'b': 0} raises ZeroDivisionError: division by zero; raise"],
        ),
        ("waits", ["calls: ValueError: {'a': 1}: no result within 0.1 s"]),
        ("counts", ["repeats: {} gave '1', then '4'", "threads: 8 threads at once got"]),
        ("talks", ["description: it has 349 characters, expected at most 200"]),
    ],
)
def test_a_mistake_is_named(name, failures, monkeypatch):
    monkeypatch.setattr(checker, "DEADLINE_S", 0.1 if name == "waits" else 20.0)
    lines = [f"{each.name}: {each.failure}" for each in check(f"checked_tools:{name}", {}) if each.failure]
    assert len(lines) == len(failures)
    assert all(line.startswith(failure) for line, failure in zip(lines, failures, strict=True))


def test_settings_are_options():
    assert [each.failure for each in check("checked_tools:travel", {"price": 2.0})] == [None] * 5
    with pytest.raises(MarlRayError, match=r"^tools: checked_tools:travel has no option 'prce'; did you mean price\?$"):
        list(check("checked_tools:travel", {"prce": 2.0}))


def test_a_text_that_nobody_knows_is_asked_for():
    with pytest.raises(
        MarlRayError, match=r"tools: knocks: code: no text of the pattern .* name some by Field\(examples="
    ):
        list(check("checked_tools:knocks", {}))


@pytest.mark.parametrize(("name", "settings"), [("answer", {}), ("google_search_serper", {"corpus": "towns"})])
def test_a_built_in_passes(name, settings):
    assert [str(each) for each in check(name, settings) if each.failure] == []
