"""MiniWoB++ for small policies: the page as a vector, and a choice of an element as the action."""

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_ray.envs.web.elements import PageRow, action_count, page_row, row_size
from marl_ray.envs.web.environment import BrowserEnv
from marl_ray.envs.web.miniwob import MiniWob

DEFAULT_ELEMENTS = 12
"""Elements of a page that a policy sees, if its config says no other number."""
_CLICK = "click ["


class MiniWobElements(ParallelEnv[str, np.ndarray, int]):  # type: ignore[misc]  # PettingZoo has no types
    """One agent, which sees some elements of a page and clicks one, or types a quoted phrase of the task into one.

    elements: elements of a page that the policy sees, 12.
    keep_pages: as in `MiniWob`, but True by default.
    kwargs: the other options of `MiniWob`.

    Observation: Box float32 of `marl_ray.envs.web.elements.row_size(elements)` numbers from 0 to 1.
    Action: Discrete, an index of the actions of `marl_ray.envs.web.elements.PageRow`.
    Reward, and what infos say at the end, are those of `MiniWob`. Info besides: `action_mask`.
    """

    metadata = {"name": "miniwob_elements", "render_modes": []}

    def __init__(self, elements: int = DEFAULT_ELEMENTS, keep_pages: bool = True, **kwargs: Any):
        """Raise ValueError and MarlRayError as `MiniWob` does."""
        if elements < 1:
            raise ValueError(f"elements={elements}, expected at least 1")
        self.browser = MiniWob(keep_pages=keep_pages, **kwargs)
        self.reader = ElementReader(elements)
        self.render_mode = None
        self.possible_agents = list(self.browser.possible_agents)
        self.agents: list[str] = []
        self._observations = spaces.Box(0.0, 1.0, (row_size(elements),), np.float32)
        self._actions = spaces.Discrete(action_count(elements))

    @override
    def observation_space(self, agent: str) -> spaces.Box[Any]:
        return self._observations

    @override
    def action_space(self, agent: str) -> spaces.Discrete[Any]:
        return self._actions

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Begin an episode, with the options of `MiniWob`."""
        self.browser.reset(seed=seed, options=options)
        self.agents = list(self.possible_agents)
        self.reader.begin()
        row = self.reader.read(self.browser)
        agent = self.agents[0]
        return {agent: row.values}, {agent: {**self.browser.infos[agent], "action_mask": row.allowed}}

    def step(
        self, actions: dict[str, int]
    ) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Do the action. One that is not allowed is a scroll, as the last one is."""
        agent = self.agents[0]
        self.browser.step(self.reader.action(int(actions[agent])))
        over = self.browser.terminations[agent]
        row = self.reader.read(self.browser)
        if over:
            self.agents = []
        infos = {**self.browser.infos[agent], "action_mask": row.allowed}
        reward = float(self.browser.rewards[agent])
        return {agent: row.values}, {agent: reward}, {agent: over}, {agent: False}, {agent: infos}

    @override
    def close(self) -> None:
        self.browser.close()


class ElementReader:
    """The pages of one episode as rows, and the text of each chosen action."""

    def __init__(self, elements: int):
        self.elements = elements
        self.begin()

    def begin(self) -> None:
        """Forget the last episode."""
        self.clicked: set[int] = set()
        self.row: PageRow | None = None

    def read(self, browser: BrowserEnv) -> PageRow:
        """Return the page that the environment shows now."""
        remaining = browser.steps_left / browser.options.max_steps
        self.row = page_row(browser.intent(), browser.view, self.elements, remaining, self.clicked)
        return self.row

    def action(self, index: int) -> str:
        """Return the action's text for the row that was read last, in which it counts as done."""
        assert self.row is not None
        text = self.row.actions[index] or self.row.actions[-1]
        if text.startswith(_CLICK):
            self.clicked.add(int(text[len(_CLICK) : -1]))
        return text
