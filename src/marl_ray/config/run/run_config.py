"""The config of one training run."""

import fnmatch
from typing import Any

from pydantic import Field, ValidationError, model_validator

from marl_ray.config.base import Config, words
from marl_ray.config.random_streams import Seed
from marl_ray.config.run.algorithms import ADAM, READ_WITH, Spec, check_key_is_read, spec_of
from marl_ray.config.run.engines import check_engines, run_in_actors
from marl_ray.config.run.family_defaults import family_defaults
from marl_ray.config.run.hyper import AlgorithmConfig, GivenHyper
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

DECISIONS = "decisions://"
"""Prefix of the `data` of a run that learns from texts that were served."""
DEFAULT_BRANCH_TURNS = 3
"""Turns after the first that are branched unless `train.branch_turns` says otherwise: a group of an episode of T turns then
plays about T more for each."""


class RunConfig(Config):
    """One training run: its environment, team, algorithm and resources."""

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
    the steps of that run. Once this run has a checkpoint of its own, it goes on from there."""
    resources: ResourcesConfig = ResourcesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: str = "runs"
    """Folder or URI (`s3://...`) under which the run's folder is made."""

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        train, workers = self.train, self.resources.workers
        if train.env_copies % workers:
            raise ValueError(f"train.env_copies={train.env_copies} must be a multiple of resources.workers={workers}")
        if all(policy.frozen for policy in self.team.values()):
            raise ValueError("team: every policy is frozen, so there is nothing to train")
        self._check_keys()
        for name in self.team:
            try:
                hyper = self.hyper_of(name)
            except ValidationError as error:
                first = error.errors()[0]
                of_policy = first["loc"] and first["loc"][0] in self.team[name].hyper
                key = ".".join([*(["team", name] if of_policy else []), "hyper", *map(str, first["loc"])])
                raise ValueError(f"{key}: {words(first)}") from error
            if not self.team[name].frozen:  # which has no algorithm
                self._check_policy(name, hyper)
        self._check_models()
        check_engines(self.team, self.resources)
        self._check_data()
        self._check_overlap()
        if self.resume_from is not None and self.warm_start is not None:
            raise ValueError("warm_start: expected no resume_from beside it; such a run begins with trained weights")
        if self.resources.hourly_price is not None and not self.evaluation.benchmarks:
            raise ValueError("resources.hourly_price: expected evaluation.benchmarks, without which nothing reads it")
        if train.group_size > 1 and self.env_copies_per_worker % train.group_size:
            raise ValueError(
                f"train.group_size={train.group_size} must divide the copies of a worker "
                f"(train.env_copies / resources.workers = {self.env_copies_per_worker})"
            )
        return self

    def _check_overlap(self) -> None:
        """Refuse `train.overlap` where the loss has no ratio to the recorded probabilities of single decisions."""
        if not self.train.overlap:
            return
        if self.language or self.whole_episodes:
            raise ValueError("train.overlap: expected actor-critics and train.rollout=steps")
        for name in self._trained:
            spec = self.spec_of(name)
            if spec.recompute or spec.constraint == "trust_region" or spec.order == "sequential":
                raise ValueError(
                    f"train.overlap: {self.algorithm_of(name)} learns from the newest weights' own batch alone; expected an "
                    "algorithm such as ppo, ippo or mappo"
                )
            if self._given_to(name).get("importance_cap") is not None:
                raise ValueError(
                    f"train.overlap: importance_cap of policy {name!r} has no effect: the loss's own ratio is to the policy "
                    "that played, and `clip` bounds it"
                )

    def _check_keys(self) -> None:
        """Refuse hyper-parameters that no algorithm reads."""
        for key in self.hyper.as_given():
            check_key_is_read(
                f"hyper.{key}", key, {self.algorithm_of(name): self.spec_of(name) for name in self._trained}
            )
        for name, policy in self.team.items():
            for key in policy.hyper:
                if policy.frozen:
                    raise ValueError(f"team.{name}.hyper.{key}: a frozen policy has no hyper-parameters")
                check_key_is_read(f"team.{name}.hyper.{key}", key, {self.algorithm_of(name): self.spec_of(name)})

    def _check_models(self) -> None:
        plain = [name for name, policy in self.team.items() if policy.model is None]
        if plain and len(plain) < len(self.team):
            raise ValueError(f"team.{plain[0]}.model: expected a language model, as the other policies are")
        groups = self.resources.replicate
        if plain and groups > 1:
            raise ValueError(f"resources.parallel: {groups} groups of workers, expected language models")
        for key in ("tensor", "context"):
            if plain and (number := getattr(self.resources, key)) > 1:
                raise ValueError(f"resources.parallel.{key}={number}: expected language models")
        for name, policy in self.team.items():
            if self.resources.tensor > 1 and policy.model is not None and policy.model.lora is not None:
                raise ValueError(
                    f"team.{name}.model.lora: expected no adapters with resources.parallel.tensor={self.resources.tensor}, "
                    "which divides layers"
                )
            if groups > 1 and policy.model is not None and policy.model.cpu_offload:
                raise ValueError(
                    f"team.{name}.model.cpu_offload: expected one group of workers, got {groups} by resources.parallel; "
                    "shares of all workers take less of each GPU"
                )
        if self.train.branch_turns and (plain or not self._compares_groups):
            raise ValueError(
                f"train.branch_turns={self.train.branch_turns}: expected a language model whose algorithm compares groups"
            )
        if (self.train.branch_turns or 0) >= self.train.horizon:
            raise ValueError(
                f"train.branch_turns={self.train.branch_turns} must be below train.horizon={self.train.horizon}, the turns "
                "of an episode"
            )
        if plain:
            if not self.train.total_steps:
                raise ValueError("train.total_steps: expected 1 or more; 0 is for supervised fine-tuning")
            if self.train.curriculum:
                raise ValueError("train.curriculum: expected a text environment and language models")
            self._check_unread(("tasks", "samples", "benchmarks"), "a text environment and language models")
            return
        self._check_unread(("episodes", "max_steps"), "actor-critics; text environments have `tasks` and `samples`")
        if not self.train.total_steps and self.warm_start is None:
            raise ValueError("train.total_steps=0: expected `warm_start`, there is nothing else to do")
        if self.train.rollout == "steps":
            raise ValueError("train.rollout=steps: language models play whole episodes")
        for name in self.team:
            spec = self.spec_of(name)
            if not self.team[name].frozen and not (spec.token_policies and spec.critic != "central"):
                raise ValueError(
                    f"team.{name}: {self.algorithm_of(name)} trains actor-critics, not language models; "
                    "`marl-ray algorithms` says which do both"
                )

    def _check_data(self) -> None:
        """Refuse keys that do not go with `data`, or that do not go without it."""
        specs = {name: self.spec_of(name) for name in self._trained}
        if self.data is None:
            for name, spec in specs.items():
                if spec.pairs:
                    raise ValueError(f"data: {self.algorithm_of(name)} of policy {name!r} needs preferred pairs")
            return
        if not self.language:
            raise ValueError("data: expected language models; `warm_start.data` imitates decisions of actor-critics")
        defaults = TrainConfig()
        for key in ("group_size", "branch_turns", "curriculum"):
            if getattr(self.train, key) != getattr(defaults, key):
                raise ValueError(f"train.{key}: nothing reads it with `data`, as nothing is played but evaluations")
        for name, spec in specs.items():
            algorithm = self.algorithm_of(name)
            if spec.critic != "none" or spec.greedy:
                raise ValueError(
                    f"data: {algorithm} of policy {name!r} needs {', '.join(spec.needs)}, which were not logged; expected "
                    "an algorithm that needs whole episodes or groups alone"
                )
            if "dynamic_sampling" in self._given_to(name):
                raise ValueError(f"dynamic_sampling of policy {name!r}: nothing is played again with `data`")
            if self._given_to(name).get("importance_cap") is not None:
                raise ValueError(
                    f"importance_cap of policy {name!r}: the loss's own ratio is to what was served, and `clip` bounds it"
                )
            if not spec.pairs and not self.data.startswith(DECISIONS):
                raise ValueError(
                    f"data: {self.data!r}, expected {DECISIONS}FOLDER/EXPERIMENT; {algorithm} of policy {name!r} does not "
                    "learn from a file of preferred pairs"
                )

    def _check_unread(self, keys: tuple[str, ...], readers: str) -> None:
        """Refuse keys of `evaluation` that this family of policies does not read."""
        defaults = EvaluationConfig()
        for key in keys:
            if getattr(self.evaluation, key) != getattr(defaults, key):
                raise ValueError(f"evaluation.{key}: expected {readers}")

    def _check_policy(self, name: str, hyper: AlgorithmConfig) -> None:
        spec, train = self.spec_of(name), self.train
        algorithm = self.algorithm_of(name)
        parts, key_of_limit = (
            (train.env_copies, "train.env_copies") if self.whole_episodes else (train.horizon, "train.horizon")
        )
        user_keys, fields = self._given_to(name), type(hyper).model_fields
        for key in ADAM if hyper.optimizer != "adamw" else ():
            if key in user_keys:
                raise ValueError(f"{key} of policy {name!r}: expected optimizer=adamw, got {hyper.optimizer}")
        for key, part in READ_WITH.items():
            if key in user_keys and user_keys[key] != fields[key].default and not getattr(hyper, part):
                raise ValueError(f"{key} of policy {name!r}: expected {part} beside it, without which nothing reads it")
        if hyper.minibatches > parts:
            raise ValueError(
                f"minibatches={hyper.minibatches} of policy {name!r} must not exceed {key_of_limit}={parts}"
            )
        if spec.groups and train.group_size < 2 and self.data is None:
            raise ValueError(f"train.group_size={train.group_size}: {algorithm} of policy {name!r} needs 2 or more")
        if spec.groups and not spec.greedy and self.greedy and train.group_size < 3:
            raise ValueError(
                f"train.group_size={train.group_size}: {algorithm} of policy {name!r} needs 3 or more where another "
                "policy's has the first member play greedily"
            )
        if spec.episodes and train.rollout == "steps":
            raise ValueError(f"train.rollout=steps: {algorithm} of policy {name!r} needs whole episodes")
        if hyper.advantage_norm == "group" and not spec.groups:
            raise ValueError(f"advantage_norm=group of policy {name!r}: {algorithm} has no groups")
        if hyper.advantage_norm == "group" and not spec.group_norm:
            raise ValueError(f"advantage_norm=group of policy {name!r}: {algorithm} takes no deviation of a group")
        longest, key_of_limit = train.horizon, "train.horizon"
        if self.team[name].model is not None:
            longest, key_of_limit = self.team[name].generation.max_tokens, f"team.{name}.generation.max_tokens"
        if hyper.overlong_buffer >= longest:
            raise ValueError(f"overlong_buffer={hyper.overlong_buffer} must be below {key_of_limit}={longest}")
        for key in ("overlong_buffer", "overlong_filter"):
            if getattr(hyper, key) and not self.whole_episodes:
                raise ValueError(
                    f"{key} of policy {name!r}: a row holds a stretch of play, which has no length of its own; expected "
                    "train.rollout=episodes"
                )
        if self.warm_start is not None and (hyper.kl_coef or spec.pairs):
            holder = algorithm if spec.pairs else f"kl_coef={hyper.kl_coef:g}"
            raise ValueError(
                f"warm_start: {holder} of policy {name!r} would hold it at the weights before the warm start; leave one of "
                "them out, or start from a `bundle` that was warmed up"
            )
        if spec.costs and not self.constraints:
            raise ValueError(
                f"constraints: {algorithm} of policy {name!r} needs a budget for each cost of the environment"
            )

    @property
    def _trained(self) -> list[str]:
        """Names of the policies that learn."""
        return [name for name, policy in self.team.items() if not policy.frozen]

    @property
    def _compares_groups(self) -> bool:
        """True if a policy learns by an algorithm that compares the members of a group."""
        return any(self.spec_of(name).groups for name in self._trained)

    @property
    def branch_turns(self) -> int:
        """Number of turns after the first at which the members of a group answer one prompt."""
        if self.data is not None:
            return 0
        if self.train.branch_turns is not None:
            return self.train.branch_turns
        if self.language and self._compares_groups:
            return min(DEFAULT_BRANCH_TURNS, self.train.horizon - 1)
        return 0

    @property
    def engine_actors(self) -> int:
        """Number of actors of engines that the run has, of all its policies."""
        return self.resources.engines * run_in_actors(self.team)

    @property
    def env_copies_per_worker(self) -> int:
        return self.train.env_copies // self.resources.workers

    @property
    def whole_episodes(self) -> bool:
        """True if a batch is one episode per copy, and not a stretch of each copy's play."""
        needed = any(self.spec_of(name).episodes for name in self._trained)
        return self.train.rollout == "episodes" or self.language or (self.train.rollout == "auto" and needed)

    @property
    def language(self) -> bool:
        """True if the policies are language models."""
        return all(policy.model is not None for policy in self.team.values())

    @property
    def greedy(self) -> bool:
        """True if the first copy of every group plays greedily."""
        return any(self.spec_of(name).greedy for name in self._trained)

    @property
    def signals(self) -> int:
        """Number of cost signals that are gathered; 1 without constraints."""
        return max(1, len(self.constraints))

    @property
    def evaluates(self) -> bool:
        """True if scores are of evaluations; else they are of training episodes."""
        return not self.language if self.evaluation.every is None else self.evaluation.every > 0

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
        """Environment steps of one iteration over all workers; the most of it where episodes may end early."""
        return self.train.env_copies * self.train.horizon

    def algorithm_of(self, policy: str) -> str:
        return self.team[policy].algorithm or self.algorithm

    def spec_of(self, policy: str) -> Spec:
        return spec_of(self.algorithm_of(policy))

    def hyper_of(self, policy: str) -> AlgorithmConfig:
        """Return the validated hyper-parameters of a policy: the defaults of its family, overridden by the algorithm's,
        by those of the run's hyper-parameters that the algorithm reads, and by the policy's own."""
        spec, policy_config = self.spec_of(policy), self.team[policy]
        return spec.hyper.model_validate(
            {**family_defaults(policy_config.model), **spec.defaults, **self._given_to(policy)}
        )

    def _given_to(self, policy: str) -> dict[str, Any]:
        """Return the hyper-parameters that the user gave and this policy's algorithm reads."""
        reads = self.spec_of(policy).reads
        of_run = {key: value for key, value in self.hyper.as_given().items() if key in reads}
        return of_run | self.team[policy].hyper

    def as_given(self) -> dict[str, Any]:
        """Return plain data from which an equal config is made; keys that were not given stay open, so that defaults
        still apply."""
        return self.model_dump(mode="json", exclude_unset=True)

    def resolved(self) -> dict[str, Any]:
        """Return plain data with every default written out: each policy's algorithm and the hyper-parameters that it
        reads."""
        data = self.model_dump(mode="json", exclude={"hyper", "algorithm"})
        for name, policy in data["team"].items():
            policy["algorithm"] = self.algorithm_of(name)
            reads = set() if self.team[name].frozen else set(self.spec_of(name).reads)
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
