"""The three stores of one database: experiments, their units, and the evidence of these.

Rules that the database itself keeps, whatever processes do: a unit has one exposure per experiment, the first, for
good; one outcome at most, and one value of each metric; a rolled-back arm keeps its mark; the audit only grows, in the
transactions of the changes that it tells of.
"""

from collections.abc import Callable
from dataclasses import dataclass

from marl_ray.experiments.database.connections import Database
from marl_ray.experiments.store.evidence import EvidenceStore
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.experiments.store.units import UnitStore


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of one database, for those who need several of them."""

    database: Database
    experiments: ExperimentStore
    units: UnitStore
    evidence: EvidenceStore

    def close(self) -> None:
        """Close the database."""
        self.database.close()


def open_stores(url: str, clock: Callable[[], float] | None = None, *, is_read_only: bool = False) -> Stores:
    """Open a database as `Database` does, and its stores."""
    database = Database(url, clock, is_read_only=is_read_only)
    return Stores(database, ExperimentStore(database), UnitStore(database), EvidenceStore(database))
