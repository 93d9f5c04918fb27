"""The config of one training run."""

import fnmatch
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from marl_ray.config.base import Config

AlgorithmName = Literal["ippo", "mappo"]
"""Every algorithm that `algorithms.ALGORITHMS` registers; a test holds the two equal (config may not import torch)."""

Name = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")


class CostConfig(Config):
    """Constraint costs that a gridworld reports in `infos[agent]["cost"]`; zero prices mean no cost."""

    collision: NonNegativeFloat = 0.0
    """Price of a forward move that did not move the agent (wall, object or agent in the way)."""
    action: NonNegativeFloat = 0.0
    """Price of any action but `done`."""


class EnvConfig(Config):
    """Which environment to train on."""

    id: str
    """`MultiGrid-...-v0`, an mpe2 module such as `mpe2.simple_spread_v3`, or `package.module:callable` that returns a
    PettingZoo parallel environment."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    cost: CostConfig = CostConfig()
    """Constraint costs; MultiGrid environments only (others report their own)."""


class NetworkConfig(Config):
    """Shape of an actor-critic's networks (actor and critic have one of these each)."""

    hidden: tuple[PositiveInt, ...] = Field((64, 64), min_length=1)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu"] = "tanh"


class AlgorithmConfig(Config):
    """Hyper-parameters of the policy-gradient update. Defaults are those of the MAPPO paper where it states one."""

    lr: PositiveFloat = 7e-4
    """Adam learning rate of the actor."""
    critic_lr: PositiveFloat | None = None
    """Adam learning rate of the critic; `lr` when not given."""
    lr_decay: bool = False
    """Decay both learning rates linearly to zero at `train.total_steps`."""
    adam_eps: PositiveFloat = 1e-5
    epochs: PositiveInt = 4
    """Passes over each batch."""
    minibatches: PositiveInt = 1
    """Parts a batch is cut into, by time index, so that the cut is the same for any number of workers."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    clip: PositiveFloat = 0.2
    """Half-width of the ratio clip."""
    value_clip: PositiveFloat | None = 0.2
    """Half-width of the value clip, in units of the value normaliser; null turns it off."""
    huber_delta: PositiveFloat = 10.0
    """Where the value loss turns from square to linear, in units of the value normaliser."""
    entropy_coef: NonNegativeFloat = 0.01
    max_grad_norm: PositiveFloat = 10.0
    """Gradient norm above which the actor's and the critic's gradients are scaled down, each by its own norm."""
    target_kl: PositiveFloat | None = None
    """Stop the epochs of a batch once the mean KL estimate passes this; null never stops."""


class PolicyConfig(Config):
    """One policy of the team."""

    agents: tuple[str, ...] = ("*",)
    """Names or shell patterns of the agents it plays."""
    algorithm: AlgorithmName | None = None
    """Algorithm of this policy; the run's `algorithm` when not given."""
    hyper: dict[str, Any] = {}
    """Keys of `hyper` that differ for this policy."""
    network: NetworkConfig = NetworkConfig()
    bundle: str | None = None
    """Start from these weights: a bundle folder or `models:/name/version`."""
    frozen: bool = False
    """Play, never train; needs `bundle`."""

    @model_validator(mode="after")
    def _frozen_needs_weights(self) -> "PolicyConfig":
        if self.frozen and self.bundle is None:
            raise ValueError("frozen: true needs `bundle`, the weights to play with")
        return self


class TrainConfig(Config):
    """How much experience is gathered, and in what portions."""

    total_steps: PositiveInt = 100_000
    """Environment steps of the whole run (one step moves all agents once)."""
    env_copies: PositiveInt = 64
    """Environment copies over all workers; a multiple of `resources.workers`."""
    horizon: PositiveInt = 64
    """Steps of each copy per batch; a batch is env_copies x horizon environment steps."""


class ResourcesConfig(Config):
    """What one run occupies."""

    workers: PositiveInt = 1
    """Training processes, one per device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where the cluster has a GPU for every worker."""
    cpus_per_worker: PositiveFloat = 1.0
    threads_per_worker: PositiveInt = 1
    """Torch threads of each worker."""
    mixed_precision: Literal["auto", "none", "bf16"] = "auto"
    """FSDP2 parameters in bf16; `auto` means bf16 on GPU and none on CPU."""
    max_failures: NonNegativeInt = 3
    """Worker-group restarts from the last checkpoint before the run fails."""


class CheckpointConfig(Config):
    """What is kept on disk while the run goes on."""

    every: PositiveInt = 10
    """Iterations (batches) between checkpoints; the last iteration always has one."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""


class EvaluationConfig(Config):
    """Which weights count as the best."""

    window: PositiveInt = 200
    """Training episodes whose mean return selects the best checkpoint."""


class TrackingConfig(Config):
    """MLflow."""

    uri: str | None = None
    """Tracking URI; `sqlite:///STORAGE/mlflow.db` under the storage folder when not given."""
    experiment: str = "marl-ray"
    register_as: str | None = None
    """Name in the MLflow model registry for the best bundle; the run's name when not given."""
    progress: bool = True
    """Progress bar with return and speed."""


class RunConfig(Config):
    """One training run: an environment, a team, an algorithm, and what it may use."""

    name: str = Name
    """Name of the run. The same name under the same storage resumes it."""
    seed: NonNegativeInt = 0
    algorithm: AlgorithmName = "mappo"
    """Algorithm of every policy that does not name its own."""
    env: EnvConfig
    team: dict[str, PolicyConfig] = Field({"shared": PolicyConfig()}, min_length=1)
    """Policies by name and the agents they play; one policy shared by all agents when not given."""
    hyper: AlgorithmConfig = AlgorithmConfig()
    """Hyper-parameters of the algorithm."""
    train: TrainConfig = TrainConfig()
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
        for name in self.team:
            try:
                hyper = self.hyper_of(name)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(["team", name, "hyper", *map(str, first["loc"])])
                problem = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
                raise ValueError(f"{key}: {problem}") from error
            if hyper.minibatches > train.horizon:
                raise ValueError(
                    f"minibatches={hyper.minibatches} of policy {name!r} must not exceed train.horizon={train.horizon}"
                )
        return self

    @property
    def batch_steps(self) -> int:
        """Environment steps of one iteration over all workers."""
        return self.train.env_copies * self.train.horizon

    @property
    def iterations(self) -> int:
        """Iterations of the whole run; the last one may pass `train.total_steps`."""
        return -(-self.train.total_steps // self.batch_steps)

    def algorithm_of(self, policy: str) -> str:
        return self.team[policy].algorithm or self.algorithm

    def hyper_of(self, policy: str) -> AlgorithmConfig:
        """The run's hyper-parameters with the policy's own on top, validated."""
        return AlgorithmConfig.model_validate(self.hyper.model_dump() | self.team[policy].hyper)

    def policy_of(self, agents: list[str]) -> dict[str, str]:
        """Agent -> policy for the environment's agents; the first pattern that matches wins.

        Raises ValueError if an agent has no policy or a policy no agent.
        """
        table: dict[str, str] = {}
        for agent in agents:
            for name, policy in self.team.items():
                if any(fnmatch.fnmatchcase(agent, pattern) for pattern in policy.agents):
                    table[agent] = name
                    break
            else:
                raise ValueError(f"team: no policy plays agent {agent!r} (agents: {', '.join(agents)})")
        for name in self.team:
            if name not in table.values():
                raise ValueError(f"team.{name}: plays no agent (agents: {', '.join(agents)})")
        return table
