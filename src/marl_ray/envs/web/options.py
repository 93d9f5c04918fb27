"""The options that every environment in a browser has."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl_ray.envs.web.browser.session import HEIGHT, WIDTH
from marl_ray.rewards.reward_protocol import ChosenReward


@dataclass(frozen=True)
class BrowserOptions:
    """The limits of an episode in a browser, what its agent is shown, what is kept of it, and what it pays.

    Raises ValueError naming the option.
    """

    agent: str
    """The agent's name."""
    max_steps: int
    """Actions in an episode."""
    step_s: float
    """Seconds of one action."""
    episode_s: float
    """Seconds of all actions."""
    patience: int | None
    """Unreadable actions in a row, or equal actions, that end the episode; None for no such limit."""
    observation_limit: int
    """Characters of a page that are shown."""
    thoughts: bool
    """True if the prompt asks for a thought before each action."""
    record: str | None
    """The folder for screenshots and steps of every episode; None keeps none."""
    traces: bool
    """True if Playwright's trace is kept too."""
    seed: int
    """The order of the tasks."""
    cost: Sequence[str]
    """Those of `tokens`, `calls` and `seconds` that are costs."""
    reward: ChosenReward
    size: tuple[int, int] = (WIDTH, HEIGHT)
    """Width and height of the window in pixels."""

    def __post_init__(self) -> None:
        limits = {
            "max_steps": self.max_steps,
            "step_s": self.step_s,
            "episode_s": self.episode_s,
            "observation_limit": self.observation_limit,
            "patience": 1 if self.patience is None else self.patience,
        }
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"{name}={value}, expected more than 0")
        if self.traces and self.record is None:
            raise ValueError("traces: expected with `record`, the folder in which they are kept")
