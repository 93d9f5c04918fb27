"""Language models play copies of a text environment, in waves of one turn of every copy.

In a wave each policy answers, in one call of its engine, all copies in which an agent of the policy acts next; then
these copies step side by side. An episode depends only on its task and on its own random streams, so neither the number
of workers nor the order of waves changes a result.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pettingzoo import AECEnv

from marl_ray.closing import Unfinished, close_all
from marl_ray.config.random_streams import ORDER_BITS
from marl_ray.deadlines.side_by_side import CallTimeoutError, run_side_by_side
from marl_ray.envs.batch import group_positions
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.prompting.prompts import PromptTooLongError, fit_prompt
from marl_ray.rollout.group_scores import GroupSums, is_informative
from marl_ray.rollout.protocol import CollectPlan, Gather
from marl_ray.rollout.rng import EVALUATION_STREAMS, TRAINING_STREAMS, episode_seed, permutation, response_stream
from marl_ray.rollout.text.branching import Branch, keep_state, make_branches
from marl_ray.rollout.text.curriculum import Curriculum
from marl_ray.rollout.text.episode import EpisodeStart, EpisodeTurn, TextCopy, TextEpisode
from marl_ray.rollout.text.responses import ResponseRow, TokenPlayer, to_trajectories
from marl_ray.rollout.text.transcripts import MetricSums, Transcript, make_transcript, sum_metrics
from marl_ray.trajectories import Trajectories

MAX_THREADS = 32
"""Maximum number of copies that step at once."""
STEP_S = 600.0
"""Seconds that a step or reset of an environment may take."""
KEPT_TRANSCRIPTS = 2
"""Episodes of an iteration, over all workers, that are kept as text."""
TRANSCRIPT_ORDER = (1 << ORDER_BITS) - 2
"""Number of the permutation that draws the episodes of transcripts, in place of a minibatch order's epoch."""


class TextBatch(NamedTuple):
    """The gathered batch; the first three fields are those of `ActorCriticBatch`."""

    trajectories: dict[str, Trajectories]
    """Policy -> its rows, one per response."""
    episodes: list[TextEpisode]
    """The last episode of each copy."""
    steps: int
    """Turns of all agents in the batch's play. An episode whose first prompt nobody could read counts as one."""
    sums: MetricSums
    """Sums of the metrics of roles and environment; `transcripts.mean_metrics` turns all workers' sums into means."""
    transcripts: list[Transcript]
    """Transcripts of the drawn episodes that this worker played."""


class TextCollector:
    """Plays this worker's copies of a text environment, one whole episode of each per batch."""

    def __init__(
        self,
        make: Callable[[], AECEnv],
        agents: Mapping[str, Sequence[str]],
        copies: range,
        plan: CollectPlan,
        seed: int,
        signals: int = 1,
        state: JsonMapping | None = None,
        gather: Gather = lambda value: [value],
        curriculum: str | None = None,
        deadline_s: float = STEP_S,
    ):
        """Begin at the first episodes, or continue from `state`, which `state()` of other collectors returned.

        `make` returns a new copy of the environment; `agents` are policy -> its agents. `copies` are the numbers of
        this worker's copies among all, in whole groups of `plan.group_size`. `gather` returns every worker's plain
        value by rank; all workers collect together. The collectors of `state` may have been on any number of workers.
        `curriculum` is `train.curriculum`. Where the collector cannot be made, the copies that it has made are closed.
        """
        saved = state or {}
        with Unfinished() as unfinished:
            self.copies = [TextCopy(unfinished.keep(make()), number, signals, plan.steps, agents) for number in copies]
            env = self.copies[0].env
            group_positions(env.possible_agents, list(agents.values()))
            self.curriculum = Curriculum(curriculum, env, saved.get("solved", {})) if curriculum else None
            unfinished.pop_all()
        self.numbers = {agent: number for number, agent in enumerate(env.possible_agents)}
        self.plan = plan
        self.seed = seed
        self.signals = signals
        self.gather = gather
        self.deadline_s = deadline_s
        self.groups: dict[int, list[TextCopy]] = {}
        for copy in self.copies:
            self.groups.setdefault(copy.number // plan.group_size, []).append(copy)
        self.position: int = saved.get("position", 0)
        """Number of groups that all workers have played. Without a curriculum it is the index of the next task."""
        self.group_sums: dict[str, GroupSums] = {}
        """Policy -> how its scores differed among the members of the last batch's groups."""

    def state(self) -> JsonObject:
        """Return plain data, the same on every worker, from which collectors on any number of workers continue."""
        solved = {"solved": self.curriculum.state()} if self.curriculum else {}
        return {"position": self.position, **solved}

    def snapshot(self) -> Callable[[], JsonObject]:
        """Return the function that returns `state()` of this moment."""
        state = self.state()
        return lambda: state

    @property
    def running_episodes(self) -> list[tuple[int, int]]:
        """The episodes that the next batch continues with: none, because a batch is whole episodes."""
        return []

    def close(self) -> None:
        """Close the environment copies, also behind one that fails."""
        close_all(copy.env.close for copy in self.copies)

    def collect(self, players: Mapping[str, TokenPlayer], iteration: int) -> TextBatch:
        """Play one episode of every copy.

        Groups whose members all score the same are played again on other tasks, at most `plan.refills` times.
        """
        refill_agents = {agent for name in self.plan.refill_policies for agent in players[name].agents}
        comparing = {agent for name in self.plan.comparing for agent in players[name].agents}
        pending, steps, total = list(self.groups), 0, 0
        self.group_sums = dict.fromkeys(players, GroupSums())
        outcomes: list[tuple[int, int, float]] = []
        for attempt in range(self.plan.refills + 1):
            all_pending = sorted(group for part in self.gather(pending) for group in part)
            if not all_pending:
                break
            total = total or len(all_pending) * self.plan.group_size
            positions = {group: self.position + place for place, group in enumerate(all_pending)}
            self.position += len(all_pending)
            for group in pending:
                self._begin_group(self.groups[group], positions[group], iteration, attempt)
            playing = [copy for group in pending for copy in self.groups[group]]
            self._play(players, playing, comparing)
            # A prompt that nobody can read counts too, so that a run of such tasks alone comes to its last step.
            steps += sum(max(1, len(copy.turns)) for copy in playing)
            for name, player in players.items():
                self.group_sums[name] += GroupSums.from_scores(
                    [_scores(self.groups[g], player.agents) for g in pending]
                )
            if self.curriculum:
                outcomes += [(positions[group], *_group_outcome(self.groups[group])) for group in pending]
            pending = [
                group for group in pending if refill_agents and not _is_informative(self.groups[group], refill_agents)
            ]
        if self.curriculum:
            all_outcomes = sorted(outcome for part in self.gather(outcomes) for outcome in part)
            self.curriculum.add((index, share) for _, index, share in all_outcomes)
        teaching = [group for group in self.groups if group not in pending]
        branched = [branch for group in teaching for branch in make_branches(group, self.groups[group])]
        self._play_to_ends(players, [branch.copy for branch in branched])
        steps += sum(len(branch.copy.turns) - branch.shared_turns for branch in branched)
        batch = {}
        for name, player in players.items():
            # Groups whose members still score the same are left out of the means.
            counted = teaching if name in self.plan.refill_policies else list(self.groups)
            batch[name] = to_trajectories(player, self._rows(player.agents, counted, branched), self.signals)
        drawn = permutation(self.seed, iteration, TRANSCRIPT_ORDER, total)[:KEPT_TRANSCRIPTS]
        transcripts = [make_transcript(copy) for copy in self.copies if copy.number in drawn]
        episodes = [copy.episode() for copy in self.copies]
        return TextBatch(batch, episodes, steps, sum_metrics(self.copies), transcripts)

    def play(
        self,
        players: Mapping[str, TokenPlayer],
        indices: Sequence[int],
        split: str = "test",
        greedy: bool = False,
        samples: int = 1,
        key: int = 0,
    ) -> list[TextEpisode]:
        """Play `samples` episodes of every task of `indices`, task by task. Training's play and state do not change.

        Random streams are numbered (EVALUATION_STREAMS, key, sample, index, agent, turn). The streams do not depend on
        the worker, and training never uses them.
        """
        jobs = [(index, sample) for index in indices for sample in range(samples)]
        episodes: list[TextEpisode] = []
        for first in range(0, len(jobs), len(self.copies)):
            playing = list(zip(self.copies, jobs[first : first + len(self.copies)], strict=False))
            for copy, (index, sample) in playing:
                seed = episode_seed(self.seed, index, EVALUATION_STREAMS)
                copy.begin(EpisodeStart(index, split, seed, greedy, (EVALUATION_STREAMS, key, sample, index), sample))
            self._play(players, [copy for copy, _ in playing])
            episodes += [copy.episode() for copy, _ in playing]
        return episodes

    def _begin_group(self, members: Sequence[TextCopy], position: int, iteration: int, attempt: int) -> None:
        """Begin the copies' next episodes; the members of a group get the same task and the same seed."""
        index = self.curriculum.task(position) if self.curriculum else position
        seed = episode_seed(self.seed, position, TRAINING_STREAMS)
        for copy in members:
            greedy = self.plan.has_greedy_copies and copy.number % self.plan.group_size == 0
            copy.begin(EpisodeStart(index, "train", seed, greedy, (TRAINING_STREAMS, iteration, attempt, copy.number)))

    def _rows(self, agents: Sequence[str], groups: Sequence[int], branched: Sequence[Branch]) -> list[ResponseRow]:
        """Return the turns of these agents in the copies of these groups, and the first turn of each branch.

        The turns are ordered by group. So the rows of all workers, from which minibatches are drawn, have the order
        that they have on one worker.
        """
        rows: list[ResponseRow] = []
        for group in groups:
            rows += [
                ResponseRow(turn, copy.number, group, copy.start.greedy)
                for copy in self.groups[group]
                for turn in copy.turns
            ]
            rows += [branch.row for branch in branched if branch.group == group]
        return [row for row in rows if row.turn.agent in agents]

    def _play(
        self, players: Mapping[str, TokenPlayer], copies: Sequence[TextCopy], comparing: Collection[str] = ()
    ) -> None:
        """Play the episodes that `copies` have begun to their ends.

        States are kept for branches where agents of `comparing` act.
        """
        self.run_side_by_side(copies, TextCopy.reset)
        trunks = [copy for copy in copies if comparing and copy.number % self.plan.group_size == 0]
        self._play_to_ends(players, copies, trunks, comparing)

    def _play_to_ends(
        self,
        players: Mapping[str, TokenPlayer],
        copies: Sequence[TextCopy],
        trunks: Sequence[TextCopy] = (),
        comparing: Collection[str] = (),
    ) -> None:
        """Play the running episodes of `copies` to their ends.

        `trunks` and `comparing` are those of branches.
        """
        while playing := [copy for copy in copies if copy.agent]:
            for copy in trunks:
                keep_state(copy, self.plan.branch_turns, comparing)
            for player in players.values():
                answering = [copy for copy in playing if copy.agent in player.agents]
                if answering:
                    self._answer_prompts(player, answering)
            self.run_side_by_side([copy for copy in playing if copy.agent], TextCopy.step)

    def _answer_prompts(self, player: TokenPlayer, copies: Sequence[TextCopy]) -> None:
        """Play one turn of every copy whose prompt fits, in one call of the policy's engine.

        The other copies end.
        """
        policy = player.policy
        encoded: dict[str, tuple[list[int], bool] | None] = {}
        prompted, prompts, numbers = [], [], []
        for copy in copies:
            if copy.observation not in encoded:  # members of a group begin with the same prompt, which is encoded once
                encoded[copy.observation] = _encode_observation(player, copy)
            if (fitted := encoded[copy.observation]) is None:
                copy.end_unreadable()
                continue
            number = sum(turn.agent == copy.agent for turn in copy.turns)
            stream = response_stream(*copy.start.stream, self.numbers[copy.acting_agent], number)
            prompted.append((copy, fitted[1]))
            prompts.append(Prompt(tuple(fitted[0]), stream, copy.start.greedy))
            numbers.append(number)
        if not prompts:
            return
        completions = player.engine.generate(prompts, self.seed)
        written = {completion.version for completion in completions}
        if written != {policy.version}:
            raise MarlRayError(
                f"generation.engine={policy.generation.engine}: responses are of versions {sorted(written)} of the weights, "
                f"expected {policy.version}"
            )
        for (copy, shortened), number, prompt, completion in zip(prompted, numbers, prompts, completions, strict=True):
            response = policy.tokenizer.decode(
                completion.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            costs = np.zeros(self.signals)
            fields = copy.acting_agent, number, list(prompt.ids), completion, copy.observation, response, costs
            copy.turns.append(EpisodeTurn(*fields, shortened=shortened))

    def run_side_by_side(self, copies: Sequence[TextCopy], call: Callable[[TextCopy], None]) -> None:
        """Call a method of all copies in threads. Raises MarlRayError that names the copy that took too long."""
        calls = [(lambda copy=copy: call(copy)) for copy in copies]
        try:
            run_side_by_side(calls, MAX_THREADS, self.deadline_s)
        except CallTimeoutError as error:
            copy = copies[error.index]
            raise MarlRayError(f"{copy.where()}: {call.__name__} took over {self.deadline_s:g} s") from error


def _encode_observation(player: TokenPlayer, copy: TextCopy) -> tuple[list[int], bool] | None:
    """Encode the observation of a copy's agent.

    Returns the token ids, and True if the text was shortened; or None if it still does not fit.
    """
    policy = player.policy
    room = policy.config.context - policy.generation.max_tokens
    with copy.name_errors():
        try:
            return fit_prompt(policy.tokenizer, copy.observation, policy.config.chat, room)
        except PromptTooLongError:
            return None


def _is_informative(members: Sequence[TextCopy], refill_agents: set[str]) -> bool:
    """Return True if some agent of `refill_agents` scored differently in two members that do not play greedily."""
    return is_informative(_scores(members, refill_agents))


def _scores(members: Sequence[TextCopy], agents: Iterable[str]) -> np.ndarray:
    """Return the scores (members that do not play greedily, agents) of a group."""
    return np.array([[copy.rewards[agent] for agent in agents] for copy in members if not copy.start.greedy])


def _group_outcome(members: Sequence[TextCopy]) -> tuple[int, float]:
    """Return the index of a group's task, and the share of its members that solved it.

    A member that was truncated did not solve it.
    """
    solved = [False if copy.truncated and copy.solved is None else copy.solved for copy in members]
    if None in solved:
        raise MarlRayError(f'train.curriculum: {members[0].where()} reports no infos[agent]["solved"]')
    return members[0].start.index, solved.count(True) / len(solved)
