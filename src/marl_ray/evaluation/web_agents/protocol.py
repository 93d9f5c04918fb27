"""The interface of benchmarks in a browser, and of the agents that play them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from marl_ray.envs.web.environment import BrowserEnv
from marl_ray.errors import MarlRayError
from marl_ray.extensions import BENCHMARK
from marl_ray.json_types import JsonMapping


@dataclass(frozen=True)
class WebBenchmark:
    """Tasks of an environment in a browser, each of which is an episode."""

    name: str
    title: str
    env_id: str
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Options of the environment, where none are given."""
    ks: tuple[int, ...] = (1, 5, 10)
    """Values of k that are reported when none is asked for."""
    known_digests: Mapping[str, str] = field(default_factory=dict)
    """Empty, because any file of tasks is accepted."""


WEBARENA = WebBenchmark("webarena", "WebArena", "webarena")
MINIWOB = WebBenchmark("miniwob", "MiniWoB++", "miniwob", {"variants": 1, "held_out": 5})


def web_benchmark(name: str) -> WebBenchmark | None:
    """Return the benchmark of a name or `package.module:NAME`, or None unless it is played in a browser."""
    try:
        loaded = BENCHMARK.load(name)
    except MarlRayError:
        return None
    return loaded if isinstance(loaded, WebBenchmark) else None


@dataclass(frozen=True)
class WebTurn:
    """An agent's turn in an episode."""

    env: BrowserEnv
    agent: str
    task_id: str
    sample: int
    """Number of the episode among those of its task."""
    number: int
    """Number of turns of this episode before this one."""

    @property
    def prompt(self) -> str:
        """The task and the page, as text."""
        return str(self.env.observe(self.agent))


@dataclass(frozen=True)
class WebAnswer:
    """An action in text, with whatever the agent says besides."""

    text: str
    tokens: int | None = None
    """Tokens that it took; None for an agent that knows none."""


class WebAgent(Protocol):
    """Plays episodes in a browser. An answer is a function of the episode's past, its task and sample, and the seed."""

    def manifest(self) -> JsonMapping:
        """Return the facts that determine its actions, as JSON; `agent` describes it in a few words."""

    def act(self, turns: Sequence[WebTurn]) -> list[WebAnswer]:
        """Answer turns of different episodes, in their order."""
