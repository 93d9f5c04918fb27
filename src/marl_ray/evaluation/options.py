"""Options of evaluations, as `marl_ray.evaluate` and the command `marl-ray evaluate` take them.

Every option is a field of a record below. An evaluation takes the fields of the records that it reads, and refuses others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from marl_ray.evaluation.benchmarks import AnswerKind
from marl_ray.json_types import JsonMapping
from marl_ray.sandbox import Level

EPISODE_SEED = 1000
"""Seed of starts and actions: another than that of most runs, whose evaluations have chosen their bundles on its starts."""
EPISODE_MAX_STEPS = 2000
"""Environment steps after which an episode is truncated if nobody says otherwise, so that each one ends."""

Progress = Callable[[str, int, int], None]
"""Function that is called with what is counted, the number done and the total."""


def no_progress(counted: str, done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """Options of the scoring of samples on a benchmark."""

    benchmark: str
    """A name, `jsonl:FILE` with the problems, or `package.module:NAME`."""
    samples: str = ""
    """The file of ready samples; empty while a policy has not written them."""
    data: str | None = None
    """A file or URI of problems, or `hub`; None takes the benchmark's own source, if it has one."""
    split: str | None = None
    """A split of the benchmark; None takes its first."""
    sha256: str | None = None
    """Digest of `data` in place of the known ones, or `any`; None expects a known one."""
    out: Path | None = None
    """Folder of results and report; None makes one in runs/evaluations."""
    k: tuple[int, ...] | None = None
    """Values of k for pass@k; None takes all possible ones of the benchmark's own."""
    mode: str | None = None
    """`official`, `hardened` or `both`; None takes all modes that the benchmark has."""
    timeout_s: float | None = None
    """CPU seconds of one run of a program, less than a day; None takes the official limit."""
    min_level: Level = Level.PATHS
    """The weakest confinement in which programs may run."""


@dataclass(frozen=True, kw_only=True)
class RunningOptions:
    """Options of where and how an evaluation runs; they change none of its numbers."""

    workers: int | None = None
    """Programs at a time on a machine; None takes its number of CPUs."""
    local: bool = False
    """Score in this process, without Ray."""
    progress: Progress = no_progress


@dataclass(frozen=True, kw_only=True)
class WritingRequest:
    """A request for samples: the bundle that writes them, and its sampling options."""

    policy: str = ""
    """A bundle's folder, or `models:/name/version`; empty where the writers are given otherwise."""
    tracking_uri: str | None = None
    agent: str | None = None
    """The agent whose policy answers alone; None takes the team, or the only policy."""
    num_samples: int = 1
    """Number of samples per problem."""
    seed: int = 0
    greedy: bool = False
    temperature: float | None = None
    """Sampling temperature. None takes the value of the bundle's generation config, here and for `max_tokens`."""
    max_tokens: int | None = None
    answer: AnswerKind | None = None
    """The kind of answer; None takes the kind that the policy was trained to write (see `Writer`)."""
    prompt: str | None = None
    """Template of the prompt, with {prompt} in it; None takes the default."""


@dataclass(frozen=True, kw_only=True)
class WebRequest:
    """A request for episodes of a benchmark in a browser."""

    policy: str
    """A bundle; `expert` or `random`; or `package.module:NAME` of a callable that returns a `WebAgent`."""
    agent: str | None = None
    """The agent of the bundle whose policy plays; None for the only one."""
    env: JsonMapping = field(default_factory=dict)
    """Options of the environment."""
    split: str = "test"
    num_samples: int = 1
    """Episodes of each task."""
    seed: int = 0
    greedy: bool = False
    temperature: float | None = None
    """Sampling temperature. None takes the value of the bundle's generation config, here and for `max_tokens`."""
    max_tokens: int | None = None
    k: tuple[int, ...] | None = None
    """Values of k for pass@k; None takes all possible ones of the benchmark's own."""
    out: Path | None = None
    workers: int | None = None
    """Episodes at a time; None takes the machine's number of CPUs."""
    tracking_uri: str | None = None

    @property
    def overrides(self) -> dict[str, float | None]:
        """Sampling options instead of those of the bundle."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens}


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions:
    """Options of whole episodes that a bundle's actor-critics play in the environment of their run."""

    policy: str
    """A bundle's folder, or `models:/name/version`."""
    episodes: int
    """Number of episodes."""
    seed: int = EPISODE_SEED
    """Seed of starts and actions. With one seed all bundles meet the same starts."""
    greedy: bool = False
    env: JsonMapping = field(default_factory=dict)
    """Options that replace those of the run's environment."""
    max_steps: int = EPISODE_MAX_STEPS
    """Environment steps after which an episode is truncated."""
    tracking_uri: str | None = None
