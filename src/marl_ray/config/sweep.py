"""The config of a sweep: a run config, the keys that vary, search, scheduler, and seeds."""

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from marl_ray.config.base import NAME_PATTERN, Config, StorageField
from marl_ray.config.load import parse_config, read_yaml, with_overrides
from marl_ray.config.random_streams import Seed
from marl_ray.config.run.checks.unread_keys import drop_unread, hyper_keys, is_hyper, is_read, names_algorithm
from marl_ray.config.run.config import RunConfig
from marl_ray.config.schedulers import FifoSettings, SchedulerConfig
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping, JsonObject

SWEEP_OWNED_KEYS = ("name", "seed", "storage", "tracking")
"""Keys of the run config that the sweep itself sets."""
DIMENSION_KINDS = ("grid", "choice", "uniform", "loguniform", "int")
"""Keys of a dimension, of which exactly one says where its values come from."""
MAX_CONDITION_PICKS = 64
"""Maximum number of combinations of conditions in which one value is tried before a sweep begins."""

MAX_SEARCH_SEED = (1 << 32) - 1
"""Greatest seed of a search: it has 32 bits, as the seeds of NumPy's older generator and of Optuna have."""
MAX_WHOLE_END = (1 << 53) - 1
"""Greatest end of a range of whole numbers. Floats, in which searches and schedulers compute, hold it exactly."""
MAX_END = 1e100
"""Greatest end of a range of numbers. The differences of such ends, and their squares, are finite."""
MAX_SEEDS = 1000
"""Maximum number of seeds of a configuration."""

WholeRangeEnd = Annotated[int, Field(ge=-MAX_WHOLE_END, le=MAX_WHOLE_END)]
WholeBounds = tuple[WholeRangeEnd, WholeRangeEnd]
"""Bounds of a range of whole numbers; in `DimensionConfig` the name `int` is that of a key."""
RangeEnd = Annotated[float, Field(ge=-MAX_END, le=MAX_END)]
PositiveRangeEnd = Annotated[float, Field(gt=0, le=MAX_END)]


class DimensionConfig(Config):
    """One key of the run config and the source of its values; exactly one of the five."""

    grid: tuple[Any, ...] | None = None
    """Every one of these values."""
    choice: tuple[Any, ...] | None = None
    """One of these values."""
    uniform: tuple[RangeEnd, RangeEnd] | None = None
    """A number between low and high."""
    loguniform: tuple[PositiveRangeEnd, PositiveRangeEnd] | None = None
    """A number between low and high, uniform in its logarithm."""
    int: WholeBounds | None = None
    """A whole number from low to high, both included."""
    when: dict[str, tuple[Any, ...]] = {}
    """The key varies only if these keys of the run config have one of these values, as in
    `{algorithm: [grpo, rloo]}`."""

    @model_validator(mode="after")
    def _check_one_source(self) -> "DimensionConfig":
        kinds = [kind for kind in DIMENSION_KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"expected one of {', '.join(DIMENSION_KINDS)}, got {', '.join(kinds) or 'none'}")
        if self.values is not None and not self.values:
            raise ValueError(f"{kinds[0]}: expected at least one value, got none")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"{kinds[0]}: expected low < high, got {list(self.bounds)}")
        for key, values in self.when.items():
            if not values:
                raise ValueError(f"when.{key}: expected at least one value, got none")
        return self

    @property
    def values(self) -> tuple[Any, ...] | None:
        """Values of a dimension that can be listed; None for a range."""
        return self.choice if self.grid is None else self.grid

    @property
    def bounds(self) -> tuple[float, float] | None:
        """(low, high) of a dimension of numbers; None for a list."""
        return self.uniform or self.loguniform or self.int


class SearchConfig(Config):
    """The search: it chooses configurations."""

    kind: Literal["grid", "random", "tpe"] = "grid"
    """`grid`: every combination once. `random`: drawn from the space, for every combination of its `grid` keys. `tpe`:
    Optuna's tree-structured Parzen estimator; with several metrics, towards their Pareto front."""
    seed: int = Field(default=0, ge=0, le=MAX_SEARCH_SEED)
    """Seed of the draws."""
    startup: PositiveInt = 10
    """`tpe`: configurations drawn at random before the estimator is asked."""


class MetricConfig(Config):
    """A metric that compares configurations: the interquartile mean over the seeds of a smoothed metric of the run."""

    name: str = "eval/return"
    """Any metric that a run reports. Those of `eval/` are of whole episodes from fixed starts; a trial is evaluated at its
    end and at every decision point of the scheduler, however often else."""
    mode: Literal["max", "min"] = "max"
    """Direction: the largest or the smallest value is the best."""
    window: PositiveInt = 1
    """Number of last reports that are averaged: reports of iterations, or of evaluations for a metric of `eval/`."""


class BudgetConfig(Config):
    """Bounds of the sweep; a bound that is not given does not exist."""

    hours: PositiveFloat | None = None
    """Hours of wall time, over all times that the sweep runs."""
    trials: PositiveInt | None = None
    """Number of configurations."""
    steps: PositiveInt | None = None
    """Environment steps of all trials and seeds together."""


class SweepConfig(Config):
    """Many runs that differ in some keys."""

    name: str = Field(pattern=NAME_PATTERN)
    """Name of the sweep. The same name under the same storage continues it."""
    run: JsonObject
    """The run config that all trials share: a mapping, or (in a file) the path of a run's YAML file,
    relative to the sweep's."""
    set: JsonObject = {}
    """Dotted keys that are put over `run`, as in `{train.total_steps: 50000}`."""
    space: dict[str, DimensionConfig] = Field(min_length=1)
    """Dotted keys of the run config and their values."""
    search: SearchConfig = SearchConfig()
    scheduler: SchedulerConfig = FifoSettings()
    """Rule by which configurations stop early or copy each other: `kind` is `fifo` (none does), `asha`, `median`, `pbt`,
    `pb2`, or `package.module:NAME` of a scheduler of your own; each kind has keys of its own."""
    seeds: tuple[Seed, ...] = Field(default=(0, 1, 2), min_length=1, max_length=MAX_SEEDS)
    """Seeds of every configuration: a list, or their number. They train side by side and count as one trial."""
    metric: tuple[MetricConfig, ...] = Field(default=(MetricConfig(),), min_length=1)
    """One, or for `search.kind: tpe` several. The scheduler and the choice of the winner see the first."""
    budget: BudgetConfig = BudgetConfig()
    max_concurrent: PositiveInt | None = None
    """Trials at a time; as many as the cluster holds when not given."""
    storage: StorageField = "runs"
    """Folder or URI under which the sweep's folder is made."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: object) -> object:
        """Expand the short forms of the keys.

        `seeds: 3` is 0, 1, 2; one metric needs no list; `search: random` needs no mapping.
        """
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        if isinstance(data.get("seeds"), int) and not isinstance(data["seeds"], bool):
            # one more is enough to be refused
            data["seeds"] = list(range(min(data["seeds"], MAX_SEEDS + 1)))
        if isinstance(data.get("metric"), str):
            data["metric"] = {"name": data["metric"]}
        if isinstance(data.get("metric"), Mapping):
            data["metric"] = [data["metric"]]
        for key in ("search", "scheduler"):
            if isinstance(data.get(key), str):
                data[key] = {"kind": data[key]}
        return data

    @model_validator(mode="after")
    def _check_combination(self) -> "SweepConfig":
        for key in (*self.space, *self.set):
            if key.split(".")[0] in SWEEP_OWNED_KEYS:
                raise ValueError(f"{key!r} is set by the sweep itself" + (": use `seeds`" if key == "seed" else ""))
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: each may be given once")
        kind = self.search.kind
        for key, dimension in self.space.items():
            if kind == "grid" and dimension.values is None:
                raise ValueError(f"space.{key}: a grid search needs `grid` or `choice`; or set search: random")
            if kind == "tpe" and dimension.grid is not None:
                raise ValueError(f"space.{key}: `grid` is gone through, not searched; use `choice` with search: tpe")
        if kind != "grid" and self.budget.trials is None and self.budget.hours is None and self.budget.steps is None:
            raise ValueError(f"budget: search: {kind} never ends by itself; give trials, hours or steps")
        if len(self.metric) > 1 and kind != "tpe":
            raise ValueError("metric: several metrics need search: tpe")
        ordered_keys(self.space)
        self._check_population()
        return self

    def _check_population(self) -> None:
        if not self.scheduler.hands_weights:
            return
        if self.search.kind != "grid" and self.budget.trials is None:
            raise ValueError(f"budget.trials: {self.scheduler.kind} needs it as the size of the population")
        for key, dimension in self.space.items():
            if not is_hyper(key) or dimension.when:
                raise ValueError(
                    f"space.{key}: {self.scheduler.kind} hands weights from trial to trial, "
                    "so only hyper-parameters that all have may vary"
                )
            if key.endswith("hyper.optimizer"):
                raise ValueError(
                    f"space.{key}: {self.scheduler.kind} hands its state from trial to trial, so all have one"
                )
            if self.scheduler.kind == "pb2" and dimension.bounds is None:
                raise ValueError(f"space.{key}: pb2 searches numbers; use uniform, loguniform or int")

    @property
    def base(self) -> JsonObject:
        """Plain data of the run config with `set` on top, before anything varies."""
        data: dict[str, object] = json.loads(json.dumps(self.run))
        for key, value in self.set.items():
            set_value(data, key, value)
        return data

    def with_values(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return plain data of the run config with these values on top; a copy through and through."""
        data = self.base
        for key, value in values.items():
            set_value(data, key, value)
        return data

    def run_config(self, values: Mapping[str, object], name: str, seed: int) -> RunConfig:
        """Return the run config of one trial and seed, without the hyper-parameters that its algorithms do not read.

        Raises MarlRayError naming the values and the key.
        """
        data = self.with_values(values)
        drop_unread(data)
        data |= {"name": name, "seed": seed, "storage": self.storage}
        shown = ", ".join(f"{key}={value}" for key, value in values.items())
        return parse_config(RunConfig, data, source=f"sweep {self.name!r} with {shown or 'no changes'}")

    def unread(self, values: Mapping[str, object]) -> list[str]:
        """Return the hyper-parameters that no algorithm of the trial with these values reads.

        The trial's hyper-parameters are those of the space, of `set` and of `run`.
        """
        data = self.with_values(values)
        keys = dict.fromkeys([*hyper_keys(data), *(key for key in self.space if is_hyper(key))])
        return [key for key in keys if not is_read(key, data)]

    def example(self) -> RunConfig:
        """Return the run config of the space's first values; keys that do not vary are the same in all."""
        return self.run_config(extreme_combinations(self)[0], self.name, self.seeds[0])


def set_value(data: JsonObject, key: str, value: Any) -> None:
    """Set a dotted key to a copy of the value. Raises MarlRayError if a part of the key is a value."""
    *parents, last = key.split(".")
    node = data
    for depth, part in enumerate(parents):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise MarlRayError(f"{key!r}: {'.'.join(parents[: depth + 1])} is a value, not a group of keys")
    node[last] = copy.deepcopy(value)  # a later key may change a part of it, and others hold the value too


def get_value(data: JsonMapping, key: str) -> Any:
    """Return the value of a dotted key, None if there is none."""
    node: Any = data
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def ordered_keys(space: Mapping[str, DimensionConfig]) -> list[str]:
    """Return the keys of the space, each after those that decide whether it applies.

    Those are the keys that its `when` names and, for a hyper-parameter, the algorithm. Raises ValueError if they go
    in a circle.
    """
    ordered: list[str] = []
    pending = list(space)
    algorithms = [key for key in space if names_algorithm(key)]
    while pending:
        next_keys = [
            key
            for key in pending
            if not any(other in pending for other in (*space[key].when, *(algorithms if is_hyper(key) else ())))
        ]
        if not next_keys:
            raise ValueError(f"space: the `when` of {', '.join(pending)} go in a circle")
        ordered.append(next_keys[0])
        pending.remove(next_keys[0])
    return ordered


def applies(config: SweepConfig, key: str, values: Mapping[str, object]) -> bool:
    """Return True if a key of the space varies, given the values chosen so far.

    Its `when` must hold, and an algorithm must read it.
    """
    if not config.space[key].when and not is_hyper(key):
        return True
    data = config.with_values(values)
    holds = all(get_value(data, other) in allowed for other, allowed in config.space[key].when.items())
    return holds and is_read(key, data)


def combinations(config: SweepConfig, kinds: tuple[str, ...] = ("grid", "choice")) -> list[dict[str, object]]:
    """Return every combination of the dimensions of these kinds, in the order of the file.

    Conditions are kept, and none comes twice.
    """
    configurations: list[dict[str, object]] = [{}]
    for key in ordered_keys(config.space):
        dimension = config.space[key]
        values = next((getattr(dimension, kind) for kind in kinds if getattr(dimension, kind) is not None), None)
        if values is None:
            continue
        configurations = [
            combination | addition
            for combination in configurations
            for addition in ([{key: value} for value in values] if applies(config, key, combination) else [{}])
        ]
    unique = {json.dumps(configuration, sort_keys=True): configuration for configuration in configurations}
    return list(unique.values())


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep's YAML file, and the run's file that it or an override `run=FILE` names. Raises MarlRayError."""
    data = read_yaml(path)
    runs = [override for override in overrides if override.startswith("run=")]
    if runs and isinstance(data, dict):
        data = with_run_file(with_overrides(data, runs), Path())
    others = [override for override in overrides if override not in runs]
    return parse_config(SweepConfig, with_run_file(data, Path(path).parent), others, source=str(path))


def read_sweep(path: str | Path) -> object:
    """Return plain data of a sweep's YAML file, with that of the run's file that it names. Raises MarlRayError."""
    return with_run_file(read_yaml(path), Path(path).parent)


def with_run_file(data: object, folder: Path) -> object:
    """Return a sweep's data with those of the run's file that it names; other data as they are.

    The path of the file starts at the folder. Raises MarlRayError naming `run`.
    """
    if not (isinstance(data, Mapping) and isinstance(data.get("run"), str)):
        return data
    try:
        return {**data, "run": read_yaml(folder / data["run"])}
    except MarlRayError as error:
        raise MarlRayError(f"run: {error}") from error


def extreme_combinations(config: SweepConfig) -> list[dict[str, object]]:
    """Return combinations that between them have every listed value and both ends of every range.

    Conditions are kept.
    """
    keys = ordered_keys(config.space)
    ends = {key: config.space[key].values or config.space[key].bounds or () for key in keys}

    def fill(fixed: Mapping[str, object]) -> dict[str, object]:
        values: dict[str, object] = {}
        for key in keys:
            if applies(config, key, values):
                values[key] = fixed.get(key, ends[key][0])
        return values

    def requirements_of(key: str, value: object) -> list[dict[str, object]]:
        conditions = [
            [(other, choice) for choice in choices]
            for other, choices in config.space[key].when.items()
            if other in keys
        ]
        return [
            {key: value} | dict(pick) for pick in itertools.islice(itertools.product(*conditions), MAX_CONDITION_PICKS)
        ]

    filled = [fill(fixed) for key in keys for value in ends[key] for fixed in requirements_of(key, value)]
    unique = {json.dumps(configuration, sort_keys=True): configuration for configuration in filled}
    return list(unique.values())
