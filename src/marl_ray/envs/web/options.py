"""The options that every environment in a browser has."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl_ray.deadlines.seconds import check_seconds
from marl_ray.extensions import check_numbers
from marl_ray.rewards.protocol import ChosenReward


@dataclass(frozen=True)
class BrowserOptions:
    """The limits of an episode in a browser, what its agent is shown, what is kept of it, and what it pays.

    An environment may have other defaults, which its docstring then gives.

    Raises ValueError naming the option.
    """

    agent: str = "agent"
    """The agent's name."""
    max_steps: int = 30
    """Actions in an episode."""
    step_s: float = 30.0
    """Seconds of one action, less than a day."""
    episode_s: float = 600.0
    """Seconds of all actions, less than a day."""
    patience: int | None = 3
    """Unreadable actions in a row, or equal actions, that end the episode; None for no such limit."""
    observation_limit: int = 8000
    """Characters of a page that are shown."""
    thoughts: bool = False
    """True if the prompt asks for a thought before each action, as ReAct does."""
    record: str | None = None
    """The folder for screenshots and steps of every episode; None keeps none."""
    traces: bool = False
    """True if Playwright's trace is kept too."""
    seed: int = 0
    """The order of the tasks."""
    cost: Sequence[str] = ()
    """Those of `tokens`, `calls` and `seconds` that are costs."""
    reward: ChosenReward = "solved"
    """A name of `extensions.REWARD` or `package.module:NAME`, or {NAME: options}."""

    def __post_init__(self) -> None:
        check_numbers(BrowserOptions, vars(self))
        counts = {
            "max_steps": self.max_steps,
            "observation_limit": self.observation_limit,
            "patience": 1 if self.patience is None else self.patience,
        }
        for name, count in (counts | {"seed": self.seed}).items():
            if not isinstance(count, int):
                raise ValueError(f"{name}={count!r}, expected a whole number")
        for name, count in counts.items():
            if not count > 0:
                raise ValueError(f"{name}={count}, expected more than 0")
        check_seconds("step_s", self.step_s)
        check_seconds("episode_s", self.episode_s)
        if self.traces and self.record is None:
            raise ValueError("traces: expected with `record`, the folder in which they are kept")
