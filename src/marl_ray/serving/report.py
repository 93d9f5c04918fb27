"""An experiment as the API shows it: its arms, their outcomes, and what these prove."""

import math
from collections.abc import Mapping
from typing import Any

from marl_ray.experiments.statistics import Interval, Summary, arm_interval, compare
from marl_ray.experiments.store import ArmSummary
from marl_ray.serving.router import Router

_NOTHING = ArmSummary(0, Summary(0, math.nan, 0.0))


def describe(router: Router, summaries: Mapping[str, ArmSummary]) -> dict[str, Any]:
    """JSON of one experiment; `null` stands for what is not known yet."""
    config, table = router.config, router.table
    control = summaries.get(router.control, _NOTHING).outcomes
    arms: dict[str, Any] = {}
    for arm, batcher in router.arms.items():
        summary = summaries.get(arm, _NOTHING)
        outcomes = summary.outcomes
        arms[arm] = {
            "bundle": config.arms[arm].bundle,
            "digest": batcher.bundle.digest,
            "lineage": batcher.bundle.manifest.lineage.model_dump(mode="json"),
            "propensity": table.propensities.get(arm, 0.0),
            "rolled_back": arm in router.state.rolled_back,
            "exposures": summary.exposures,
            "outcomes": outcomes.n,
            "mean": _number(outcomes.mean),
            "variance": _number(outcomes.variance) if outcomes.n > 1 else None,
            "interval": _bounds(arm_interval(outcomes, alpha=config.alpha, min_outcomes=config.min_outcomes)),
        }
        if arm != router.control:
            comparison = compare(
                outcomes,
                control,
                alpha=config.alpha,
                margin=config.margin,
                min_outcomes=config.min_outcomes,
                treatments=len(config.arms) - 1,
            )
            arms[arm]["difference"] = _number(comparison.difference.estimate)
            arms[arm]["difference_interval"] = _bounds(comparison.difference)
            arms[arm]["verdict"] = comparison.verdict.value
    return {
        "name": config.name,
        "created": router.created,
        "status": router.state.status.value,
        "strategy": config.strategy,
        "stage": router.state.stage,
        "epoch": table.epoch,
        "control": router.control,
        "config": config.model_dump(mode="json"),
        "arms": arms,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bounds(interval: Interval) -> list[float] | None:
    return [interval.low, interval.high] if math.isfinite(interval.high - interval.low) else None
