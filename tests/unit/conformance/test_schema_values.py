"""Values drawn from the JSON schema of a type are accepted by the type."""

from datetime import date, datetime, timedelta
from decimal import Decimal
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import Field, TypeAdapter

from marl_ray.conformance.schema_values import NoFittingValueError, fitting_value

TYPES: list[Any] = [
    Annotated[int, Field(le=6)],
    Annotated[int, Field(ge=1, le=6)],
    Annotated[int, Field(gt=-3, lt=0)],
    Annotated[int, Field(lt=-100)],
    Annotated[int, Field(ge=5, le=20, multiple_of=7)],
    Annotated[int, Field(gt=7, lt=15, multiple_of=7)],
    Annotated[float, Field(gt=0, lt=1)],
    Annotated[float, Field(gt=0, le=1, multiple_of=0.5)],
    Annotated[float, Field(ge=2.5, le=2.5)],
    Annotated[float, Field(lt=-3.5)],
    Annotated[str, Field(min_length=2, max_length=3)],
    Annotated[str, Field(pattern="^[a-z]+$")],
    Annotated[str, Field(pattern="^[0-9]{3}$", examples=["123"])],
    Annotated[list[int], Field(min_length=1)],
    Annotated[list[int], Field(max_length=1)],
    Annotated[set[Annotated[int, Field(ge=4, le=6)]], Field(min_length=3)],
    Annotated[set[str], Field(min_length=5)],
    Annotated[dict[str, int], Field(min_length=2)],
    tuple[int, str, float],
    tuple[int, ...],
    date,
    datetime,
    timedelta,
    UUID,
    Decimal,
    float | None,
    IPv4Address,
    Path,
    Literal["a", "b"],
    int | None,
]


@pytest.mark.parametrize("hint", TYPES, ids=str)
def test_a_value_fits(hint):
    adapter = TypeAdapter(hint)
    for variant in range(6):
        adapter.validate_python(fitting_value(adapter.json_schema(), {}, variant))


@pytest.mark.parametrize(
    ("hint", "reason"),
    [
        (Annotated[str, Field(pattern="^[0-9]{3}$")], r"the pattern '\^\[0-9\]\{3\}\$' is known; name some by Field"),
        (Annotated[int, Field(gt=7, lt=14, multiple_of=7)], "no number between 7 and 14 fits"),
    ],
)
def test_what_has_no_known_value_is_named(hint, reason):
    with pytest.raises(NoFittingValueError, match=reason):
        fitting_value(TypeAdapter(hint).json_schema(), {}, 0)
