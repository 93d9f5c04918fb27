"""A small text environment with known behaviour, reachable from configs as `toys.texts:echo`, and runs on it."""

import os
from pathlib import Path
from typing import Any

from marl_ray.config import RunConfig, parse_config
from marl_ray.envs.text.base import Demonstration, TextEnv
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.single_process import train_alone

LETTERS = "ab"


class Letter:
    """A task: say the letter."""

    level = 0.0

    def __init__(self, letter: str):
        self.task_id = self.prompt = letter


class Echo(TextEnv):
    """Agent `a` answers a letter, and agent `b`, if there is one, reads the answer and the letter.

    An answer earns 1 if it begins with the letter, and 0.1 for every character of ASCII. Solved where the last answer
    is the letter alone.
    """

    def __init__(self, agents: tuple[str, ...] = ("a",), marker: str = "", at: int = 0, **kwargs: Any):
        """Kills its process in step `at` of this copy, once: the first to do it leaves the file `marker` behind."""
        super().__init__(agents, [Letter(x) for x in LETTERS * 4], [Letter(x) for x in LETTERS], **kwargs)
        self.marker, self.acts_left = marker, at

    def begin(self) -> None:
        self.ask(self.agents[0], self.task.prompt)

    def act(self, agent: str, text: str) -> None:
        self.acts_left -= 1
        if self.acts_left == 0 and not os.path.exists(self.marker):
            with open(self.marker, "w"):
                pass
            os._exit(1)
        self.earn(float(text.startswith(self.task.prompt)) + sum(map(str.isascii, text)) / 10, agent)
        if agent == self.agents[-1]:
            self.finish(text == self.task.prompt, {"length": float(len(text))})
        else:
            self.ask(self.agents[1], f"{text[:4]}?{self.task.prompt}")

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        letters = [LETTERS[i % 2] for i in range(count)]
        prompts = {"a": "{}", "b": "{0}?{0}"}
        return [Demonstration(a, prompts[a].format(x), x) for x in letters for a in self.possible_agents]


def echo(**kwargs: Any) -> Echo:
    """Make the environment of `env.id: toys.texts:echo`."""
    return Echo(**kwargs)


def wordy(to: str, **kwargs: Any) -> Echo:
    """Echo whose prompts to one agent are too long for it, whatever is left out of them."""

    class Wordy(Echo):
        def ask(self, agent: str, prompt: str) -> None:
            super().ask(agent, prompt + " and so on" * 30 if agent == to else prompt)

    return Wordy(**kwargs)


class LimitedEcho(Echo):
    """Cannot be made while `limit` of its kind are open in this process."""

    open_count = 0

    def __init__(self, limit: int, **kwargs: Any):
        super().__init__(**kwargs)
        if LimitedEcho.open_count >= limit:
            raise ValueError(f"{limit} environments are open")
        LimitedEcho.open_count += 1

    def close(self) -> None:
        LimitedEcho.open_count -= 1


def limited(**kwargs: Any) -> LimitedEcho:
    """Make the environment of `env.id: toys.texts:limited`."""
    return LimitedEcho(**kwargs)


def config(*overrides: str) -> RunConfig:
    """Three iterations of eight episodes."""
    base = {
        "name": "toy-text",
        "algorithm": "grpo",
        "env": {"id": "toys.texts:echo"},
        "team": {"speaker": {"model": {"preset": "tiny-0.2m", "context": 32}, "generation": {"max_tokens": 4}}},
        "train": {"total_steps": 24, "env_copies": 8, "horizon": 4, "group_size": 4},
        "checkpoint": {"every": 1},
        "hyper": {"lr": 0.001, "epochs": 1, "minibatches": 1},
    }
    return parse_config(RunConfig, base, overrides)


TWO_POLICIES = (
    "team={first: {agents: [a], model: {preset: tiny-0.2m, context: 32}, generation: {max_tokens: 4}}, "
    "second: {agents: [b], model: {preset: tiny-0.2m, context: 32}, generation: {max_tokens: 3}}}"
)
TWO_AGENTS = "env={id: 'toys.texts:echo', kwargs: {agents: [a, b]}}"


def of_two(runs: dict[str, list[str]]) -> dict[str, list[Metrics]]:
    """Make the named runs as one of two workers and return rows of metrics by name."""
    return {name: train_alone(config(*more, "resources.workers=2")) for name, more in runs.items()}


def train_rows(folder: str, *overrides: str) -> list[Metrics]:
    """Rows of metrics of a run, as one or as one of several workers without Ray.

    Every checkpoint is under `folder`.
    """
    return train_alone(config(*overrides), Path(folder))


def resume_rows(checkpoint: str, *overrides: str) -> list[Metrics]:
    """Rows of metrics of a run that continues from a checkpoint, as one or as one of several workers without Ray."""
    return train_alone(config(*overrides), resume=Path(checkpoint))
