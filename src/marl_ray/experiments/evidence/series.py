"""Time series of an experiment's outcomes, for charts."""

from typing import Any

import sqlalchemy as sa

from marl_ray.experiments.database import schema
from marl_ray.experiments.database.windows import grace_s
from marl_ray.experiments.evidence.running_sums import LookSettings, counts_sql, moments_of, rescaled_value_sql
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.moments import NO_MOMENTS, Moments, merge_moments

Series = dict[str, list[tuple[float, Summary]]]
"""Arm -> [(seconds since 1970, summary of all observations until then)], by time."""


def series(connection: sa.Connection, name: str, settings: LookSettings, points: int, now: float) -> Series:
    """Return the summaries of the arms' outcomes at `points` moments.

    The moments are evenly spaced from the first outcome to the last; those at which an arm has nothing new are left out.
    Only outcomes of units whose windows are over at `now` (seconds since 1970) count; a value that stands for a missing
    outcome is dated at its window's end. An observation is a unit's outcome, or the mean of a cluster's or block's units,
    dated at the last of them.
    """
    units = _units(name, settings, now).cte("judged")
    with_value = sa.select(units).where(units.c.value.is_not(None))
    rows = (with_value if settings.randomize == "session" else _clusters(units, settings, now)).subquery().c
    first, last = connection.execute(sa.select(sa.func.min(rows.at), sa.func.max(rows.at))).one()
    if first is None:
        return {}
    step = (last - first) / points or 1.0
    # Both databases have round(); SQLite may have been built without floor().
    place = sa.func.round((rows.at - first) / step - 0.5).label("place")
    by_arm: dict[str, dict[int, Moments]] = {}
    for row in connection.execute(schema.moments(sa.select(rows.arm, place, rows.value).cte("units"), "arm", "place")):
        by_place = by_arm.setdefault(row.arm, {})
        # The edges belong to the places inside.
        inside = min(max(int(row.place), 0), points - 1)
        point_moments = moments_of(row)
        by_place[inside] = merge_moments(by_place.get(inside, NO_MOMENTS), point_moments)
    series_of: Series = {}
    for arm, by_place in sorted(by_arm.items()):
        total = NO_MOMENTS
        for inside, point_moments in sorted(by_place.items()):
            total = merge_moments(total, point_moments)
            series_of.setdefault(arm, []).append((first + (inside + 1) * step, total.summary()))
    return series_of


def _units(name: str, settings: LookSettings, now: float) -> Any:
    """Return the query of the units, with their values and the times of these.

    Its columns are cluster, epoch, arm, whether the unit counts, whether it is judged, its value (null if it has none, or
    none yet) and the time of the value.
    """
    units, outcomes = schema.exposures.c, schema.outcomes
    closes_at = units.stored_at + settings.window_s
    judged = units.stored_at <= now - settings.window_s - grace_s(settings.window_s)
    in_time = sa.and_(schema.same_unit(outcomes), outcomes.c.arrived_at <= closes_at)
    value = sa.case(
        (judged, sa.func.coalesce(rescaled_value_sql(outcomes, settings), dict(settings.missing).get("outcome")))
    )
    columns = units.cluster, units.epoch, units.arm, counts_sql(settings).label("counts")
    query = sa.select(*columns, sa.case((judged, 1), else_=0).label("judged"), value.label("value"))
    query = query.add_columns(sa.func.coalesce(outcomes.c.at, closes_at).label("at"))
    return query.join_from(schema.exposures, outcomes, in_time, isouter=True).where(units.experiment == name)


def _clusters(units: sa.CTE, settings: LookSettings, now: float) -> Any:
    """Return the query of the means of clusters or blocks, chosen by the rules of `looks.look_at`."""
    columns = units.c
    first = sa.func.first_value(columns.arm).over(partition_by=columns.cluster, order_by=columns.epoch)
    epochs = [end(columns.epoch).over(partition_by=columns.cluster) for end in (sa.func.min, sa.func.max)]
    judged = sa.func.min(columns.judged).over(partition_by=columns.cluster)
    homes = sa.select(
        *columns, first.label("home"), (epochs[1] - epochs[0]).label("changes"), judged.label("all_judged")
    )
    home = homes.where(columns.cluster.is_not(None)).subquery().c
    query = sa.select(home.arm, sa.func.avg(home.value).label("value"), sa.func.max(home.at).label("at"))
    query = query.where(home.arm == home.home, home.counts == 1, home.value.is_not(None))
    if settings.randomize == "switchback":
        over = schema.block_begin(home.cluster) + settings.block_s <= now
        query = query.where(home.changes == 0, home.all_judged == 1, over)
    return query.group_by(home.arm, home.cluster)
