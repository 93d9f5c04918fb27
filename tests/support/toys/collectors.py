"""Collectors of toy text environments, whose players say what is known, alone or on two workers in threads."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.engines.base import Completion, Engine, Prompt, Token
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy
from marl_ray.rollout.protocol import CollectPlan
from marl_ray.rollout.text.collector import TextCollector
from marl_ray.rollout.text.responses import TokenPlayer
from marl_ray.trajectories import Trajectories

BOTH = {"shared": ["asker", "teller"]}
EACH = {"first": ["asker"], "second": ["teller"]}
ALONE = {"only": ["speaker"]}
SAID = ("a", "stop", "cat", "dog", "no", "banana")


def policy(critic: bool = False, signals: int = 0, max_tokens: int = 8) -> TokenPolicy:
    generation = GenerationConfig(max_tokens=max_tokens)
    return build_token_policy(ModelConfig(preset="tiny-0.2m", context=256), generation, 0, critic, signals)


POLICY = policy()


class Scripted(Engine):
    """An engine that knows what to say: of `words` the one that the stream and the seed choose, the first if greedy."""

    def __init__(self, words: Sequence[str] = SAID, ends: bool = True):
        self.words, self.ends = words, ends
        self.calls: list[list[Prompt]] = []

    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        self.calls.append(list(prompts))
        return [self.say(prompt, seed) for prompt in prompts]

    def say(self, prompt: Prompt, seed: int) -> Completion:
        drawn = hashlib.sha256(f"{seed} {prompt.stream}".encode()).digest()
        word = self.words[0 if prompt.greedy else drawn[0] % len(self.words)]
        ids = [*word.encode(), *([POLICY.tokenizer.eos_token_id] if self.ends else [])]
        return Completion(ids, [-drawn[i + 1] / 100 for i in range(len(ids))], self.ends)

    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        raise NotImplementedError


class Repeater(Scripted):
    """Says the second word of its prompt, which is what Echo wants."""

    def say(self, prompt: Prompt, seed: int) -> Completion:
        word = bytes(i for i in prompt.ids if i < 256).split()[1]
        return Completion(list(word), [-1.0] * len(word), True)


def players(
    agents: dict[str, list[str]], engine: Engine | None = None, model: TokenPolicy = POLICY, **kwargs: Any
) -> dict[str, TokenPlayer]:
    used_engine = engine or Scripted()
    return {name: TokenPlayer(model, used_engine, members, ValueNorm(), **kwargs) for name, members in agents.items()}


def collector(
    make: Callable[[], Any],
    agents: dict[str, list[str]],
    copies: range = range(8),
    plan: CollectPlan | None = None,
    **kwargs: Any,
) -> TextCollector:
    return TextCollector(make, agents, copies, plan or CollectPlan(6, has_whole_episodes=True), 3, **kwargs)


def texts(data: Trajectories) -> list[str]:
    """Responses as text."""
    ids = [row[mask].tolist() for row, mask in zip(data.actions, data.mask, strict=True)]
    decoded: list[str] = POLICY.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return decoded


def on_two_workers(work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """`work(rank, gather)` of two workers, in threads that gather as processes do."""
    barrier = threading.Barrier(2, timeout=60)
    values: list[Any] = [None, None]
    results: list[Any] = [None, None]

    def gather(rank: int, value: Any) -> list[Any]:
        barrier.wait()
        values[rank] = value
        barrier.wait()
        return list(values)

    def run(rank: int) -> None:
        results[rank] = work(rank, partial(gather, rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
