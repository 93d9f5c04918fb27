"""Play the next batch while the team learns from the last one, for environments whose steps are slow."""

import base64
import copy
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.policies.actor_critic.compiled.network import CompiledNetwork
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.rollout.actor_critic.collector import ActorCriticBatch, ActorCriticCollector
from marl_ray.rollout.group_scores import GroupSums

BEHAVIOUR_KEY = "behaviour"
"""Key of a collector's state: policy -> the weights and normalisers that play the batch which is under way."""
BATCH_S = 86_400.0
"""Maximum seconds that a batch may take: a day, so that only a hung environment meets it."""
CLOSE_S = 30.0
"""Seconds that closing waits for a batch that nobody will learn from. It may hide an error for so long."""

_log = logging.getLogger(__name__)


class OverlappedCollector:
    """A `BatchCollector` that plays one batch ahead in its own thread.

    The first batch is played by the newest weights, and each later one by the weights that the update beside it begins with.
    So the weights that learn from a batch are one update newer than those that played it, whatever the timing, and the
    recorded log-probabilities are those of the latter.
    """

    def __init__(self, collector: ActorCriticCollector, is_last: Callable[[], bool], state: JsonMapping | None = None):
        """Play by `collector`, which was made of `state`.

        Where `is_last()` is True when a batch is handed out, none is played after it.
        """
        self._inner, self._is_last = collector, is_last
        self._saved: Mapping[str, object] | None = (state or {}).get(BEHAVIOUR_KEY)
        self._before = collector.snapshot()
        """The collector's state before the batch that is under way, which a resumed run plays again."""
        self._behaviour: dict[str, Player] | None = None
        """The players of the batch that is under way."""
        self._batch: Future[ActorCriticBatch] | None = None
        self.running_episodes: list[tuple[int, int]] = collector.running_episodes
        self.group_sums: Mapping[str, GroupSums] = collector.group_sums

    def collect(self, players: Mapping[str, Player], iteration: int) -> ActorCriticBatch:
        """Wait for the batch of this iteration, and begin to play the next one by a copy of `players`.

        Raises MarlRayError if the batch is not played within BATCH_S seconds, and the errors of playing it.
        """
        if self._batch is None:
            copied = dict(players) if self._saved is None else _restore_players(players, self._saved)
            self._batch = self._begin(copied, iteration)
        if not wait([self._batch], BATCH_S).done:
            raise MarlRayError(f"the batch of iteration {iteration + 1} was not played within {BATCH_S:g} s")
        batch = self._batch.result()
        self._batch = None
        self._behaviour = None
        self._saved = None
        self.running_episodes, self.group_sums = self._inner.running_episodes, self._inner.group_sums
        self._before = self._inner.snapshot()
        if not self._is_last():
            self._behaviour = copy.deepcopy(dict(players))
            self._batch = self._begin(self._behaviour, iteration + 1)
        return batch

    def state(self) -> JsonObject:
        """Return plain data from which other collectors, on any number of workers, continue bit for bit."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], JsonObject]:
        """Return the function that makes `state()` of this moment, in another thread and while play continues."""
        before, behaviour, saved = self._before, self._behaviour, self._saved

        def state() -> JsonObject:
            plain = saved if behaviour is None else {name: _player_state(player) for name, player in behaviour.items()}
            return before() | ({} if plain is None else {BEHAVIOUR_KEY: plain})

        return state

    def close(self) -> None:
        """Close the environments, once the batch that is under way is over.

        If that takes more than CLOSE_S seconds, the batch's thread closes them at its end, and a warning says so.
        """
        if self._batch is None or wait([self._batch], CLOSE_S).done:
            self._inner.close()
            return
        _log.warning("the batch under way was not played within %g s; its environments close when it ends", CLOSE_S)
        self._batch.add_done_callback(lambda _: self._inner.close())

    def _begin(self, players: Mapping[str, Player], iteration: int) -> Future[ActorCriticBatch]:
        """Begin to play the batch of an iteration, in a daemon: one that hangs keeps no process alive."""
        batch = Future[ActorCriticBatch]()

        def play() -> None:
            try:
                batch.set_result(self._inner.collect(players, iteration))
            except BaseException as error:
                batch.set_exception(error)

        threading.Thread(target=play, name="rollout", daemon=True).start()
        return batch


def _player_state(player: Player) -> dict[str, object]:
    """Return the part of a player that training changes."""
    weights = parameters_to_vector(player.model.parameters()).numpy().astype("<f4")
    return {
        "weights": base64.b64encode(weights.tobytes()).decode(),
        "value_norm": vars(player.value_norm),
        "cost_norms": [vars(norm) for norm in player.cost_norms],
    }


def _restore_players(players: Mapping[str, Player], saved: Mapping[str, Any]) -> dict[str, Player]:
    """Return the players that `_player_state` was made of, from others of equal policies."""
    restored = {}
    for name, player in players.items():
        model, plain = copy.deepcopy(player.model), saved[name]
        weights = np.frombuffer(base64.b64decode(plain["weights"]), "<f4").astype(np.float32)
        vector_to_parameters(torch.from_numpy(weights), model.parameters())
        norms = ValueNorm(**plain["value_norm"]), tuple(ValueNorm(**norm) for norm in plain["cost_norms"])
        networks = [] if player.actor is None else [model.actor, *model.critics]
        restored[name] = Player(model, player.agents, *norms, *map(CompiledNetwork, networks))
    return restored
