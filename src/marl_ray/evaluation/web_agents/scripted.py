"""Agents that learn nothing: one acts by chance, and one knows the plans of the synthetic tasks."""

import re
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from marl_ray.envs.web.webarena.environment import SPLIT_SEEDS, WORLD_SEED
from marl_ray.envs.web.webarena.site_pack.expert import expert_action
from marl_ray.envs.web.webarena.site_pack.synthetic_tasks import Plan, synthetic_tasks
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.evaluation.web_agents.protocol import WebAgent, WebAnswer, WebTurn
from marl_ray.json_types import JsonMapping
from marl_ray.rollout.rng import task_number

ACTIONABLE_ROLES = ("button", "link", "textbox", "checkbox", "radio", "tab", "option", "combobox", "searchbox")
"""Roles of the elements that the random agent clicks or types into."""
SHOWN_INTENT = 80
"""Characters of a task's text in an error, so that the error stays one line."""


class RandomAgent(WebAgent):
    """Clicks elements and types words of the task into them, each as likely.

    One action in ten goes back or stops.
    """

    def __init__(self, seed: int):
        self.seed = seed

    @override
    def manifest(self) -> JsonMapping:
        return {"agent": f"actions by chance, seed {self.seed}"}

    @override
    def act(self, turns: Sequence[WebTurn]) -> list[WebAnswer]:
        return [WebAnswer(self._action(turn)) for turn in turns]

    def _action(self, turn: WebTurn) -> str:
        rng = turn_generator(self.seed, turn)
        elements = turn.env.view.elements
        ids = [number for number, element in elements.items() if element.role in ACTIONABLE_ROLES] or list(elements)
        words = re.findall(r"\w+", turn.env.intent()) or ["a"]
        if not ids or rng.random() < 0.1:
            return str(rng.choice(["go_back", f"stop [{rng.choice(words)}]"]))
        element = rng.choice(ids)
        return str(rng.choice([f"click [{element}]", f"type [{element}] [{rng.choice(words)}] [0]"]))


class ExpertAgent(WebAgent):
    """Does the synthetic tasks of `marl_ray.envs.web.webarena.site_pack` by their plans."""

    def __init__(self) -> None:
        made = [task for seed in SPLIT_SEEDS.values() for task in synthetic_tasks(WORLD_SEED, seed)]
        self._plans: dict[str, Plan] = {task.record.intent: task.plan for task in made}

    @override
    def manifest(self) -> JsonMapping:
        return {"agent": "the scripted expert"}

    @override
    def act(self, turns: Sequence[WebTurn]) -> list[WebAnswer]:
        return [WebAnswer(self._action(turn)) for turn in turns]

    def _action(self, turn: WebTurn) -> str:
        plan = self._plans.get(turn.env.intent())
        if plan is None:
            raise FieldError(
                "policy", f"the expert does synthetic tasks of webarena alone, not {turn.env.intent()[:SHOWN_INTENT]!r}"
            )
        try:
            return expert_action(plan[turn.number], turn.prompt) if turn.number < len(plan) else "stop"
        except MarlRayError:  # the page is another one than the plan's, because the browser or a site has failed
            return "stop"


def turn_generator(seed: int, turn: WebTurn) -> np.random.Generator:
    """Return the random numbers of a turn, which do not depend on what else is played."""
    return np.random.default_rng([seed, task_number(turn.task_id), turn.sample, turn.number])
