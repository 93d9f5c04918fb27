"""The keys of one training run, and what follows from them."""

import fnmatch

from pydantic import Field

from marl_ray.config.base import Config, StorageField
from marl_ray.config.random_streams import Seed
from marl_ray.config.run.algorithms import AlgorithmSpec, spec_of
from marl_ray.config.run.engines import count_engines_in_actors
from marl_ray.config.run.family_defaults import family_defaults
from marl_ray.config.run.hyper import GivenHyper, HyperParameters
from marl_ray.config.run.sections import (
    NAME_FIELD,
    AlgorithmReference,
    CheckpointConfig,
    ConstraintConfig,
    EnvConfig,
    EvaluationConfig,
    PolicyConfig,
    ResourcesConfig,
    TrackingConfig,
    TrainConfig,
    WarmStartConfig,
    agents_of_error,
)
from marl_ray.json_types import JsonObject

DECISIONS_SCHEME = "decisions://"
"""Prefix of the `data` of a run that learns from texts that were served."""
DEFAULT_BRANCH_TURNS = 3
"""Turns after the first that are branched unless `train.branch_turns` says otherwise: a group of an episode of T turns then
plays about T more for each."""


class RunKeys(Config):
    """The keys of a run, each of them valid by itself; a `RunConfig` is checked as a whole."""

    name: str = NAME_FIELD
    """Name of the run. The same name under the same storage resumes it."""
    seed: Seed = 0
    """Seed of the weights, the environments and the sampled actions."""
    algorithm: AlgorithmReference = "mappo"
    """Algorithm of every policy that does not name its own: a name that `marl-ray algorithms` lists, or
    `package.module:NAME` of an `Algorithm` of your own."""
    env: EnvConfig
    team: dict[str, PolicyConfig] = Field(default={"shared": PolicyConfig()}, min_length=1)
    """Policies by name and the agents they play; one policy shared by all agents when not given."""
    hyper: GivenHyper = GivenHyper()
    """Hyper-parameters; a key that is not given has the default of the algorithm, or else of the family of policies.
    The algorithm of some policy must read each given key."""
    constraints: tuple[ConstraintConfig, ...] = ()
    """Budgets of the environment's cost signals."""
    data: str | None = None
    """Language models: learn from this data and play nothing but evaluations. `decisions://FOLDER/EXPERIMENT`: texts
    that were served, as `marl-ray export EXPERIMENT --out FOLDER` wrote them, with the outcomes as rewards; for DPO
    also JSONL, JSON or Parquet lines of `prompt`, `chosen`, `rejected` and, in a team, `agent`."""
    train: TrainConfig = TrainConfig()
    warm_start: WarmStartConfig | None = None
    """Imitate logged decisions before the first iteration."""
    resume_from: str | None = None
    """Begin from another run's checkpoint, with its optimisers, multipliers, normalisers and counters: the name of a run
    under the same storage (its latest checkpoint), or a run's or checkpoint's folder or URI. `train.total_steps` includes
    the steps of that run. Once this run has a checkpoint of its own, it continues from there."""
    resources: ResourcesConfig = ResourcesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageField = "runs"
    """Folder or URI (`s3://...`) under which the run's folder is made."""

    @property
    def trained_policies(self) -> list[str]:
        """Names of the policies that learn."""
        return [name for name, policy in self.team.items() if not policy.frozen]

    @property
    def compares_groups(self) -> bool:
        """True if a policy learns by an algorithm that compares the members of a group."""
        return any(self.spec_of(name).groups for name in self.trained_policies)

    @property
    def branch_turns(self) -> int:
        """Number of turns after the first at which the members of a group answer one prompt."""
        if self.data is not None:
            return 0
        if self.train.branch_turns is not None:
            return self.train.branch_turns
        if self.has_language_models and self.compares_groups:
            return min(DEFAULT_BRANCH_TURNS, self.train.horizon - 1)
        return 0

    @property
    def engine_actors(self) -> int:
        """Number of actors of engines that the run has, of all its policies."""
        return self.resources.engines * count_engines_in_actors(self.team)

    @property
    def env_copies_per_worker(self) -> int:
        """Number of environment copies of one worker; `resources.workers` divides `train.env_copies`."""
        return self.train.env_copies // self.resources.workers

    @property
    def whole_episodes(self) -> bool:
        """True if a batch is one episode per copy, and not a stretch of each copy's play."""
        needed = any(self.spec_of(name).needs_whole_episodes for name in self.trained_policies)
        return self.train.rollout == "episodes" or self.has_language_models or (self.train.rollout == "auto" and needed)

    @property
    def has_language_models(self) -> bool:
        """True if the policies are language models."""
        return all(policy.model is not None for policy in self.team.values())

    @property
    def has_greedy_copies(self) -> bool:
        """True if the first copy of every group plays greedily."""
        return any(self.spec_of(name).greedy for name in self.trained_policies)

    @property
    def cost_signals(self) -> int:
        """Number of cost signals that are gathered; 1 without constraints."""
        return max(1, len(self.constraints))

    @property
    def has_evaluations(self) -> bool:
        """True if scores are of evaluations; else they are of training episodes."""
        return not self.has_language_models if self.evaluation.every is None else self.evaluation.every > 0

    @property
    def evaluation_episodes(self) -> int:
        """Number of starts of an evaluation of actor-critics."""
        return self.evaluation.episodes or (128 if self.constraints else 32)

    @property
    def budgets(self) -> tuple[float, ...]:
        """Budgets, one for each constraint."""
        return tuple(constraint.budget for constraint in self.constraints)

    @property
    def batch_steps(self) -> int:
        """Environment steps of one iteration over all workers, at most where episodes may end early."""
        return self.train.env_copies * self.train.horizon

    def algorithm_of(self, policy: str) -> str:
        """Return the name of a policy's algorithm: its own, or the run's."""
        return self.team[policy].algorithm or self.algorithm

    def spec_of(self, policy: str) -> AlgorithmSpec:
        """Return the spec of a policy's algorithm."""
        return spec_of(self.algorithm_of(policy))

    def hyper_of(self, policy: str) -> HyperParameters:
        """Return the validated hyper-parameters of a policy.

        They are the defaults of its family, overridden by the algorithm's, by those of the run's hyper-parameters that
        the algorithm reads, and by the policy's own.
        """
        spec, policy_config = self.spec_of(policy), self.team[policy]
        return spec.hyper.model_validate(
            {**family_defaults(policy_config.model), **spec.defaults, **self.given_hyper(policy)}
        )

    def given_hyper(self, policy: str) -> JsonObject:
        """Return the hyper-parameters that the user gave and this policy's algorithm reads."""
        reads = self.spec_of(policy).read_keys
        of_run = {key: value for key, value in self.hyper.as_given().items() if key in reads}
        return of_run | self.team[policy].hyper

    def as_given(self) -> JsonObject:
        """Return plain data from which an equal config is made.

        Keys that were not given stay open, so that defaults still apply.
        """
        return self.model_dump(mode="json", exclude_unset=True)

    def resolve(self) -> JsonObject:
        """Return plain data with every default written out.

        Each policy has its algorithm, and the hyper-parameters that this algorithm reads.
        """
        data = self.model_dump(mode="json", exclude={"hyper", "algorithm"})
        for name, policy in data["team"].items():
            policy["algorithm"] = self.algorithm_of(name)
            reads = set() if self.team[name].frozen else set(self.spec_of(name).read_keys)
            policy["hyper"] = self.hyper_of(name).model_dump(mode="json", include=reads)
        return data

    def policy_of(self, agents: list[str]) -> dict[str, str]:
        """Return agent -> policy for the environment's agents; the first pattern that matches wins.

        Raises ValueError if an agent has no policy or a policy no agent.
        """
        table: dict[str, str] = {}
        for agent in agents:
            for name, policy in self.team.items():
                if any(fnmatch.fnmatchcase(agent, pattern) for pattern in policy.agents):
                    table[agent] = name
                    break
            else:
                raise ValueError(f"team: no policy plays agent {agent!r} {agents_of_error(self.team, agents)}")
        for name in self.team:
            if name not in table.values():
                raise ValueError(f"team.{name}: plays no agent {agents_of_error(self.team, agents)}")
        return table
