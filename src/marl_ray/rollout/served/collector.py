"""Collect batches of served responses instead of playing. Evaluations are played as `TextCollector` plays them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pettingzoo import AECEnv

from marl_ray.config.random_streams import ORDER_BITS
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.policies.engines.base import Completion
from marl_ray.rollout.group_scores import GroupSums
from marl_ray.rollout.protocol import CollectPlan, Gather
from marl_ray.rollout.rng import permutation
from marl_ray.rollout.text.collector import TextBatch, TextCollector
from marl_ray.rollout.text.episode import EpisodeTurn
from marl_ray.rollout.text.responses import ResponseRow, TokenPlayer, to_trajectories
from marl_ray.rollout.text.transcripts import MetricSums

DATA_ORDER = (1 << ORDER_BITS) - 3
"""Number of the permutations in which data are read; it takes the place that the epoch has in minibatch orders."""


class ServedResponse(NamedTuple):
    """One response to learn from."""

    agent: str
    prompt_ids: np.ndarray
    """(P,) int32."""
    ids: np.ndarray
    """(T,) int32."""
    log_probs: np.ndarray
    """(T,) float32, log-probabilities under the policy that wrote the response; zeros where they are not known."""
    reward: float
    ended: bool
    """True if the response ended by itself, and not by a limit or a client that left."""


ResponseBlock = tuple[ServedResponse, ...]
"""Responses that must be in one batch: the responses to one prompt, or a pair whose first response was preferred."""


class ServedCollector(TextCollector):
    """This worker's part of each batch.

    A pass over the data reads every block once, in an order drawn by the seed.
    """

    def __init__(
        self,
        make: Callable[[], AECEnv],
        agents: Mapping[str, Sequence[str]],
        copies: range,
        plan: CollectPlan,
        seed: int,
        signals: int,
        state: JsonMapping | None,
        gather: Gather,
        data: Mapping[str, Sequence[ResponseBlock]],
        size: int,
    ):
        """Take the arguments of `TextCollector` and two more, `data` and `size`.

        `data` are the blocks of each policy that learns, the same on every worker. A batch has blocks of `size`
        responses of each policy over all workers; the last batch of a pass may have fewer. Raises MarlRayError if `state`
        is of other data.
        """
        self.data, self.size = data, size
        self.worker = copies.start // max(len(copies), 1)
        self.workers = len(gather(None))
        self.digest = _digest(data)
        saved = state or {"digest": self.digest}
        if saved.get("digest") != self.digest:  # the state of a run that played holds no blocks
            raise MarlRayError("data: is not what this run began to learn from; expected the same, or another `name`")
        self.read: dict[str, int] = saved.get("read", dict.fromkeys(data, 0))
        """Policy -> number of its blocks that all workers have read, over all passes."""
        super().__init__(make, agents, copies, plan, seed, signals, state, gather)  # last, because it opens the copies

    def state(self) -> JsonObject:
        """Return plain data for a checkpoint, like `TextCollector.state`."""
        return {"read": dict(self.read), "digest": self.digest}

    def snapshot(self) -> Callable[[], JsonObject]:
        """Return the function that returns `state()` of this moment."""
        state = self.state()
        return lambda: state

    def collect(self, players: Mapping[str, TokenPlayer], iteration: int) -> TextBatch:
        """Return the next batch of every policy that learns; nothing is played."""
        trajectories, sums, steps = {}, MetricSums(), 0
        self.group_sums = {}
        for name in self.data:
            blocks = self._take_blocks(name)
            # A block is a group, so that comparisons do not depend on which blocks a worker has.
            rows = [
                ResponseRow(_to_turn(response, self.signals), number, group, False)
                for number, (group, response) in enumerate(
                    (g, response) for g, block in enumerate(blocks) for response in block
                )
            ]
            trajectories[name] = to_trajectories(players[name], rows, self.signals)
            self.group_sums[name] = GroupSums.from_scores(
                [np.array([[response.reward] for response in block]) for block in blocks]
            )
            steps += len(rows)
            for response in sum(blocks, ()):
                metrics = {"reward": response.reward, "response_tokens": len(response.ids), "ended": response.ended}
                for key, value in metrics.items():
                    total, count = sums.get(f"{response.agent}/{key}", (0.0, 0))
                    sums[f"{response.agent}/{key}"] = total + float(value), count + 1
            sums[f"data/{name}/passes"] = self.read[name] / len(self.data[name]), 1
        return TextBatch(trajectories, [], steps, sums, [])

    def _take_blocks(self, name: str) -> list[ResponseBlock]:
        """Return this worker's blocks of the next batch."""
        blocks = self.data[name]
        number, place = divmod(self.read[name], len(blocks))
        order = permutation(self.seed, number, DATA_ORDER, len(blocks))
        taken: list[ResponseBlock] = []
        while place + len(taken) < len(blocks) and sum(map(len, taken)) < self.size:
            taken.append(blocks[order[place + len(taken)]])
        self.read[name] += len(taken)
        # Each worker takes one stretch, so that the rows of all workers have the order that they have on one worker.
        bounds = [len(taken) * worker // self.workers for worker in (self.worker, self.worker + 1)]
        return taken[bounds[0] : bounds[1]]


def _to_turn(response: ServedResponse, signals: int) -> EpisodeTurn:
    completion = Completion(response.ids.tolist(), response.log_probs.tolist(), response.ended)
    costs = np.zeros(signals)
    return EpisodeTurn(response.agent, 0, response.prompt_ids.tolist(), completion, "", "", costs, response.reward)


def _digest(data: Mapping[str, Sequence[ResponseBlock]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, blocks in data.items():
        for block in blocks:
            digest.update(f"{name} {len(block)} ".encode())
            for response in block:
                digest.update(
                    f"{response.agent} {response.reward!r} {len(response.prompt_ids)} {len(response.ids)} ".encode()
                )
                for array in (response.prompt_ids, response.ids, response.log_probs):
                    digest.update(array.tobytes())
    return digest.hexdigest()
