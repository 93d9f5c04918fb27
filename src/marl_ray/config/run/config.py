"""The config of one training run."""

from collections.abc import Callable

from pydantic import model_validator

from marl_ray.config.run.checks import (
    algorithms,
    batches,
    data,
    evaluation,
    overlap,
    resources,
    starts,
    team,
    unread_keys,
)
from marl_ray.config.run.keys import RunKeys

CHECKS: tuple[Callable[[RunKeys], None], ...] = (
    team.check,
    unread_keys.check,
    algorithms.check,
    resources.check,
    evaluation.check,
    starts.check,
    data.check,
    overlap.check,
    batches.check,
)
"""Each raises ValueError with one line that names the key. A later one may rely on what an earlier one refuses."""


class RunConfig(RunKeys):
    """One training run: its environment, team, algorithm and resources."""

    @model_validator(mode="after")
    def _check_combination(self) -> "RunConfig":
        for check in CHECKS:
            check(self)
        return self
