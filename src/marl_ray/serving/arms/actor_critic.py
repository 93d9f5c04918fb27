"""Arms of actor-critics in this process. Requests that arrive together share a forward pass; none waits for more."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from marl_ray.policies.actor_critic.stacked import Stack, can_stack
from marl_ray.policies.bundles.actor_critic import Bundle
from marl_ray.serving.arms.errors import ArmError, NotFiniteError, new_pass_number
from marl_ray.serving.arms.protocol import Answer, ArraysByAgent


@dataclass(slots=True)
class _Waiting:
    bundle: Bundle
    observations: ArraysByAgent
    masks: ArraysByAgent
    greedy: bool
    answer: "asyncio.Future[Answer]"


SharedPass = Callable[[Sequence[_Waiting], np.random.Generator | None], list[Answer]]


def _alone(batch: Sequence[_Waiting], noise: np.random.Generator | None) -> list[Answer]:
    """Compute the requests of one bundle that share a pass."""
    return batch[0].bundle.act([w.observations for w in batch], noise, [w.masks for w in batch])


def _together(
    stack: Stack, places: Mapping[str, int], batch: Sequence[_Waiting], noise: np.random.Generator | None
) -> list[Answer]:
    """Compute the requests of several bundles that share a pass.

    `places` maps a bundle's digest to its place in the stack.
    """
    which = [places[w.bundle.digest] for w in batch]
    return stack.act([w.observations for w in batch], which, noise, [w.masks for w in batch])


class _StackedBundles(NamedTuple):
    """The bundles that may share a pass."""

    places: Mapping[str, int]
    """Digest -> the bundle's place in the stack."""
    stack: Stack | None
    """None if the policies cannot be stacked."""


class PassBatcher:
    """Shares forward passes between the requests of one experiment.

    Requests and passes belong to one event loop. Arms join and leave from any thread: each of them swaps one value that
    never changes, so a pass sees the bundles of before or of after, and the stack that belongs to them.

    A pass runs on the loop itself, because it takes a fraction of a millisecond, less than a hand-over to a thread and
    back. Requests that arrive meanwhile form the next batch. Requests of several arms share a pass if the arms'
    policies have the same architecture (see `can_stack`), and each request is answered by its own arm's weights.
    Other arms have passes of their own.
    """

    def __init__(self, max_batch: int, noise: np.random.Generator):
        """Make passes of at most `max_batch` observations.

        A single request with more is computed in one pass all the same. `noise` is the source of sampling's randomness.
        """
        self._max_batch = max_batch
        self._noise = noise
        self._waiting: list[_Waiting] = []
        self._changing = threading.Lock()
        self._bundles: dict[str, Bundle] = {}
        """Digest -> bundle. Read and changed with the lock held, as is `_arms`."""
        self._arms: Counter[str] = Counter()
        """Digest -> number of arms with this bundle."""
        self._stacked = _stack({})

    def join(self, bundle: Bundle) -> None:
        """Add another arm's bundle. From any thread; it blocks while the weights are stacked."""
        with self._changing:
            self._arms[bundle.digest] += 1
            if self._arms[bundle.digest] == 1:
                self._bundles[bundle.digest] = bundle
                self._stacked = _stack(self._bundles)

    def leave(self, bundle: Bundle) -> None:
        """Remove an arm's bundle, unless another arm has the same one. From any thread, once for each `join`."""
        with self._changing:
            self._arms[bundle.digest] -= 1
            if self._arms[bundle.digest] == 0:
                del self._arms[bundle.digest], self._bundles[bundle.digest]
                self._stacked = _stack(self._bundles)

    def act(
        self, bundle: Bundle, observations: ArraysByAgent, greedy: bool, masks: ArraysByAgent
    ) -> "asyncio.Future[Answer]":
        """Return the actions and log-probabilities of one request.

        Raises ArmError if its pass fails, NotFiniteError if one of its numbers is not finite.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(bundle, observations, masks, greedy, loop.create_future())
        if not self._waiting:
            # Runs after all callbacks that are ready now, so the pass includes all requests that have just arrived.
            loop.call_soon(self._run)
        self._waiting.append(waiting)
        return waiting.answer

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for greedy in (True, False):
            requests = [w for w in waiting if w.greedy is greedy and not w.answer.done()]
            for part, act in self._by_pass(requests):
                for batch in self._cut(part):
                    for w, answer in zip(batch, self._answers(batch, act, greedy, new_pass_number()), strict=True):
                        if isinstance(answer, ArmError):
                            w.answer.set_exception(answer)
                        else:
                            w.answer.set_result(answer)

    def _by_pass(self, requests: list[_Waiting]) -> list[tuple[list[_Waiting], SharedPass]]:
        """Return the groups of requests that may share a pass, each with the function that computes it."""
        if not requests:
            return []
        digests = {w.bundle.digest for w in requests}
        places, stack = self._stacked
        if stack is not None and digests <= places.keys():
            return [(requests, partial(_together, stack, places))]
        return [([w for w in requests if w.bundle.digest == digest], _alone) for digest in digests]

    def _answers(
        self, batch: Sequence[_Waiting], act: SharedPass, greedy: bool, number: int
    ) -> list[Answer | ArmError]:
        """Return one answer per request of one pass, or the error in its place."""
        try:
            answers = act(batch, None if greedy else self._noise)
        except Exception as error:  # each request reports the error, and later passes run
            if len(batch) == 1:
                return [ArmError(f"its pass failed: {error!r}", number)]
            # Each request is checked by itself, so that a bad input fails only its own request.
            return [self._answers([w], _alone, greedy, number)[0] for w in batch]
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


def _stack(bundles: Mapping[str, Bundle]) -> _StackedBundles:
    places = {digest: place for place, digest in enumerate(bundles)}
    alike = bool(bundles) and can_stack(list(bundles.values()))
    return _StackedBundles(places, Stack(list(bundles.values())) if alike else None)


class ArmBatcher:
    """An arm in this process, whose requests share forward passes with those of the other arms of its `PassBatcher`."""

    def __init__(self, bundle: Bundle, passes: PassBatcher):
        self.bundle = bundle
        self._passes = passes
        passes.join(bundle)

    def act(
        self, observations: ArraysByAgent, greedy: bool, masks: ArraysByAgent | None = None
    ) -> "asyncio.Future[Answer]":
        """Return the actions and log-probabilities for one request.

        `masks` has the allowed actions of those agents that gave any. Raises ArmError if the pass fails, NotFiniteError
        if a log-probability is not finite.
        """
        return self._passes.act(self.bundle, observations, greedy, masks or {})

    def close(self) -> None:
        """See `Arm.close`; leaves the shared passes."""
        self._passes.leave(self.bundle)
