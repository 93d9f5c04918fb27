"""The list of properties, each with the algorithms that it applies to and the cases that it is checked in."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from marl_ray.config import spec_of
from marl_ray.conformance.algorithm import learner_access
from marl_ray.conformance.algorithm.comparing import Difference
from marl_ray.conformance.algorithm.constraints import (
    budget_units,
    cost_gradient,
    lands_on_budget,
    moved_costs,
    multiplier_steps,
    multipliers,
    old_costs,
)
from marl_ray.conformance.algorithm.game_run import GridPoint, read_keys
from marl_ray.conformance.algorithm.learning import (
    adaptive_kl,
    divergence_penalty,
    empty_batch,
    entropy_bonus,
    micro_batches,
    no_drift,
    no_drift_of_texts,
    refusals,
    reward_gradient,
    uneven_lengths,
    value_clip,
)


class Property(NamedTuple):
    """A property of algorithms: a line of the report."""

    check: Callable[[str, GridPoint], Difference]
    """Function of an algorithm's name and a case, which returns what differs."""
    applies: Callable[[str], bool]
    """Function that returns True for the names of the algorithms that must have the property."""
    cases: tuple[GridPoint, ...]

    @property
    def name(self) -> str:
        """The property in words: the name of the function that checks it."""
        return self.check.__name__.replace("_", " ")

    @property
    def text(self) -> str:
        """The property in one sentence, which the first line of the check's docstring says after `Check that`."""
        return (self.check.__doc__ or "").partition("\n")[0].removeprefix("Check that ")

    def find_difference(self, algorithm: str) -> Difference:
        """Return the first case in which the property does not hold, and what differs; None if it holds in all."""
        for case in self.cases:
            difference = self.check(algorithm, case)
            if difference:
                return f"{case}: {difference}"
        return None


GRID = tuple(GridPoint(*point) for point in itertools.product((1, 2), (1, 3), (False, True), (True, False)))
LONE_POINT = (GridPoint(),)


def _reads(key: str) -> Callable[[str], bool]:
    return lambda algorithm: key in read_keys(algorithm)


def _has_spec(**expected: object) -> Callable[[str], bool]:
    return lambda algorithm: all(getattr(spec_of(algorithm), key) == value for key, value in expected.items())


def _descends_gradient(algorithm: str) -> bool:
    return bool(spec_of(algorithm).constraint != "trust_region")


def _counts_lengths(algorithm: str) -> bool:
    spec = spec_of(algorithm)
    return bool(spec.needs_whole_episodes and not spec.critic_first)


def _trains_language_models(algorithm: str) -> bool:
    spec = spec_of(algorithm)
    return bool(spec.token_policies and spec.critic != "central")


PROPERTIES = (
    Property(reward_gradient, _descends_gradient, GRID),
    Property(uneven_lengths, _counts_lengths, (GridPoint(1, 1), GridPoint(2, 1))),
    Property(cost_gradient, lambda name: _has_spec(needs_costs=True)(name) and _descends_gradient(name), GRID),
    Property(budget_units, _has_spec(needs_costs=True), GRID),
    Property(moved_costs, _has_spec(needs_costs=True), GRID),
    Property(multipliers, _has_spec(constraint="multiplier"), GRID),
    Property(multiplier_steps, learner_access.every_step, GRID),
    Property(old_costs, _has_spec(constraint="multiplier"), GRID),
    Property(lands_on_budget, _has_spec(constraint="trust_region"), GRID),
    Property(no_drift, lambda name: True, GRID),
    Property(no_drift_of_texts, _trains_language_models, (GridPoint(1, 1), GridPoint(2, 1))),
    Property(value_clip, _reads("value_clip"), (GridPoint(1, 3), GridPoint(2, 1, True, False))),
    Property(empty_batch, lambda name: True, LONE_POINT),
    Property(adaptive_kl, _reads("kl_target"), (GridPoint(1, 3), GridPoint(2, 1))),
    Property(micro_batches, lambda name: True, (GridPoint(1, 3), GridPoint(2, 1, True, False))),
    Property(entropy_bonus, _reads("entropy_coef"), LONE_POINT),
    Property(divergence_penalty, _reads("kl_coef"), LONE_POINT),
    Property(refusals, lambda name: True, LONE_POINT),
)
