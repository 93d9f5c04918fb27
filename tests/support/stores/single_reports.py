"""Reports about one unit, made as the product makes reports about many."""

from collections.abc import Mapping

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.store.reports import Report
from marl_ray.experiments.store.units import UnitStore


def record_outcome(units: UnitStore, experiment: str, unit: str, value: float, at: float | None = None) -> Assignment:
    """Record a unit's outcome and return its assignment, or raise the report's error."""
    return record_metrics(units, experiment, unit, {"outcome": value}, at)


def record_metrics(
    units: UnitStore, experiment: str, unit: str, values: Mapping[str, float], at: float | None = None
) -> Assignment:
    """Record named numbers of a unit and return its assignment, or raise the report's error."""
    (result,) = units.record(experiment, [Report(unit, values, at)])
    if isinstance(result, MarlRayError):
        raise result
    return result.assignment
