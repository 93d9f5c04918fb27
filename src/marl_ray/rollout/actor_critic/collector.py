"""Play many environment copies in step, with one batch of actions per policy."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from pettingzoo import ParallelEnv

from marl_ray.config.random_streams import ATTEMPT_BITS
from marl_ray.envs.arrays import ArrayBatch
from marl_ray.envs.batch import EnvBatch
from marl_ray.rollout.actor_critic.acting import choose_actions
from marl_ray.rollout.actor_critic.action_history import ActionHistory, unpack_actions
from marl_ray.rollout.actor_critic.buffers import Buffer, PlayedBatch, Player
from marl_ray.rollout.group_scores import GroupSums, is_informative
from marl_ray.rollout.protocol import CollectPlan
from marl_ray.rollout.rng import action_noise, episode_seed
from marl_ray.trajectories import Trajectories

if TYPE_CHECKING:
    from marl_ray.rollout.actor_critic.compiled_play import CompiledPlay


class ActorCriticEpisode(NamedTuple):
    """A finished episode."""

    step: int
    """Time index within the batch at which it ended."""
    copy: int
    """Number of its copy among the copies of all workers."""
    episode_return: float
    """Return: sum of rewards, averaged over the agents."""
    costs: tuple[float, ...]
    """The sum of each cost signal over steps and agents."""
    length: int
    """Environment steps."""
    start: int
    """Step at which it began. Every copy counts its steps since the run began; if a batch is whole episodes, this is
    the first step of the batch."""
    decisions: dict[str, int]
    """Policy -> number of its decisions in the whole episode, including the parts in earlier batches."""
    metrics: dict[str, float]
    """The numbers that the environment has reported of the episode, averaged over it."""


class ActorCriticBatch(NamedTuple):
    """The gathered batch."""

    trajectories: dict[str, Trajectories]
    """Policy -> its rows."""
    episodes: list[ActorCriticEpisode]
    steps: int
    """Environment steps that were played for the batch."""


class ActorCriticCollector:
    """Plays this worker's copies of an environment, batch by batch."""

    def __init__(
        self,
        env: ParallelEnv,
        envs: EnvBatch,
        agents: Mapping[str, Sequence[str]],
        copies: range,
        plan: CollectPlan,
        seed: int,
        signals: int = 1,
        state: Mapping[str, Any] | None = None,
    ):
        """Play the copies `envs`, whose agents are ordered by the policies of `agents` (policy -> its agents).

        `env` has the spaces. `copies` are the numbers of this worker's copies among all. With `state` the collector
        continues from what `state()` returned.
        """
        self.env = env
        self.envs = envs
        self.plan, self.seed, self.numbers, self.signals = plan, seed, copies, signals
        order = list(env.possible_agents)
        self.columns = {name: [order.index(agent) for agent in members] for name, members in agents.items()}
        """Policy -> the numbers of its agents among the environment's."""
        spaces = [env.action_space(members[0]) for members in agents.values()]
        self.dtypes = [np.dtype(space.dtype) for space in spaces]
        """The number type of an action, by policy."""
        self.shapes = [space.shape or () for space in spaces]
        """The shape of an action, by policy."""
        count = len(copies)
        self.episode = np.zeros(count, np.int64)
        """(copies,) number of each copy's running episode."""
        self.lengths = np.zeros(count, np.int64)
        """(copies,) steps of the running episode so far."""
        self.starts = np.zeros(count, np.int64)
        """(copies,) step of the run at which the running episode began."""
        self.returns = np.zeros(count)
        """(copies,) rewards of the running episode so far."""
        self.costs = np.zeros((count, signals))
        """(copies, signals) costs of the running episode so far."""
        self.decisions = np.zeros((count, len(agents)), np.int64)
        """(copies, policies) choices of all its agents in the running episode so far."""
        self.group_sums: dict[str, GroupSums] = {}
        """Policy -> how its scores differed among the members of the last batch's groups."""
        self.history = ActionHistory(count, len(agents))
        if not plan.has_whole_episodes:
            for c, number in enumerate(copies):
                self._begin_first_episode(c, (state or {}).get(str(number)))

    def state(self) -> dict[str, Any]:
        """Return plain data from which collectors of any number of workers continue bit for bit.

        Where the copies cannot replay, they begin the running episodes anew. The data is empty where a batch is whole
        episodes.
        """
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return the function that makes `state()` of this moment, in another thread and while play continues.

        A call of it takes longer than all else of a checkpoint.
        """
        if self.plan.has_whole_episodes:
            return dict
        pack_episode, episodes = self.history.snapshot(), self.episode.tolist()
        returns, costs, decisions = self.returns.tolist(), self.costs.tolist(), self.decisions.tolist()

        def state() -> dict[str, Any]:
            return {
                str(number): {
                    "episode": episodes[c],
                    "actions": pack_episode(c),
                    "return": returns[c],
                    "costs": costs[c],
                    "decisions": decisions[c],
                }
                for c, number in enumerate(self.numbers)
            }

        return state

    @property
    def running_episodes(self) -> list[tuple[int, int]]:
        """(start, steps played) of the episodes that the next batch continues with."""
        return (
            [] if self.plan.has_whole_episodes else list(zip(self.starts.tolist(), self.lengths.tolist(), strict=True))
        )

    def close(self) -> None:
        """Close the environment copies."""
        self.envs.close()

    def collect(self, players: Mapping[str, Player], iteration: int) -> ActorCriticBatch:
        """Play one batch of every policy."""
        buffers = {
            name: Buffer(self.env, player, self.columns[name], self.plan.steps, len(self.numbers), self.signals)
            for name, player in players.items()
        }
        copies, group_size = np.array(self.numbers), self.plan.group_size if self.plan.has_whole_episodes else 1
        greedy = (copies % group_size == 0) & self.plan.has_greedy_copies
        played = PlayedBatch(buffers, 0, {}, copies // group_size, self.episode.copy(), greedy)
        self.starts = iteration * self.plan.steps - self.lengths * (not self.plan.has_whole_episodes)
        if self.plan.has_whole_episodes:
            episodes, steps = self._whole_episodes(players, played, iteration)
        else:
            episodes, steps = self._play(players, played, iteration, restart=True)
            self.history.drop_ended()
        return ActorCriticBatch({name: played.trajectories(name, players) for name in players}, episodes, steps)

    def _whole_episodes(
        self, players: Mapping[str, Player], played: PlayedBatch, iteration: int
    ) -> tuple[list[ActorCriticEpisode], int]:
        """Play one episode per copy.

        Groups whose members all score the same are played again from other starts, at most `refills` times.
        """
        episodes: list[ActorCriticEpisode] = []
        steps, pending = 0, np.ones(len(self.numbers), bool)
        self.group_sums = dict.fromkeys(played.buffers, GroupSums())
        for attempt in range(self.plan.refills + 1):
            for c in np.flatnonzero(pending):
                start = episode_seed(self.seed, int(played.groups[c]), iteration << ATTEMPT_BITS | attempt)
                self._reset(int(c), start)
            for buffer in played.buffers.values():
                buffer.clear(pending)
            played.truncations = {key: rows for key, rows in played.truncations.items() if not pending[key[1]]}
            played.ends = {key: was_truncated for key, was_truncated in played.ends.items() if not pending[key[1]]}
            replayed, steps_more = self._play(players, played, iteration, restart=False, attempt=attempt)
            episodes = [e for e in episodes if not pending[e.copy - self.numbers[0]]] + replayed
            steps += steps_more
            self._add_group_scores(played, pending)
            pending = self._uninformative_copies(played)
            if not pending.any():
                break
        # Groups whose members still score the same are left out of the means.
        for name in self.plan.refill_policies:
            played.buffers[name].mask[:, pending] = False
        return episodes, steps

    def _add_group_scores(self, played: PlayedBatch, fresh: np.ndarray) -> None:
        """Add the scores of the groups of the copies `fresh`, (copies,) bool, to `group_sums`."""
        for name, buffer in played.buffers.items():
            scores = buffer.rewards[: played.steps].sum(0, dtype=np.float64)
            members = [(played.groups == group) & ~played.greedy for group in np.unique(played.groups[fresh])]
            self.group_sums[name] += GroupSums.from_scores([scores[is_member] for is_member in members])

    def _uninformative_copies(self, played: PlayedBatch) -> np.ndarray:
        """Return (copies,) bool, which is True for the members of groups from which nothing can be learned.

        Every agent of every policy of `refill_policies` scores the same in all members of such a group.
        """
        teaching = np.full(len(self.numbers), not self.plan.refill_policies)
        for name in self.plan.refill_policies:
            scores = played.buffers[name].rewards[: played.steps].sum(0, dtype=np.float64)
            for group in np.unique(played.groups):
                members = (played.groups == group) & ~played.greedy
                teaching[played.groups == group] |= is_informative(scores[members])
        return ~teaching

    def _play(
        self, players: Mapping[str, Player], played: PlayedBatch, iteration: int, restart: bool, attempt: int = 0
    ) -> tuple[list[ActorCriticEpisode], int]:
        """Play the copies that are not over; with `restart` ended ones begin their next episode.

        Returns the episodes that ended, and the number of environment steps that were played.
        """
        buffers, envs = played.buffers, self.envs
        widths = [player.model.distribution.noise * len(player.agents) for player in players.values()]
        numbers = action_noise(self.seed, iteration, self.numbers, self.plan.steps, sum(widths), attempt)
        noise = torch.from_numpy(numbers).split(widths, -1)
        compiled = self._make_compiled_play(players, played, noise, truncate_last=not restart)
        episodes: list[ActorCriticEpisode] = []
        t, steps_before = 0, int(self.lengths.sum())
        envs.observe([buffer.rows[0] for buffer in buffers.values()], np.flatnonzero(envs.alive.any(1)).tolist())
        while t < self.plan.steps and envs.alive.any():
            first = t
            if compiled is None:
                actions, playing, truncated = self._step(players, played, [part[t] for part in noise], t, not restart)
            else:
                t = compiled.play(t)
                actions = compiled.actions(first, t)
                playing, truncated = compiled.playing_copies, compiled.truncated_agents
            if restart:
                self.history.add_steps(actions)
            over = playing & ~envs.alive.any(1)
            if t + 1 == self.plan.steps and not restart:
                over |= envs.alive.any(1)
            rows = [buffer.rows[t + 1] for buffer in buffers.values()]
            for c in np.flatnonzero(truncated.any(1)):
                played.truncations[t, int(c)] = {name: buffer.rows[t + 1, c].copy() for name, buffer in buffers.items()}
            for c in np.flatnonzero(over):
                episodes.append(self._finish_episode(t, int(c)))
                played.ends[t, int(c)] = bool(truncated[c].any())
                if restart:
                    self._begin_next_episode(int(c))
                    self.starts[c] = iteration * self.plan.steps + t + 1
            if restart and over.any():
                envs.observe(rows, np.flatnonzero(over).tolist())
            for buffer, row in zip(buffers.values(), rows, strict=True):
                # An agent's last observation is not one that it acts on. Agents that are gone read as zeros.
                row[~envs.alive[:, buffer.columns]] = 0
            played.steps = max(played.steps, t + 1)
            t += 1
        ended = sum(episode.length for episode in episodes) if restart else 0
        return episodes, ended + int(self.lengths.sum()) - steps_before

    def _make_compiled_play(
        self, players: Mapping[str, Player], played: PlayedBatch, noise: Sequence[torch.Tensor], truncate_last: bool
    ) -> "CompiledPlay | None":
        """Return the compiled loop over this batch; None where environment and policies have none."""
        if not isinstance(self.envs, ArrayBatch):
            return None
        from marl_ray.rollout.actor_critic.compiled_play import CompiledPlay, has_compiled_loop  # loads numba

        if not has_compiled_loop(self.envs, players, played.buffers):
            return None
        counts = self.returns, self.costs, self.lengths, self.decisions
        return CompiledPlay(self.envs, players, played.buffers, noise, played.greedy, counts, truncate_last)

    def _step(
        self,
        players: Mapping[str, Player],
        played: PlayedBatch,
        noise: Sequence[torch.Tensor],
        t: int,
        truncate_last: bool,
    ) -> tuple[list[list[np.ndarray]], np.ndarray, np.ndarray]:
        """Play step `t`, whose uniforms are `noise`; with `truncate_last` the batch's last step truncates all agents.

        Returns the step's actions by policy, as the only ones of a list; the copies that played (copies,) bool; and
        who was truncated (copies, agents) bool.
        """
        buffers, envs = played.buffers, self.envs
        alive = envs.alive.copy()
        playing = np.asarray(alive.any(1))
        parts = list(zip(players.values(), buffers.values(), envs.action_masks, noise, strict=True))
        for p, (_, buffer, allowed, _) in enumerate(parts):
            buffer.permit(t, alive[:, buffer.columns], allowed)
            self.decisions[:, p] += buffer.mask[t].sum(1) * playing
        actions = [choose_actions(*part, t, alive[:, part[1].columns], played.greedy) for part in parts]
        step = envs.step(actions)
        # Agent after agent, as the compiled loop adds: NumPy's `sum` adds many of them in another order.
        team_costs, truncated = step.costs.cumsum(1)[:, -1], step.truncated
        self.returns += step.rewards.cumsum(1)[:, -1] / np.float32(step.rewards.shape[1])
        self.costs += team_costs
        self.lengths += playing
        if truncate_last and t + 1 == self.plan.steps:
            # An episode that reaches the time limit is truncated, and bootstraps from the value of the next state.
            truncated = truncated | envs.alive
        for buffer in buffers.values():
            columns = buffer.columns
            buffer.record(t, step.rewards[:, columns], team_costs, step.terminated[:, columns], truncated[:, columns])
        envs.observe([buffer.rows[t + 1] for buffer in buffers.values()], np.flatnonzero(playing).tolist())
        return [actions], playing, truncated

    def _finish_episode(self, t: int, c: int) -> ActorCriticEpisode:
        costs = tuple(self.costs[c].tolist())
        decisions = dict(zip(self.columns, self.decisions[c].tolist(), strict=True))
        counts = int(self.lengths[c]), int(self.starts[c])
        return ActorCriticEpisode(
            t, self.numbers[c], float(self.returns[c]), costs, *counts, decisions, self.envs.metrics(c)
        )

    def _reset(self, c: int, seed: int) -> None:
        self.returns[c] = 0.0
        self.costs[c] = 0.0
        self.lengths[c] = 0
        self.decisions[c] = 0
        self.envs.reset(c, seed)

    def _begin_next_episode(self, c: int) -> None:
        """Begin copy c's next episode."""
        self.episode[c] += 1
        self.history.begin_episode(c)
        self._reset(c, episode_seed(self.seed, self.numbers[c], int(self.episode[c])))

    def _begin_first_episode(self, c: int, saved: Mapping[str, Any] | None) -> None:
        """Begin copy c's first episode, or replay a saved one to the step that it had reached.

        A saved episode begins anew where the copies cannot replay.
        """
        if saved is not None:
            self.episode[c] = saved["episode"]
        seed = episode_seed(self.seed, self.numbers[c], int(self.episode[c]))
        if saved is None or not self.envs.can_replay:
            self.history.begin_episode(c)
            self._reset(c, seed)
            return
        parts = [
            unpack_actions(text, (len(columns), *shape), dtype)
            for text, columns, shape, dtype in zip(
                saved["actions"], self.columns.values(), self.shapes, self.dtypes, strict=True
            )
        ]
        steps = [list(step) for step in zip(*parts, strict=True)]
        self.envs.replay(c, seed, steps)
        self.returns[c], self.costs[c], self.lengths[c] = saved["return"], saved["costs"], len(steps)
        self.decisions[c] = saved["decisions"]
        self.history.insert_episode(c, steps)
