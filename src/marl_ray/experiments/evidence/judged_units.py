"""Judged units in the order in which they were stored, and the bets on them from look to look.

The order is the database's: `stored_at`, then the unit. Once a moment is settled (`windows`), no unit stored before it
can still appear. So every replica bets on the same units in the same order, whenever it looks.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import sqlalchemy as sa

from marl_ray.experiments.database import schema
from marl_ray.experiments.database.windows import grace_s
from marl_ray.experiments.designs.analysis import Units
from marl_ray.experiments.evidence.running_sums import LookSettings
from marl_ray.experiments.statistics.bets import BetEvidence, BettingTest, Claim

MAX_UNITS = 10_000
"""Maximum number of units held in memory at a time."""


@dataclass(frozen=True, slots=True)
class BetQuestion:
    """A claim about one treatment and the control, to be tested on a metric with bounds."""

    metric: str
    treatment: str
    control: str
    claim: Claim


class JudgedUnit(NamedTuple):
    """A unit whose window is over."""

    unit: str
    epoch: int
    arm: str
    value: float | None
    """The value it reported in time, else the value that a missing report counts as; None if it then does not count."""


def judged_until(settings: LookSettings, moment: float) -> float:
    """Return the latest `stored_at` of a unit that is judged at `moment`, which is one of `Database.settled_at`."""
    return moment - settings.window_s - grace_s(settings.window_s)


def judged_units(
    connection: sa.Connection, name: str, settings: LookSettings, metric: str, after: float, until: float
) -> Iterator[list[JudgedUnit]]:
    """Yield pages of the units stored after `after` and until `until`, in order, each with its value.

    The value is of the metric (or `outcome`), not moved into any range.
    """
    units = schema.exposures.c
    table = schema.outcomes if metric == "outcome" else schema.metrics
    same = [schema.same_unit(table), table.c.arrived_at <= units.stored_at + settings.window_s]
    if table is schema.metrics:
        same.append(table.c.metric == metric)
    query = sa.select(units.unit, units.epoch, units.arm, table.c.value)
    query = query.join_from(schema.exposures, table, sa.and_(*same), isouter=True)
    query = query.where(units.experiment == name, units.stored_at > after, units.stored_at <= until)
    default = dict(settings.missing).get(metric)
    rows = connection.execution_options(yield_per=MAX_UNITS).execute(query.order_by(units.stored_at, units.unit))
    for page in rows.partitions():
        yield [JudgedUnit(*row[:3], default if row[3] is None else float(row[3])) for row in page]


def all_judged(
    connection: sa.Connection, name: str, settings: LookSettings, metrics: Iterable[str], moment: float
) -> Units:
    """Return all units that are judged at `moment`, with their outcome and metrics."""
    values: dict[str, np.ndarray] = {}
    arms, epochs, until = list[str](), list[int](), judged_until(settings, moment)
    for metric in dict.fromkeys(["outcome", *metrics]):
        pages = judged_units(connection, name, settings, metric, -math.inf, until)
        units = [unit for page in pages for unit in page]
        values[metric] = np.array([math.nan if unit.value is None else unit.value for unit in units])
        arms, epochs = [unit.arm for unit in units], [unit.epoch for unit in units]
    return Units(np.array(arms, str), np.array(epochs, int), values)


@dataclass
class Bets:
    """One experiment's betting tests, up to the units that were judged at the last look."""

    settings: LookSettings
    tests: dict[BetQuestion, BettingTest] = field(default_factory=dict)
    bet_until: dict[BetQuestion, float] = field(default_factory=dict)
    """Question -> the latest `stored_at` that it has bet on."""
    incomplete_metrics: set[str] = field(default_factory=set)
    """Metrics that some unit has not reported and that then does not count."""

    def read(
        self,
        connection: sa.Connection,
        name: str,
        questions: Iterable[BetQuestion],
        shares: Mapping[int, Mapping[str, float]],
        moment: float,
    ) -> dict[BetQuestion, BetEvidence]:
        """Bet on the units judged until `moment` and return the evidence for each question.

        `shares` are the weights by epoch. While no unit lacks a metric, the questions about its missing values
        (`Claim.missing`) get no evidence. After an error these bets must be thrown away.
        """
        unique = dict.fromkeys(questions)
        self.tests = {question: self.tests.get(question) or BettingTest(question.claim) for question in unique}
        until = judged_until(self.settings, moment)
        plain = [question for question in unique if question.claim.missing is None]
        self._continue(connection, name, plain, shares, until)
        # While every unit reports, missing values change nothing: most experiments never need these questions.
        complete = {question.metric for question in plain} - self.incomplete_metrics
        self._continue(
            connection, name, [q for q in unique if q not in plain and q.metric not in complete], shares, until
        )
        self.bet_until = {question: at for question, at in self.bet_until.items() if question in unique}
        return {question: self.tests[question].evidence() for question in unique if question in self.bet_until}

    def _continue(
        self,
        connection: sa.Connection,
        name: str,
        questions: Iterable[BetQuestion],
        shares: Mapping[int, Mapping[str, float]],
        until: float,
    ) -> None:
        groups: dict[tuple[str, float], list[BetQuestion]] = {}
        for question in questions:
            groups.setdefault((question.metric, self.bet_until.get(question, -math.inf)), []).append(question)
        for (metric, after), group in groups.items():
            # A clock that is put back takes no unit out again.
            if until > after:
                for page in judged_units(connection, name, self.settings, metric, after, until):
                    if any(unit.value is None for unit in page):
                        self.incomplete_metrics.add(metric)
                    for question in group:
                        _bet(self.tests[question], question, page, shares)
            self.bet_until |= dict.fromkeys(group, max(until, after))


def _bet(
    test: BettingTest, question: BetQuestion, page: list[JudgedUnit], shares: Mapping[int, Mapping[str, float]]
) -> None:
    """Bet on the units of both arms that could have got either.

    Units without a value are among them only if the claim counts them.
    """
    chances: dict[int, float] = {}
    for epoch, weights in shares.items():
        treatment, control = weights.get(question.treatment, 0.0), weights.get(question.control, 0.0)
        if treatment > 0 and control > 0:
            chances[epoch] = treatment / (treatment + control)
    arms = question.treatment, question.control
    counts_missing = question.claim.missing is not None
    units = [u for u in page if (counts_missing or u.value is not None) and u.arm in arms and u.epoch in chances]
    test.add(
        np.array([math.nan if unit.value is None else unit.value for unit in units], float),
        np.array([unit.arm == question.treatment for unit in units], bool),
        np.array([chances[unit.epoch] for unit in units], float),
    )
