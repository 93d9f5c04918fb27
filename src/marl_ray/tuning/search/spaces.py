"""Configurations from a search space: listed, drawn, or suggested by Optuna. No Ray in here."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from marl_ray.config import AlgorithmConfig
from marl_ray.config.sweep import DimensionConfig, SweepConfig, applies, combinations, corners, order
from marl_ray.errors import MarlRayError

Values = dict[str, Any]
"""Dotted key -> value, of one configuration."""
CHECKED = 32
"""Random configurations that are checked before a search begins."""


class Search(Protocol):
    """Where configurations come from. `number` counts them from 0, so that a search can be taken up again."""

    def ask(self, number: int) -> Values | None:
        """The configuration with this number; None when there are no more."""
        ...

    def tell(self, number: int, values: Values, scores: Sequence[float] | None) -> None:
        """How it ended: one score per metric, greater is better; None if it failed."""
        ...


def check_space(config: SweepConfig) -> None:
    """Prove that the space holds nothing but valid run configs; raises MarlRayError naming the first that is not.

    A grid is checked in whole; ranges at their ends, and with random draws. A hyper-parameter that no algorithm of the
    sweep reads is refused too.
    """
    found = combinations(config) if config.search.kind == "grid" else corners(config)
    if config.search.kind != "grid":
        found += [draw(config, number) for number in range(CHECKED)]
    for values in found:
        run = config.run_config(values, config.name, config.seeds[0])
        for metric in config.metric:
            if metric.name.startswith("eval/") and not run.evaluates:
                raise MarlRayError(
                    f"metric: {metric.name} needs evaluations, and the run has none; set run.evaluation.every, "
                    "or give another metric, such as return"
                )
    unread = [config.unread(values) for values in found]
    for key in unread[0]:
        if all(key in keys for keys in unread):
            known = key.rpartition(".")[2] in AlgorithmConfig.model_fields
            problem = f"{key}: no algorithm of this sweep reads it" if known else f"unknown key {key!r}"
            raise MarlRayError(f"sweep {config.name!r}: {problem}")


def draw(config: SweepConfig, number: int, fixed: Mapping[str, Any] | None = None) -> Values:
    """The random configuration with this number, a function of `search.seed` and the number alone; `fixed` values stay."""
    rng = np.random.default_rng((config.search.seed, number))
    given = fixed or {}
    values: Values = {}
    for key in order(config.space):
        dimension = config.space[key]
        value = draw_value(dimension, rng)  # also where it does not apply, so that the other keys stay as they are
        if applies(config, key, values):
            values[key] = given.get(key, value)
    return values


def draw_value(dimension: DimensionConfig, rng: np.random.Generator) -> Any:
    """One value of a dimension."""
    if dimension.values is not None:
        return dimension.values[int(rng.integers(len(dimension.values)))]
    if dimension.int is not None:
        low, high = dimension.int
        return int(rng.integers(low, high + 1))
    if dimension.loguniform is not None:
        log_low, log_high = map(math.log, dimension.loguniform)
        return float(math.exp(rng.uniform(log_low, log_high)))
    assert dimension.uniform is not None
    return float(rng.uniform(*dimension.uniform))


def clip_value(dimension: DimensionConfig, value: float) -> Any:
    """A number brought into a dimension's range."""
    assert dimension.bounds is not None
    low, high = dimension.bounds
    held = min(max(value, low), high)
    return round(held) if dimension.int is not None else float(held)


class GridSearch:
    """Every combination once."""

    def __init__(self, config: SweepConfig):
        self.found = combinations(config)

    def ask(self, number: int) -> Values | None:
        return self.found[number] if number < len(self.found) else None

    def tell(self, number: int, values: Values, scores: Sequence[float] | None) -> None:
        pass


class RandomSearch:
    """Independent draws; every draw is tried with every combination of the `grid` keys."""

    def __init__(self, config: SweepConfig):
        self.config = config
        self.grid = combinations(config, ("grid",))

    def ask(self, number: int) -> Values | None:
        return draw(self.config, number // len(self.grid), self.grid[number % len(self.grid)])

    def tell(self, number: int, values: Values, scores: Sequence[float] | None) -> None:
        pass


class TpeSearch:
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), one objective or several.

    A search that is taken up again is told all that is known, in the order of the numbers; with a seed it then goes on as
    it would have if the same trials had ended before.
    """

    def __init__(self, config: SweepConfig):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.config = config
        sampler = optuna.samplers.TPESampler(
            seed=config.search.seed, n_startup_trials=config.search.startup, constant_liar=True
        )
        self.study = optuna.create_study(directions=["maximize"] * len(config.metric), sampler=sampler)
        self.open: dict[int, Any] = {}

    def ask(self, number: int) -> Values | None:
        trial = self.study.ask()
        values: Values = {}
        for key in order(self.config.space):
            dimension = self.config.space[key]
            if applies(self.config, key, values):
                values[key] = self._suggest(trial, key, dimension)
        self.open[number] = trial
        return values

    def _suggest(self, trial: Any, key: str, dimension: DimensionConfig) -> Any:
        if dimension.choice is not None:
            # By place: a choice may be a list or a mapping, which Optuna does not take.
            return dimension.choice[trial.suggest_categorical(key, list(range(len(dimension.choice))))]
        if dimension.int is not None:
            return trial.suggest_int(key, *dimension.int)
        assert dimension.bounds is not None
        return trial.suggest_float(key, *dimension.bounds, log=dimension.loguniform is not None)

    def tell(self, number: int, values: Values, scores: Sequence[float] | None) -> None:
        import optuna

        state = optuna.trial.TrialState.FAIL if scores is None else optuna.trial.TrialState.COMPLETE
        trial = self.open.pop(number, None)
        if trial is not None:
            self.study.tell(trial, None if scores is None else list(scores), state=state)
        elif scores is not None:
            self.study.add_trial(self._past(values, scores))

    def _past(self, values: Mapping[str, Any], scores: Sequence[float]) -> Any:
        """A trial of an earlier sitting."""
        import optuna

        space = self.config.space
        places = {key: value if (c := space[key].choice) is None else c.index(value) for key, value in values.items()}
        fixed = optuna.trial.FixedTrial(places)
        for key in values:
            self._suggest(fixed, key, space[key])
        return optuna.trial.create_trial(params=fixed.params, distributions=fixed.distributions, values=list(scores))


SEARCHES: dict[str, type[GridSearch] | type[RandomSearch] | type[TpeSearch]] = {
    "grid": GridSearch,
    "random": RandomSearch,
    "tpe": TpeSearch,
}
