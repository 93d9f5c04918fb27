"""The arms of an experiment, loaded, and the batching of their forward passes."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from marl_ray.config import ExperimentConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundle import Bundle, load_bundle
from marl_ray.policies.manifest import pinned
from marl_ray.policies.spaces import space_to_json
from marl_ray.serving.arm_errors import ArmError, NotFiniteError, new_pass

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from marl_ray.policies.token_bundle import TokenBundle

AnyBundle: TypeAlias = "Bundle | TokenBundle"
Observations = Mapping[str, np.ndarray]
"""Agent -> observation, checked by `Bundle.check`."""
Answer = dict[str, tuple[np.ndarray, float]]
"""Agent -> action and its log-probability."""


def pin(config: ExperimentConfig, tracking_uri: str | None) -> ExperimentConfig:
    """The experiment with the versions that its arms' aliases (`models:/name@best`) have now.

    What is served must not change when an alias moves. Raises MarlRayError naming the arm.
    """
    arms = {}
    for name, arm in config.arms.items():
        try:
            arms[name] = arm.model_copy(update={"bundle": pinned(arm.bundle, tracking_uri)})
        except MarlRayError as error:
            raise MarlRayError(f"experiments.{config.name}.arms.{name}: {error}") from error
    return config.model_copy(update={"arms": arms})


def load_bundles(
    config: ExperimentConfig,
    tracking_uri: str | None = None,
    loaded: Mapping[str, AnyBundle] = MappingProxyType({}),
) -> dict[str, AnyBundle]:
    """The bundle of every arm, from `loaded` (reference -> bundle) where it is there.

    Raises MarlRayError naming the arm if one cannot be loaded or if two differ in kind, agents, observations or actions: a
    request is made before its arm is known, so every arm must understand it. Language models cannot be shadows.
    """
    bundles: dict[str, AnyBundle] = {}
    for arm, arm_config in config.arms.items():
        try:
            known = loaded.get(arm_config.bundle)
            bundles[arm] = known if known is not None else load_bundle(arm_config.bundle, tracking_uri)
        except MarlRayError as error:
            raise MarlRayError(f"experiments.{config.name}.arms.{arm}: {error}") from error
    control = next(iter(config.arms))
    if is_text(bundles[control]) and config.strategy == "shadow":
        raise MarlRayError(
            f"experiments.{config.name}.strategy: shadows are compared by their actions, which texts are not; "
            "expected ab, gradual or replace for language models"
        )
    expected = _interface(bundles[control])
    for arm, bundle in bundles.items():
        if is_text(bundle) != is_text(bundles[control]):
            kinds = ("language models", "actor-critics")
            has, needs = kinds if is_text(bundle) else kinds[::-1]
            raise MarlRayError(f"experiments.{config.name}.arms.{arm}: holds {has}, arm {control!r} holds {needs}")
        found = _interface(bundle)
        for agent in sorted({*expected, *found}):
            if expected.get(agent) != found.get(agent):
                raise MarlRayError(
                    f"experiments.{config.name}.arms.{arm}: agent {agent!r} has other spaces than in arm {control!r}"
                    if agent in expected and agent in found
                    else f"experiments.{config.name}.arms.{arm}: plays agents {', '.join(found)}, "
                    f"arm {control!r} plays {', '.join(expected)}"
                )
    return bundles


def is_text(bundle: AnyBundle) -> "TypeIs[TokenBundle]":
    """Whether it holds language models."""
    return bundle.manifest.family == "token"


def _interface(bundle: AnyBundle) -> dict[str, tuple[Any, Any]]:
    if not isinstance(bundle, Bundle):
        return dict.fromkeys(bundle.agents, ("text", "text"))
    parts = bundle.manifest.policies
    return {
        agent: (space_to_json(bundle.policies[policy].observation_space), parts[policy].action_space)
        for agent, policy in bundle.agents.items()
    }


@dataclass(slots=True)
class _Waiting:
    observations: Observations
    masks: Observations
    greedy: bool
    answer: "asyncio.Future[Answer]"


class ArmBatcher:
    """Forward passes of one arm: requests that are there at the same time share one, and none waits for company.

    A batcher has one bundle, so arms cannot mix. A pass runs on the event loop: it takes a fraction of a millisecond,
    less than a way to a thread and back, and requests that arrive meanwhile are the next batch.
    """

    def __init__(self, bundle: Bundle, max_batch: int, noise: np.random.Generator):
        """`max_batch` limits the observations of one pass; a single request with more still goes as a whole."""
        self.bundle = bundle
        self._max_batch = max_batch
        self._noise = noise
        self._waiting: list[_Waiting] = []

    async def act(self, observations: Observations, greedy: bool, masks: Observations | None = None) -> Answer:
        """Actions and log-probabilities for one request; `masks` are its agents' allowed actions, as far as given.

        ArmError if the pass fails, NotFiniteError if a log-probability is not finite."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(observations, masks or {}, greedy, loop.create_future())
        if not self._waiting:
            # Runs after all callbacks that are ready now, and those are the other requests of this moment.
            loop.call_soon(self._run)
        self._waiting.append(waiting)
        return await waiting.answer

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for greedy in (True, False):
            for batch in self._cut([w for w in waiting if w.greedy is greedy and not w.answer.done()]):
                for w, answer in zip(batch, self._answers(batch, greedy, new_pass()), strict=True):
                    if isinstance(answer, ArmError):
                        w.answer.set_exception(answer)
                    else:
                        w.answer.set_result(answer)

    def _answers(self, batch: Sequence[_Waiting], greedy: bool, number: int) -> list[Answer | ArmError]:
        """An answer per request of one pass, or why there is none."""
        try:
            noise = None if greedy else self._noise
            answers = self.bundle.act([w.observations for w in batch], noise, [w.masks for w in batch])
        except Exception as error:  # each request reports it; the batcher goes on
            if len(batch) == 1:
                return [ArmError(f"its pass failed: {error!r}", number)]
            # One by one, so that the input of one request takes none of the others with it.
            return [self._answers([w], greedy, number)[0] for w in batch]
        return [
            answer
            if all(math.isfinite(log_prob) for _, log_prob in answer.values())
            else NotFiniteError("log-probabilities are not finite", number)
            for answer in answers
        ]

    def _cut(self, waiting: list[_Waiting]) -> list[list[_Waiting]]:
        batches: list[list[_Waiting]] = []
        size = self._max_batch
        for w in waiting:
            if size + len(w.observations) > self._max_batch:
                batches.append([])
                size = 0
            batches[-1].append(w)
            size += len(w.observations)
        return batches
