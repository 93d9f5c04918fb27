"""Compares runs: their curves, and the scores of those that differ in their seed alone as one."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from marl_ray.config.load import dotted_keys
from marl_ray.errors import FieldError, MarlRayError, did_you_mean
from marl_ray.evaluation.student_interval import student_interval
from marl_ray.runs.stored import StoredRun
from marl_ray.runs.summary import Score, algorithms_of, published_of, score_of
from marl_ray.training.run_folder.metrics_file import iteration_of

METRICS = ("eval/return", "return")
"""Metrics by which runs are compared unless the user names one: the first that all have."""


@dataclass(frozen=True)
class RunCurve:
    """One run's curve."""

    name: str
    algorithm: str
    seed: int
    metric: str
    points: list[tuple[int, float]]
    """(environment steps, value)."""
    intervals: list[tuple[int, float, float]]
    """(environment steps, low, high) of the points whose 95 % interval is known."""
    score: Score | None
    """None if the run has none."""


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in their seed alone, each seed once."""

    label: str
    """Name of the run, or that of the first one and the number of the others."""
    runs: list[RunCurve]
    score: Score | None
    """That of a single run; of several the mean over seeds, with Student's 95 % interval."""
    differences: Mapping[str, object]
    """Given keys of the config in which the compared groups differ -> this group's value; None where it has the default."""


def group_by_seed(runs: Sequence[StoredRun], metric: str | None = None) -> list[SeedGroup]:
    """Return the curves of runs by a metric, in groups of those that differ in their seed alone.

    By a return the best score is first; by another metric, of which nobody knows if more is better, the groups are as
    they are given. A second run of one seed is a group of its own, because it would count the seed twice.

    Raises MarlRayError for runs of one name, of different environments or without metrics, and a FieldError that names
    `metric` if a run does not have it.
    """
    if len({run.name for run in runs}) < len(runs):
        raise MarlRayError(f"runs: expected different names, got {', '.join(run.name for run in runs)}")
    environments = {run.config["env"]["id"]: run.name for run in runs}
    if len(environments) > 1:
        (first, run_of_first), (other, run_of_other) = list(environments.items())[:2]
        raise MarlRayError(
            f"runs: expected one environment, got {first} of {run_of_first} and {other} of {run_of_other}, whose returns "
            "are different metrics"
        )
    rows = {run.name: [row for row in run.rows() if iteration_of(row) >= 0] for run in runs}
    metric = _shared_metric(rows, metric)
    groups: dict[str, list[RunCurve]] = {}
    overrides: dict[str, Mapping[str, object]] = {}
    repeats: Counter[str] = Counter()
    for run in runs:
        config = {key: value for key, value in run.record["identity"].items() if key not in ("name", "seed", "storage")}
        # A run's identity leaves out its length, because a run may continue.
        key = json.dumps([config, run.config["train"]["total_steps"]], sort_keys=True)
        repeats[seed_key := f"{key} {run.config['seed']}"] += 1
        key = f"{key} {repeats[seed_key]}"
        groups.setdefault(key, []).append(_curve_of(run, rows[run.name], metric))
        overrides.setdefault(key, _overrides_of(run))
    differing_keys = _differing_keys(list(overrides.values()))
    seed_groups = [
        _group_of(curves, {name: overrides[key].get(name) for name in differing_keys}) for key, curves in groups.items()
    ]
    if metric not in METRICS:
        return seed_groups
    return sorted(seed_groups, key=lambda group: -math.inf if group.score is None else group.score.value, reverse=True)


def _overrides_of(run: StoredRun) -> dict[str, object]:
    """Return the given keys by which a run may differ from others."""
    return {
        key: value
        for key, value in dotted_keys(run.record.get("given", {})).items()
        if key not in ("name", "seed", "storage")
    }


def _differing_keys(overrides: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys that do not have one value in all configs."""
    keys = dict.fromkeys(key for given_keys in overrides for key in given_keys)
    return [key for key in keys if any(given_keys.get(key) != overrides[0].get(key) for given_keys in overrides)]


def _shared_metric(rows: Mapping[str, Sequence[Mapping[str, float]]], metric: str | None) -> str:
    """Return the metric, which all runs have. Raises MarlRayError that names the run that lacks it."""
    metrics_of = {name: set().union(*run_rows) - {"iteration", "steps", "timestamp"} for name, run_rows in rows.items()}
    for name, metrics in metrics_of.items():
        if not metrics:
            raise MarlRayError(f"runs: {name} has no metrics yet")
    shared = set.intersection(*metrics_of.values())
    if metric is not None:
        for name, metrics in metrics_of.items():
            if metric not in metrics:
                raise FieldError(
                    "metric", f"{name} has no metric {metric!r}{did_you_mean(metric, _sort_by_use(shared))}"
                )
        return metric
    for candidate in METRICS:
        lacking = [name for name, metrics in metrics_of.items() if candidate not in metrics]
        if not lacking:
            return candidate
        if len(lacking) < len(metrics_of) and candidate == METRICS[0]:
            having = next(name for name in metrics_of if name not in lacking)
            raise FieldError(
                "metric",
                f"{having} is measured by {candidate} and {lacking[0]} is not; expected a metric of both, such as "
                f"{METRICS[1]}",
            )
    raise FieldError(
        "metric", f"expected one that all runs have: {', '.join(_sort_by_use(shared)) or 'they have none in common'}"
    )


def _sort_by_use(metrics: Iterable[str]) -> list[str]:
    """Return the metrics with the returns first, and the shares of time last."""
    return sorted(metrics, key=lambda name: ("return" not in name, name.startswith("time/"), name))


def _curve_of(run: StoredRun, rows: Sequence[Mapping[str, float]], metric: str) -> RunCurve:
    points = [(int(row["steps"]), row[metric]) for row in rows if metric in row]
    ends = f"{metric}_low", f"{metric}_high"
    intervals = [(int(row["steps"]), row[ends[0]], row[ends[1]]) for row in rows if all(end in row for end in ends)]
    score = score_of(published_of(run), rows) if metric in METRICS else None
    if score is None:
        low, high = intervals[-1][1:] if intervals and intervals[-1][0] == points[-1][0] else (None, None)
        score = Score(points[-1][1], low, high, f"last {metric}")
    return RunCurve(run.name, algorithms_of(run.config), run.config["seed"], metric, points, intervals, score)


def _group_of(curves: list[RunCurve], differences: Mapping[str, object]) -> SeedGroup:
    if len(curves) == 1:
        return SeedGroup(curves[0].name, curves, curves[0].score, differences)
    values = [curve.score.value for curve in curves if curve.score is not None]
    score = None
    if len(values) == len(curves):
        score = Score(sum(values) / len(values), *student_interval(values), f"mean over {len(values)} seeds")
    return SeedGroup(f"{curves[0].name} and {len(curves) - 1} more", curves, score, differences)
