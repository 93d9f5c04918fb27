"""The records of a sweep: every trial's values, state, cost and files, the trials' rank, and the winner."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marl_ray.config.sweep import MetricConfig, SweepConfig
from marl_ray.json_types import JsonMapping, JsonObject

REPORT_FILE = "report.html"
"""The page of a sweep for people, beside its records."""
FAILED_STATUSES = ("failed", "lost", "refused")
"""Statuses of trials that failed for reasons other than their configuration's worth."""


@dataclass
class TrialRecord:
    """One trial: a configuration with all its seeds."""

    number: int
    values: JsonObject
    """Dotted key -> value, for the keys that vary; after an exploit the new values."""
    state: str = "running"
    """`running` (until the next decision point), `waiting` (at a decision point) or `ended`."""
    status: str = ""
    """Status of an ended trial: `finished`, `stopped`, `failed`, `lost`, `refused` or `interrupted`.

    The scheduler has stopped it (`stopped`); its process died too often (`lost`); the cluster cannot run it (`refused`); or
    the budget ended it (`interrupted`), and it continues when the budget is raised.
    """
    error: str = ""
    """One line that says why the trial failed, was lost or was refused."""
    legs: int = 0
    """Number of legs that have begun."""
    scores: dict[int, float] = field(default_factory=dict)
    """Decision point -> score, greater is better."""
    history: dict[int, JsonObject] = field(default_factory=dict)
    """Decision point of an exploit -> the values before it."""
    exploits: list[JsonObject] = field(default_factory=list)
    """One mapping per takeover, with `at`, `donor` and `values`."""
    objectives: list[float] | None = None
    """The metrics at the end, in their own sign: interquartile means over the seeds, smoothed."""
    steps: int = 0
    """Environment steps that every seed has played."""
    played: int = 0
    """Environment steps paid for, all seeds together."""
    seconds: float = 0.0
    """Wall time in seconds."""
    cpus: float = 0.0
    """CPUs that the trial occupies; `seconds * cpus` is its cost."""
    gpus: float = 0.0
    """GPUs that the trial occupies."""
    configs: list[JsonObject] = field(default_factory=list)
    """The run config of each seed, as a user would write it; `marl-ray train` takes one as a file."""
    unread: list[str] = field(default_factory=list)
    """Hyper-parameters of the sweep that the trial did not get, because its algorithms do not read them."""
    mlflow_run_id: str = ""


@dataclass
class SweepRecords:
    """The records of a whole sweep."""

    name: str
    config: JsonObject
    """The sweep's config, resolved."""
    identity: JsonObject
    """The part of the config that must be equal to continue the sweep."""
    status: str = "running"
    """`running` (also if its driver was killed), `finished`, `interrupted` (by the budget or a person) or `failed`."""
    error: str = ""
    seconds: float = 0.0
    """Wall time in seconds, over all times that the sweep ran."""
    mlflow_run_id: str = ""
    winner: int | None = None
    """Number of the winner's trial; None while there is none."""
    winner_seed: int | None = None
    """Seed of the winner's registered bundle: the seed with the median score, so never just the lucky one."""
    winner_model: str = ""
    """Name of the registered model version: `models:/name/version`."""
    changes: int = 0
    """Number of times that the records have been written."""
    trials: list[TrialRecord] = field(default_factory=list)

    @property
    def played(self) -> int:
        """Environment steps that all trials have played."""
        return sum(record.played for record in self.trials)


def identity_of(config: SweepConfig) -> JsonObject:
    """Return the part of the config that may not change when a sweep is continued."""
    data = config.resolve()
    return {key: value for key, value in data.items() if key not in ("budget", "max_concurrent", "storage")}


def signed_objectives(metrics: Sequence[MetricConfig], objectives: Sequence[float] | None) -> list[float] | None:
    """Return the objectives as scores, for which greater is better; None without objectives."""
    if objectives is None:
        return None
    return [value if m.mode == "max" else -value for m, value in zip(metrics, objectives, strict=True)]


def ranked_trials(records: SweepRecords, metrics: Sequence[MetricConfig]) -> list[TrialRecord]:
    """Return the trials that have a result, in their rank.

    The finished ones come first, by their first metric, then the others by the steps that they reached.
    """
    scored = [
        record for record in records.trials if record.objectives is not None and record.status not in FAILED_STATUSES
    ]

    def merit(record: TrialRecord) -> tuple[bool, int, float]:
        scores = signed_objectives(metrics, record.objectives)
        value = -math.inf if scores is None else scores[0]
        finished = record.status == "finished"
        return finished, 0 if finished else record.steps, value

    return sorted(scored, key=merit, reverse=True)


def end_reason(record: TrialRecord, records: SweepRecords) -> str:
    """Return the reason why a trial did not train to its end; empty if it did, or has not ended."""
    if record.status == "stopped" and record.scores:
        at = max(record.scores)
        scores = [other.scores[at] for other in records.trials if at in other.scores]
        place = 1 + sum(score > record.scores[at] for score in scores)
        return f"{records.config['scheduler']['kind']}: place {place} of {len(scores)} at {at:,} steps"
    if record.status == "interrupted":
        return "the sweep's budget was used up"
    return record.error


def median_seed(rows: Sequence[Mapping[str, float]], seeds: Sequence[int], metric: MetricConfig) -> int:
    """Return the seed whose last value is the median of all seeds (the lower one of two); one without a value is worst."""
    last: dict[int, float] = {}
    for row in rows:
        last |= {seed: row[f"seed-{seed}/{metric.name}"] for seed in seeds if f"seed-{seed}/{metric.name}" in row}
    sign = 1 if metric.mode == "max" else -1
    ranked_seeds = sorted(seeds, key=lambda seed: sign * last[seed] if seed in last else -math.inf)
    return ranked_seeds[(len(ranked_seeds) - 1) // 2]


def values_line(values: JsonMapping) -> str:
    """Return a configuration in one line."""
    return " ".join(
        f"{key.removeprefix('hyper.')}={value:.4g}"
        if isinstance(value, float)
        else f"{key.removeprefix('hyper.')}={value}"
        for key, value in values.items()
    )
