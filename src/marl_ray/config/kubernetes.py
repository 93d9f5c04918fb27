"""Types of the values of Kubernetes that a config holds, such as names, amounts, paths and schedules."""

import re
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from pydantic import AfterValidator, Field, StringConstraints

from marl_ray.config.base import IMAGE, KUBERNETES_NAME, NOT_EMPTY, QUANTITY, VARIABLE, VERSION

MAX_NUMBER = 10**9
"""The greatest number: the fields of KubeRay's resources have 32 bits, which hold twice as much."""
Name = Annotated[str, StringConstraints(pattern=KUBERNETES_NAME)]
"""A name of our own, short enough for what KubeRay appends."""
Reference = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""Name of what somebody else has made, such as a Secret."""
Queue = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")]
"""Such a name that is the value of a label, too."""
Image = Annotated[str, StringConstraints(pattern=IMAGE)]
Version = Annotated[str, StringConstraints(pattern=VERSION)]
"""A version of Ray, such as 2.60.0."""
Quantity = Annotated[str, StringConstraints(pattern=QUANTITY)]
"""An amount of memory, such as 8Gi. Kubernetes takes 0 for no bound at all."""
Variable = Annotated[str, StringConstraints(pattern=VARIABLE)]
"""Name of an environment variable."""
RayResource = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][-_.:/A-Za-z0-9]*$")]
"""Name of a custom resource; it stands between quotes in the command that starts Ray."""
Command = Annotated[str, StringConstraints(pattern=NOT_EMPTY)]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Positive = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Seconds = Positive


def _check_absolute_path(path: str) -> str:
    if not re.fullmatch(r"(/[^/:\x00-\x1f]+)+/?", path) or {".", ".."} & set(path.split("/")):
        raise ValueError("expected an absolute path without . and .., such as /runs")
    return path


AbsolutePath = Annotated[str, AfterValidator(_check_absolute_path)]
"""An absolute path below the root."""

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_CRON_FIELDS: tuple[tuple[int, int, list[str]], ...] = (
    (0, 59, []),
    (0, 23, []),
    (1, 31, []),
    (1, 12, _MONTHS),
    (0, 6, _DAYS),
)
"""Least and greatest number of each field of cron, and the names that stand for numbers from the least on."""
_CRON_PART = re.compile(r"(\*|\?|[a-z0-9]+)(?:-([a-z0-9]+))?(?:/([0-9]+))?")


def is_time_zone(name: str) -> bool:
    """Return True for a name of the time zone database, and for `Local`, which KubeRay's operator takes as its own."""
    if name in ("UTC", "Local"):
        return True
    try:
        return bool(name) and ZoneInfo(name).key == name
    except (ValueError, OSError):
        return False
    except ZoneInfoNotFoundError:
        return not available_timezones()  # a machine without the database cannot tell


def is_schedule(text: str) -> bool:
    """Return True for five fields of cron as KubeRay takes them.

    KubeRay's parser is ParseStandard of robfig/cron; its `@` words are not taken.
    """
    fields = text.lower().split()
    return len(fields) == len(_CRON_FIELDS) and all(
        _is_cron_part(part, *bounds)
        for field, bounds in zip(fields, _CRON_FIELDS, strict=True)
        for part in field.split(",")
    )


def _is_cron_part(part: str, minimum: int, maximum: int, names: list[str]) -> bool:
    """Return True for `*` or `?`, which mean the same, a number or a range, each with or without a step that is not 0."""
    match = _CRON_PART.fullmatch(part)
    if match is None or (match[3] is not None and int(match[3]) == 0):
        return False
    if match[1] in "*?":
        return match[2] is None
    places = {name: minimum + k for k, name in enumerate(names)}
    ends = [places.get(end, int(end) if end.isdigit() else -1) for end in (match[1], match[2] or match[1])]
    return minimum <= ends[0] <= ends[1] <= maximum
