"""Messages between replicas through the database: changes for a webhook, and bundles to load ahead.

The audit log is the webhook's queue: an entry is due until it has been delivered. A replica claims an entry for a while
before it sends it, so one replica sends at a time; if that replica dies, its claim runs out and another takes over.
"""

from collections.abc import Collection

import sqlalchemy as sa

from marl_ray.experiments.database import schema
from marl_ray.experiments.database.connections import Database
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.store.records import AuditEntry

NOTIFIED_ACTIONS = (Action.ROLLBACK, Action.PROMOTE, Action.NEXT_STAGE)
"""Changes that a webhook hears of: those that a gateway makes by itself, whoever made this one."""
MAX_DUE_CHANGES = 100
"""Maximum number of changes that one question returns, so that a long outage of the webhook fills no memory."""


class Notices:
    """Access to the notices, safe from several threads, processes and machines.

    Every method may raise StoreError.
    """

    def __init__(self, database: Database):
        self._database = database

    def due_changes(self, experiments: Collection[str], since: float, now: float) -> list[tuple[AuditEntry, int]]:
        """Return the due changes that nobody has claimed, the oldest first, each with its number of attempts.

        The changes are of these experiments after `since` (seconds since 1970), at most `MAX_DUE_CHANGES` of them.
        """
        audit, notices = schema.audit, schema.notices.c
        query = (
            sa.select(audit, sa.func.coalesce(notices.attempts, 0))
            .outerjoin(schema.notices, notices.audit_id == audit.c.id)
            .where(audit.c.at > since, audit.c.action.in_([action.value for action in NOTIFIED_ACTIONS]))
            .where(audit.c.experiment.in_(list(experiments)))
            .where(sa.or_(notices.audit_id.is_(None), sa.and_(notices.delivered_at.is_(None), notices.next_at <= now)))
            .order_by(audit.c.id)
            .limit(MAX_DUE_CHANGES)
        )
        with self._database.transaction() as connection:
            rows = connection.execute(query).all()
        return [(AuditEntry(*row[:-1]), row[-1]) for row in rows]

    def claim(self, entry: int, now: float, until: float) -> bool:
        """Claim an audit entry until `until` (seconds since 1970).

        Returns True if the caller has the claim and must deliver the entry, False if another replica has it.
        """
        notices = schema.notices.c
        insert = self._database.insert(schema.notices).values(audit_id=entry, attempts=1, next_at=until)
        again = {"attempts": notices.attempts + 1, "next_at": until}
        free = sa.and_(notices.delivered_at.is_(None), notices.next_at <= now)
        with self._database.write_transaction() as connection:
            claims = insert.on_conflict_do_update(index_elements=["audit_id"], set_=again, where=free)
            return connection.execute(claims.returning(notices.audit_id)).first() is not None

    def note_delivery(self, entry: int, *, delivered_at: float | None, next_at: float) -> None:
        """Record a delivery (`delivered_at`), or that the entry is due again at `next_at`.

        Both are in seconds since 1970.
        """
        notices = schema.notices.c
        values = {"delivered_at": delivered_at, "next_at": next_at}
        with self._database.write_transaction() as connection:
            connection.execute(sa.update(schema.notices).where(notices.audit_id == entry).values(values))

    def preload(self, reference: str, now: float) -> None:
        """Ask all replicas to load a bundle ahead of its experiment."""
        insert = self._database.insert(schema.preloads).values(reference=reference, at=now)
        with self._database.write_transaction() as connection:
            connection.execute(insert.on_conflict_do_update(index_elements=["reference"], set_={"at": now}))

    def preloads(self, since: float) -> list[str]:
        """Return the references of the bundles that were asked for after `since`, the oldest first.

        `since` is in seconds since 1970.
        """
        preloads = schema.preloads.c
        query = sa.select(preloads.reference).where(preloads.at > since).order_by(preloads.at)
        with self._database.transaction() as connection:
            return list(connection.execute(query).scalars())
