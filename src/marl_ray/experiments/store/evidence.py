"""The store that adds up an experiment's units, as evidence for decisions and charts."""

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace

import sqlalchemy as sa

from marl_ray.experiments.database import schema
from marl_ray.experiments.database.connections import Database
from marl_ray.experiments.designs.analysis import Units
from marl_ray.experiments.evidence.judged_units import BetQuestion, Bets, all_judged, judged_until
from marl_ray.experiments.evidence.looks import ArmSummary, Look, look_at
from marl_ray.experiments.evidence.running_sums import LookSettings, RunningSums
from marl_ray.experiments.evidence.series import Series, series
from marl_ray.experiments.lifecycle import ExperimentRecord, plan_of
from marl_ray.experiments.statistics.bets import BetEvidence
from marl_ray.experiments.store.records import look_settings, read_experiment
from marl_ray.experiments.store.rules import barred_reason


class EvidenceStore:
    """Sums over the units of experiments.

    One object keeps sums and bets between looks, so that a look reads new rows alone. Every method may raise
    StoreError.
    """

    def __init__(self, database: Database):
        self._database = database
        self._sums: dict[str, tuple[RunningSums, Look | None]] = {}
        self._bets: dict[str, Bets] = {}
        self._locks: dict[str, threading.Lock] = {}

    def look(self, record: ExperimentRecord, now: float | None = None, questions: Collection[BetQuestion] = ()) -> Look:
        """Return the sums over the experiment's units at a moment, and what the questions' tests prove.

        The moment is in seconds since 1970, and now if not given; the questions are answered by betting tests. The first
        look of a process reads every row, a later one those written since, and the units whose windows have ended since.
        """
        name, moment = record.name, self._database.settled_at() if now is None else now
        settings = look_settings(record.config)
        with self._locks.setdefault(name, threading.Lock()):
            sums, last = self._sums.get(name, (RunningSums(settings), None))
            if sums.settings != settings:
                sums, last = RunningSums(settings), None
            with self._database.snapshot() as connection:
                totals, news = sums.read(connection, name, moment)
                shares = self._shares(connection, record)
                proven = self._bet(connection, record, settings, questions, moment) if questions else {}
                barred = barred_reason(connection, record)
            # Blocks end although no row is new.
            if news or last is None or settings.randomize == "switchback":
                last = look_at(totals, settings, moment)
            self._sums[name] = sums, last
        return replace(last, shares=shares, bets=proven, barred=barred)

    def _bet(
        self,
        connection: sa.Connection,
        record: ExperimentRecord,
        settings: LookSettings,
        questions: Collection[BetQuestion],
        moment: float,
    ) -> dict[BetQuestion, BetEvidence]:
        """Continue the bets of the last look. After an error they begin anew."""
        bets = self._bets.pop(record.name, None)
        if bets is None or bets.settings != settings:
            bets = Bets(settings)
        proven = bets.read(connection, record.name, questions, self._shares(connection, record, 0), moment)
        self._bets[record.name] = bets
        return proven

    def next_judged(self, record: ExperimentRecord) -> float | None:
        """Return the moment at which the next unit of the experiment is judged.

        The moment is in seconds since 1970, by the database's clock; None if no stored unit is within its window.
        """
        settings, moment, units = look_settings(record.config), self._database.settled_at(), schema.exposures.c
        after = judged_until(settings, moment)
        first = sa.select(sa.func.min(units.stored_at)).where(units.experiment == record.name, units.stored_at > after)
        with self._database.transaction() as connection:
            stored_at = connection.execute(first).scalar()
        return None if stored_at is None else moment + float(stored_at) - after

    def judged_units(self, record: ExperimentRecord, metrics: Collection[str]) -> Units:
        """Return every unit whose window is over, with its metrics, as an analysis takes them.

        A metric may be `outcome`. Reads all rows.
        """
        settings, moment = look_settings(record.config), self._database.settled_at()
        with self._database.snapshot() as connection:
            return all_judged(connection, record.name, settings, metrics, moment)

    def arrivals(self, name: str, since: float) -> dict[str, int]:
        """Return arm -> units that have met it since a moment (seconds since 1970)."""
        units = schema.exposures.c
        query = sa.select(units.arm, sa.func.count().label("units")).where(units.experiment == name)
        with self._database.transaction() as connection:
            return {
                row.arm: row.units
                for row in connection.execute(query.where(units.stored_at > since).group_by(units.arm))
            }

    def _shares(
        self, connection: sa.Connection, record: ExperimentRecord, since: int | None = None
    ) -> dict[int, Mapping[str, float]]:
        """Return epoch -> its weights, which the audit holds, from the epoch `since` on.

        Without `since` they are those of the record's stage.
        """
        audit, first = schema.audit.c, record.state.stage_epoch if since is None else since
        query = sa.select(audit.epoch, audit.after).where(audit.experiment == record.name).order_by(audit.id)
        rows = connection.execute(query.where(audit.epoch >= first))
        # An audit that begins with a migration has no weights there; they were those of the config.
        return {row.epoch: row.after.get("weights") or plan_of(row.after["config"]).weights for row in rows}

    def summary(self, name: str) -> dict[str, ArmSummary]:
        """Return arm -> exposures and outcomes, of the arms that have any."""
        with self._database.transaction() as connection:
            record = read_experiment(connection, name)
        return {} if record is None else dict(self.look(record).units)

    def series(self, name: str, points: int = 60, now: float | None = None) -> Series:
        """Return the outcomes added up over time (see `series.series`).

        Reads every outcome: for drawing, not for polling.
        """
        with self._database.transaction() as connection:
            record = read_experiment(connection, name)
        if record is None:
            return {}
        moment = self._database.settled_at() if now is None else now
        with self._database.transaction() as connection:
            return series(connection, name, look_settings(record.config), points, moment)
