"""Arms of actor-critics in this process.

Requests that arrive together share a forward pass, and none waits for more.
"""

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
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.serving.arms.errors import ArmError, NotFiniteError, new_pass_number
from marl_ray.serving.arms.protocol import Answer, ArraysByAgent


@dataclass(slots=True)
class _WaitingRequest:
    """A request until its pass has answered it."""

    bundle: ActorCriticBundle
    observations: ArraysByAgent
    masks: ArraysByAgent
    greedy: bool
    answer: "asyncio.Future[Answer]"


SharedPass = Callable[[Sequence[_WaitingRequest], np.random.Generator | None], list[Answer]]
"""Computes the answers of requests; the generator samples their actions, which are greedy without one."""


def _act_alone(batch: Sequence[_WaitingRequest], noise: np.random.Generator | None) -> list[Answer]:
    """Compute the requests of one bundle that share a pass."""
    return batch[0].bundle.act([request.observations for request in batch], noise, [request.masks for request in batch])


def _act_stacked(
    stack: Stack, places: Mapping[str, int], batch: Sequence[_WaitingRequest], noise: np.random.Generator | None
) -> list[Answer]:
    """Compute the requests of several bundles that share a pass.

    `places` maps a bundle's digest to its place in the stack.
    """
    stack_places = [places[request.bundle.digest] for request in batch]
    return stack.act(
        [request.observations for request in batch], stack_places, noise, [request.masks for request in batch]
    )


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
        self._waiting: list[_WaitingRequest] = []
        self._changing = threading.Lock()
        self._bundles: dict[str, ActorCriticBundle] = {}
        """Digest -> bundle. Read and changed with the lock held, as is `_arms`."""
        self._arms: Counter[str] = Counter()
        """Digest -> number of arms with this bundle."""
        self._stacked = _stack_bundles({})

    def join(self, bundle: ActorCriticBundle) -> None:
        """Add another arm's bundle. From any thread; it blocks while the weights are stacked."""
        with self._changing:
            self._arms[bundle.digest] += 1
            if self._arms[bundle.digest] == 1:
                self._bundles[bundle.digest] = bundle
                self._stacked = _stack_bundles(self._bundles)

    def leave(self, bundle: ActorCriticBundle) -> None:
        """Remove an arm's bundle, unless another arm has the same one. From any thread, once for each `join`."""
        with self._changing:
            self._arms[bundle.digest] -= 1
            if self._arms[bundle.digest] == 0:
                del self._arms[bundle.digest], self._bundles[bundle.digest]
                self._stacked = _stack_bundles(self._bundles)

    def act(
        self, bundle: ActorCriticBundle, observations: ArraysByAgent, greedy: bool, masks: ArraysByAgent
    ) -> "asyncio.Future[Answer]":
        """Return the actions and log-probabilities of one request.

        Raises ArmError if its pass fails, NotFiniteError if one of its numbers is not finite.
        """
        loop = asyncio.get_running_loop()
        waiting = _WaitingRequest(bundle, observations, masks, greedy, loop.create_future())
        if not self._waiting:
            # Runs after all callbacks that are ready now, so the pass includes all requests that have just arrived.
            loop.call_soon(self._run)
        self._waiting.append(waiting)
        return waiting.answer

    def _run(self) -> None:
        """Compute all waiting requests."""
        waiting = self._waiting
        self._waiting = []
        for greedy in (True, False):
            requests = [request for request in waiting if request.greedy is greedy and not request.answer.done()]
            for part, act in self._group_by_pass(requests):
                for batch in self._split_into_batches(part):
                    for request, answer in zip(
                        batch, self._compute_answers(batch, act, greedy, new_pass_number()), strict=True
                    ):
                        if isinstance(answer, ArmError):
                            request.answer.set_exception(answer)
                        else:
                            request.answer.set_result(answer)

    def _group_by_pass(self, requests: list[_WaitingRequest]) -> list[tuple[list[_WaitingRequest], SharedPass]]:
        """Return the groups of requests that may share a pass, each with the function that computes it."""
        if not requests:
            return []
        digests = {request.bundle.digest for request in requests}
        places, stack = self._stacked
        if stack is not None and digests <= places.keys():
            return [(requests, partial(_act_stacked, stack, places))]
        return [
            ([request for request in requests if request.bundle.digest == digest], _act_alone) for digest in digests
        ]

    def _compute_answers(
        self, batch: Sequence[_WaitingRequest], act: SharedPass, greedy: bool, number: int
    ) -> list[Answer | ArmError]:
        """Return one answer per request of one pass, or the error in its place."""
        try:
            answers = act(batch, None if greedy else self._noise)
        except Exception as error:  # each request reports the error, and later passes run
            if len(batch) == 1:
                return [ArmError(f"its pass failed: {error!r}", number)]
            # Each request is checked by itself, so that a bad input fails only its own request.
            return [self._compute_answers([request], _act_alone, greedy, number)[0] for request in batch]
        return [
            answer
            if all(math.isfinite(log_prob) for _, log_prob in answer.values())
            else NotFiniteError("log-probabilities are not finite", number)
            for answer in answers
        ]

    def _split_into_batches(self, waiting: list[_WaitingRequest]) -> list[list[_WaitingRequest]]:
        batches: list[list[_WaitingRequest]] = []
        size = self._max_batch
        for request in waiting:
            if size + len(request.observations) > self._max_batch:
                batches.append([])
                size = 0
            batches[-1].append(request)
            size += len(request.observations)
        return batches


def _stack_bundles(bundles: Mapping[str, ActorCriticBundle]) -> _StackedBundles:
    """Stack the weights of these bundles, by digest, if their policies have the same architecture."""
    places = {digest: place for place, digest in enumerate(bundles)}
    is_stackable = bool(bundles) and can_stack(list(bundles.values()))
    return _StackedBundles(places, Stack(list(bundles.values())) if is_stackable else None)


class ArmBatcher:
    """An arm in this process, whose requests share forward passes with those of the other arms of its `PassBatcher`."""

    def __init__(self, bundle: ActorCriticBundle, passes: PassBatcher):
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
