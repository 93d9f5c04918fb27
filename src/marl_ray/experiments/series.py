"""How an experiment's outcomes added up over time, for drawing."""

from typing import Any

import sqlalchemy as sa

from marl_ray.experiments import schema
from marl_ray.experiments.statistics import Summary
from marl_ray.experiments.sums import NONE, Design, Moments, counts_of, merged

Series = dict[str, list[tuple[float, Summary]]]
"""Arm -> (seconds since 1970, all observations until then), by time."""


def series(connection: sa.Connection, name: str, design: Design, points: int, now: float) -> Series:
    """The arms' outcomes until `points` moments, evenly spaced from the first outcome to the last; an arm's moments
    without anything new are left out. An observation is a unit's outcome, or that of a cluster or block: the mean of its
    units', as of the last of them."""
    at = schema.outcomes.c.at
    ends = sa.select(sa.func.min(at).label("first"), sa.func.max(at).label("last"))
    first, last = connection.execute(ends.where(schema.outcomes.c.experiment == name)).one()
    if first is None:
        return {}
    step = (last - first) / points or 1.0
    rows = (_units(name) if design.randomize == "session" else _clusters(name, design, now)).subquery().c
    # Rounding is the one way down that both databases know.
    place = sa.func.round((rows.at - first) / step - 0.5).label("place")
    found: dict[str, dict[int, Moments]] = {}
    for row in connection.execute(schema.moments(sa.select(rows.arm, place, rows.value).cte("units"), "arm", "place")):
        by_place = found.setdefault(row.arm, {})
        # The edges belong to the places inside.
        inside = min(max(int(row.place), 0), points - 1)
        here = Moments(row.n, float(row.mean), float(row.squares))
        by_place[inside] = merged(by_place.get(inside, NONE), here)
    made: Series = {}
    for arm, by_place in sorted(found.items()):
        seen = NONE
        for inside, here in sorted(by_place.items()):
            seen = merged(seen, here)
            made.setdefault(arm, []).append((first + (inside + 1) * step, seen.summary()))
    return made


def _units(name: str) -> Any:
    units, found = schema.exposures.c, schema.outcomes
    query = sa.select(units.arm, found.c.value, found.c.at).join_from(found, schema.exposures, schema.same_unit(found))
    return query.where(found.c.experiment == name)


def _clusters(name: str, design: Design, now: float) -> Any:
    """As `looks.look_at` takes them."""
    units, found = schema.exposures.c, schema.outcomes
    first = sa.func.first_value(units.arm).over(partition_by=units.cluster, order_by=units.epoch)
    epochs = [end(units.epoch).over(partition_by=units.cluster) for end in (sa.func.min, sa.func.max)]
    columns = units.experiment, units.unit, units.arm, units.cluster, counts_of(design).label("counts")
    homes = sa.select(*columns, first.label("home"), (epochs[1] - epochs[0]).label("changes"))
    home = homes.where(units.experiment == name, units.cluster.is_not(None)).subquery().c
    same = sa.and_(found.c.experiment == home.experiment, found.c.unit == home.unit)
    query = sa.select(home.arm, sa.func.avg(found.c.value).label("value"), sa.func.max(found.c.at).label("at"))
    query = query.select_from(found).where(same, found.c.experiment == name, home.arm == home.home, home.counts == 1)
    if design.randomize == "switchback":
        query = query.where(home.changes == 0, schema.block_begin(home.cluster) + design.block_s <= now)
    return query.group_by(home.arm, home.cluster)
