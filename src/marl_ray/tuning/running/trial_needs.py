"""The needs of a sweep's trials: the run config of a configuration, and the resources of its trial."""

import itertools
from collections.abc import Iterable, Mapping

from marl_ray.config import RunConfig
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonObject
from marl_ray.tuning.running.capacity import TrialResources, need_of
from marl_ray.tuning.search.spaces import Values

MAX_LISTED_TRIALS = 1000
"""Maximum number of configurations whose needs are compared before a sweep begins or continues."""


class TrialNeeds:
    """Answers what a configuration's trial needs. What was computed or asked before is remembered."""

    def __init__(self, config: SweepConfig):
        self.config = config
        self._needs: dict[str, TrialResources] = {}
        """Resources of a config as JSON -> what a trial with them occupies."""
        self._last_run: tuple[JsonObject, RunConfig] | None = None
        """The last values whose run config was made, and that config."""

    def run_config(self, values: Mapping[str, object]) -> RunConfig:
        """Return the run config of these values with the first seed.

        Checking a config takes a millisecond, so the last one is kept: a trial's is asked for several times in a row.
        """
        if self._last_run is None or self._last_run[0] != values:
            run = self.config.run_config(values, self.config.name, self.config.seeds[0])
            self._last_run = dict(values), run
        return self._last_run[1]

    def need(self, values: Mapping[str, object]) -> TrialResources:
        """Return what a trial with these values occupies.

        Raises MarlRayError naming the key if the cluster can never hold it.
        """
        config = self.run_config(values)
        key = config.resources.model_dump_json()
        if key not in self._needs:
            # Each answer takes several questions to the cluster.
            self._needs[key] = need_of(config)
        return self._needs[key]

    def check(self, values: Mapping[str, object]) -> None:
        """Raise MarlRayError if the cluster can never run this configuration."""
        self.need(values)

    def biggest(self, configurations: Iterable[Values]) -> tuple[TrialResources | None, str]:
        """Return the largest need of these configurations, by CPUs, and why the cluster can never run one of them.

        The need is None if it can run none of them, and the reason is empty if it can run all. Only the first
        MAX_LISTED_TRIALS are compared.
        """
        biggest: TrialResources | None = None
        reason = ""
        for values in itertools.islice(configurations, MAX_LISTED_TRIALS):
            try:
                need = self.need(values)
            except MarlRayError as error:
                reason = str(error)
                continue
            if biggest is None or need.total["CPU"] > biggest.total["CPU"]:
                biggest = need
        return biggest, reason
