"""Search spaces, whose configurations are listed, drawn at random, or suggested by Optuna."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from typing_extensions import override

from marl_ray.config import HyperParameters
from marl_ray.config.sweep import (
    DimensionConfig,
    SweepConfig,
    applies,
    combinations,
    extreme_combinations,
    ordered_keys,
)
from marl_ray.errors import MarlRayError, did_you_mean
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.tuning.search.metric_names import check_metrics

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

Values = JsonObject
"""Dotted key -> value: one configuration."""
CHECKED_CONFIGURATIONS = 32
"""Number of random configurations that are checked before a search begins."""


class Search(Protocol):
    """A source of configurations. `number` counts them from 0, so that a search can be continued."""

    is_adaptive: ClassVar[bool]
    """True if a configuration depends on what was proposed and told before; else it is a function of its number alone."""

    def propose(self, number: int) -> Values | None:
        """Return the configuration with this number; None if there are no more."""
        ...

    def take_up(self, number: int, values: Values) -> None:
        """Learn of a configuration that was proposed before the search was continued, and has no result yet."""
        ...

    def tell(self, number: int, values: Values, scores: Sequence[float] | None) -> None:
        """Learn the result of a configuration.

        `scores` are one score per metric, of which greater is better; None for a configuration that failed.
        """
        ...


def check_space(config: SweepConfig) -> None:
    """Check that every run config in the space is valid. Raises MarlRayError naming the first that is not.

    A grid is checked completely; ranges are checked at their ends and with random draws. A hyper-parameter that no
    algorithm of the sweep reads is refused too.
    """
    samples = combinations(config) if config.search.kind == "grid" else extreme_combinations(config)
    if config.search.kind != "grid":
        samples += [draw(config, number) for number in range(CHECKED_CONFIGURATIONS)]
    for values in samples:
        run = config.run_config(values, config.name, config.seeds[0])
        if run.resume_from is not None:
            raise MarlRayError("run.resume_from: every trial of a sweep begins anew; expected a run without it")
        check_metrics(config, run)
    unread = [config.unread(values) for values in samples]
    for key in unread[0]:
        if all(key in keys for keys in unread):
            is_hyper = key.rpartition(".")[2] in HyperParameters.model_fields
            hyper_keys = [f"{key.rpartition('.')[0]}.{name}" for name in HyperParameters.model_fields]
            mistake = f"unknown key {key!r}{did_you_mean(key, hyper_keys)}"
            mistake = f"{key}: no algorithm of this sweep reads it" if is_hyper else mistake
            raise MarlRayError(f"sweep {config.name!r}: {mistake}")


def draw(config: SweepConfig, number: int, fixed: JsonMapping | None = None) -> Values:
    """Return the random configuration with this number; `fixed` values stay.

    The configuration is a function of `search.seed` and the number alone.
    """
    rng = np.random.default_rng((config.search.seed, number))
    fixed = fixed or {}
    values: Values = {}
    for key in ordered_keys(config.space):
        dimension = config.space[key]
        # drawn even if the key does not apply, so that the draws of the other keys do not change
        value = draw_value(dimension, rng)
        if applies(config, key, values):
            values[key] = fixed.get(key, value)
    return values


def draw_value(dimension: DimensionConfig, rng: np.random.Generator) -> Any:
    """Return one value of a dimension."""
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
    """Return a number moved into a dimension's range."""
    assert dimension.bounds is not None
    low, high = dimension.bounds
    clipped = min(max(value, low), high)
    return round(clipped) if dimension.int is not None else float(clipped)


class GridSearch(Search):
    """Every combination once."""

    is_adaptive = False

    def __init__(self, config: SweepConfig):
        self.listed = combinations(config)

    @override
    def propose(self, number: int) -> Values | None:
        return self.listed[number] if number < len(self.listed) else None

    @override
    def take_up(self, number: int, values: Values) -> None:
        pass

    @override
    def tell(self, number: int, values: Values, scores: Sequence[float] | None) -> None:
        pass


class RandomSearch(Search):
    """Independent draws; every draw is tried with every combination of the `grid` keys."""

    is_adaptive = False

    def __init__(self, config: SweepConfig):
        self.config = config
        self.grid = combinations(config, ("grid",))

    @override
    def propose(self, number: int) -> Values | None:
        return draw(self.config, number // len(self.grid), self.grid[number % len(self.grid)])

    @override
    def take_up(self, number: int, values: Values) -> None:
        pass

    @override
    def tell(self, number: int, values: Values, scores: Sequence[float] | None) -> None:
        pass


class TpeSearch(Search):
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), one objective or several.

    A configuration depends on `search.seed`, on its number, and on the configurations before it with the results that are
    known. So a search that is continued, which learns these in the order of the trials' numbers, suggests what it would have
    suggested if it had not ended.
    """

    is_adaptive = True

    def __init__(self, config: SweepConfig):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.config = config
        self.study = optuna.create_study(directions=["maximize"] * len(config.metric))
        self.open: dict[int, Any] = {}
        """Number of a configuration without a result -> Optuna's trial, or its number."""

    @override
    def propose(self, number: int) -> Values | None:
        self.study.sampler = self._sampler(number)
        trial = self.study.ask()
        values: Values = {}
        for key in ordered_keys(self.config.space):
            dimension = self.config.space[key]
            if applies(self.config, key, values):
                values[key] = self._suggest(trial, key, dimension)
        self.open[number] = trial
        return values

    def _sampler(self, number: int) -> "BaseSampler":
        """Return the sampler of one configuration, whose draws continue no earlier ones."""
        import optuna

        search = self.config.search
        seed = int(np.random.SeedSequence((search.seed, number)).generate_state(1)[0])
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=search.startup, constant_liar=True)

    def _suggest(self, trial: Any, key: str, dimension: DimensionConfig) -> Any:
        if dimension.choice is not None:
            # Optuna gets the index: a choice may be a list or a mapping, which Optuna does not take.
            return dimension.choice[trial.suggest_categorical(key, list(range(len(dimension.choice))))]
        if dimension.int is not None:
            return trial.suggest_int(key, *dimension.int)
        assert dimension.bounds is not None
        return trial.suggest_float(key, *dimension.bounds, log=dimension.loguniform is not None)

    @override
    def take_up(self, number: int, values: Values) -> None:
        self.study.add_trial(self._earlier_trial(values, None))
        self.open[number] = self.study.get_trials(deepcopy=False)[-1].number

    @override
    def tell(self, number: int, values: Values, scores: Sequence[float] | None) -> None:
        import optuna

        state = optuna.trial.TrialState.FAIL if scores is None else optuna.trial.TrialState.COMPLETE
        trial = self.open.pop(number, None)
        if trial is not None:
            self.study.tell(trial, None if scores is None else list(scores), state=state)
        elif scores is not None:
            self.study.add_trial(self._earlier_trial(values, scores))

    def _earlier_trial(self, values: JsonMapping, scores: Sequence[float] | None) -> Any:
        """Return a trial of an earlier run of the sweep; without scores one that still runs."""
        import optuna

        space = self.config.space
        places = {key: value if (c := space[key].choice) is None else c.index(value) for key, value in values.items()}
        fixed = optuna.trial.FixedTrial(places)
        for key in values:
            self._suggest(fixed, key, space[key])
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING if scores is None else optuna.trial.TrialState.COMPLETE,
            params=fixed.params,
            distributions=fixed.distributions,
            values=None if scores is None else list(scores),
        )


SEARCHES: dict[str, type[GridSearch] | type[RandomSearch] | type[TpeSearch]] = {
    "grid": GridSearch,
    "random": RandomSearch,
    "tpe": TpeSearch,
}
"""Value of `search.kind` -> the class that searches."""
