"""Episodes of a benchmark in a browser: several at a time, in waves of one turn each."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from marl_ray.deadlines.side_by_side import CallTimeoutError, run_side_by_side
from marl_ray.envs.text.base import COSTS
from marl_ray.envs.web.environment import TASK_STEPS, BrowserEnv
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import Mode, SampleVerdict
from marl_ray.evaluation.web_agents.protocol import WebAgent, WebTurn
from marl_ray.json_types import JsonObject

SLACK_S = 60.0
"""Seconds beyond the deadlines of the browser after which a turn is an error: they end every call themselves."""
VERDICT_MODE: Mode = "official"
"""The mode of the verdicts: the semantics of the benchmark's authors."""
WebRow = JsonObject
"""Result of an episode, as a line of results.jsonl."""


@dataclass(frozen=True)
class WebJob:
    """An episode to play."""

    split: str
    index: int
    task_id: str
    group: str
    """The page or the sites of the task."""
    sample: int


@dataclass
class _Episode:
    """An episode as it is played."""

    env: BrowserEnv
    job: WebJob
    turns: int = 0
    costs: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0.0))

    @property
    def agent(self) -> str:
        return str(self.env.possible_agents[0])

    @property
    def over(self) -> bool:
        return bool(self.env.terminations[self.agent])

    def begin(self) -> None:
        self.env.reset(seed=0, options={"index": self.job.index, "split": self.job.split})
        self._count(None)

    def step(self, text: str, tokens: int | None) -> None:
        self.env.step(text)
        self.turns += 1
        self._count(tokens)

    def _count(self, tokens: int | None) -> None:
        spent = dict(zip(COSTS, self.env.infos[self.agent]["cost"], strict=True))
        if tokens is not None:
            spent["tokens"] = float(tokens)
        self.costs = {name: self.costs[name] + spent[name] for name in COSTS}

    def row(self) -> WebRow:
        """Return the result, as a line of results.jsonl."""
        infos = self.env.infos[self.agent]
        metrics, solved, ending = infos["metrics"], bool(infos["solved"]), str(infos["ending"])
        verdict = SampleVerdict(solved, "passed" if solved else f"fail:{ending}", self.costs["seconds"])
        return {
            "what": "sample",
            "task_id": self.job.task_id,
            "sample": self.job.sample,
            "group": self.job.group,
            "task": self.env.intent(),
            VERDICT_MODE: asdict(verdict),
            "suspected_hack": False,
            "ending": ending,
            "score": metrics["pass"],
            "actions": self.turns,
            "failed_actions": metrics["failed_actions"],
            "cost": self.costs,
        }


def play_jobs(envs: Sequence[BrowserEnv], agent: WebAgent, jobs: Sequence[WebJob]) -> Iterator[list[WebRow]]:
    """Yield the results of episodes as they end. Each environment plays one at a time, and reports all `COSTS`.

    Raises MarlRayError naming the task where a turn does not end.
    """
    waiting, idle, running = deque(jobs), list(envs), list[_Episode]()
    while waiting or running:
        begun = [_Episode(idle.pop(), waiting.popleft()) for _ in range(min(len(idle), len(waiting)))]
        _call_side_by_side(begun, [episode.begin for episode in begun])
        running += begun
        turns = [
            WebTurn(episode.env, episode.agent, episode.job.task_id, episode.job.sample, episode.turns)
            for episode in running
        ]
        answers = agent.act(turns)
        _call_side_by_side(
            running,
            [
                partial(episode.step, answer.text, answer.tokens)
                for episode, answer in zip(running, answers, strict=True)
            ],
        )
        ended = [episode for episode in running if episode.over]
        running = [episode for episode in running if not episode.over]
        idle += [episode.env for episode in ended]
        if ended:
            yield [episode.row() for episode in ended]


def _call_side_by_side(episodes: Sequence[_Episode], calls: Sequence[Any]) -> None:
    if not calls:
        return
    deadline = (2 * TASK_STEPS) * max(episode.env.options.step_s for episode in episodes) + SLACK_S
    try:
        run_side_by_side(calls, len(calls), deadline)
    except CallTimeoutError as late:
        raise MarlRayError(f"{episodes[late.index].job.task_id}: a turn took over {deadline:g} s") from late
