"""Groups at later turns: branches of a group's first episode, and what is learned where an answer has no other beside it."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import ValidationError
from toys.collectors import BOTH, EACH, Scripted, collector, on_two_workers, players, texts
from toys.text_envs import Talk
from toys.texts import TWO_AGENTS, TWO_POLICIES, config

from marl_ray.algorithms import algorithm_of
from marl_ray.algorithms.advantages.groups import comparable_rows
from marl_ray.config import SPECS
from marl_ray.envs.text.code_team import CodeTeam
from marl_ray.envs.text.react import React
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Prompt
from marl_ray.rollout.protocol import CollectPlan
from marl_ray.rollout.rng import TRAINING_STREAMS, response_stream
from marl_ray.training.single_process import process_group, train_alone

WORDS = ("a", "cat", "dog", "no", "banana", "stop")
PLAN = CollectPlan(6, has_whole_episodes=True, group_size=4, branch_turns=2, comparing=("shared",))
TALK = partial(Talk, 5)


def rewarded_words(
    engine: Scripted, copy: int, begun: tuple[str, ...] = (), attempt: int = 0
) -> list[tuple[str, float]]:
    """Words of an episode of Talk that begins with `begun`, each with its speaker's reward from there on: replayed."""
    env = TALK()
    env.reset(seed=0)
    words: list[str] = []
    paid = []
    while env.agents and not env.terminations[env.agent_selection]:
        agent = env.agent_selection
        number = sum(env.possible_agents[t % 2] == agent for t in range(len(words)))
        stream = response_stream(TRAINING_STREAMS, 0, attempt, copy, env.possible_agents.index(agent), number)
        ids = [i for i in engine.say(Prompt((1,), stream), 3).ids if i < 256]
        words.append(begun[len(words)] if len(words) < len(begun) else bytes(ids).decode())
        env.step(words[-1])
        paid.append(dict(env.rewards))
    speakers = [env.possible_agents[t % 2] for t in range(len(words))]
    return [(word, sum(step.get(speakers[t], 0.0) for step in paid[t:])) for t, word in enumerate(words)]


def test_members_answer_again_where_the_first_one_was_and_play_on():
    engine = Scripted(WORDS)
    batch = collector(TALK, BOTH, range(8), PLAN).collect(players(BOTH, engine), 0)
    data = batch.trajectories["shared"]
    turns = sum(episode.length for episode in batch.episodes)
    assert [episode.length for episode in batch.episodes] == [len(rewarded_words(engine, copy)) for copy in range(8)]
    expected, played = [], turns
    for first in (0, 4):
        for copy in range(first, first + 4):
            expected += [
                (copy, turn % 2, turn // 2, *spoken_turn)
                for turn, spoken_turn in enumerate(rewarded_words(engine, copy))
            ]
        trunk = [word for word, _ in rewarded_words(engine, first)]
        for turn, member in itertools.product(range(1, min(3, len(trunk))), range(first + 1, first + 4)):
            words = rewarded_words(engine, member, tuple(trunk[:turn]), turn << 32)
            played += len(words) - turn
            expected.append((member, turn % 2, turn // 2, *words[turn]))
    rewards = data.rewards.sum(1)
    rows = [
        (int(data.episode[r]), int(data.agent[r]), int(data.turn[r]), texts(data)[r], float(rewards[r]))
        for r in range(len(data.mask))
    ]
    assert sorted(rows) == sorted(expected)
    assert batch.steps == played and len(expected) - turns >= 9
    assert data.group.tolist() == [member // 4 for member, *_ in rows]
    # All that is compared are answers to one prompt, four at the trunk's turns; those of others at later turns are left out.
    compared_rows = comparable_rows(data, greedy=False)
    assert data.prompts is not None
    keys = torch.cat([torch.stack((data.group, data.agent, data.turn), 1), data.prompts], 1)
    sizes = [int((keys == key).all(1).sum()) for key in keys]
    assert compared_rows.tolist() == [size > 1 for size in sizes] and not compared_rows.all()
    trunks = [(int(data.episode[r]) % 4, int(data.turn[r] * 2 + data.agent[r])) for r in range(len(compared_rows))]
    assert all(size >= 4 for size, (member, turn) in zip(sizes, trunks, strict=True) if member == 0 and turn <= 2)


def test_branches_do_not_depend_on_the_number_of_workers():
    engine = Scripted(WORDS)
    single = collector(TALK, BOTH, range(8), PLAN).collect(players(BOTH, engine), 1).trajectories["shared"]
    parts = on_two_workers(
        lambda rank, gather: collector(TALK, BOTH, range(4 * rank, 4 * rank + 4), PLAN, gather=gather).collect(
            players(BOTH, engine), 1
        )
    )

    # In the same order too: minibatches are drawn by it.
    for key in ("episode", "agent", "turn", "group"):
        assert torch.equal(getattr(single, key), torch.cat([getattr(p.trajectories["shared"], key) for p in parts]))
    assert texts(single) == [text for part in parts for text in texts(part.trajectories["shared"])]


def test_only_turns_of_policies_that_compare_are_branched():
    plan = replace(PLAN, comparing=("second",))
    engine = Scripted(["a", "no"])
    batch = collector(TALK, EACH, range(8), plan).collect(players(EACH, engine), 0)
    turns = sum(episode.length for episode in batch.episodes)
    rows = {name: len(data.mask) for name, data in batch.trajectories.items()}
    # The first turn is the asker's, so of the two turns after it one is the teller's, in each of two groups.
    assert sum(rows.values()) == turns + 2 * 3
    assert (batch.trajectories["second"].turn == 0).sum() == 8 + 2 * 3


def test_the_greedy_member_is_the_baseline_of_branches():
    plan = replace(PLAN, has_greedy_copies=True)
    data = collector(TALK, BOTH, range(8), plan).collect(players(BOTH, Scripted(WORDS[:5])), 0).trajectories["shared"]
    compared_rows = comparable_rows(data, greedy=True)
    assert not compared_rows[data.greedy].any() and compared_rows[data.turn > 0].any()
    advantages, _ = algorithm_of("remax").advantages(data, SPECS["remax"].hyper())
    assert not advantages[~compared_rows].any() and advantages[compared_rows & (data.turn > 0)].any()


@pytest.mark.parametrize("algorithm", [name for name, spec in SPECS.items() if spec.groups])
def test_answers_to_other_prompts_say_nothing(algorithm):
    """Members whose prompts differ are as if they were not there."""
    judge = algorithm_of(algorithm)
    plan = replace(PLAN, has_greedy_copies=judge.spec.greedy, branch_turns=0)
    data = collector(TALK, BOTH, range(8), plan).collect(players(BOTH, Scripted(WORDS)), 0).trajectories["shared"]
    alone = ~comparable_rows(data, judge.spec.greedy) & ~data.greedy
    assert (data.turn[alone] > 0).any() and not alone[(data.turn == 0) & (data.agent == 0)].any()
    advantages, _ = judge.advantages(data, judge.spec.hyper.model_validate(dict(judge.spec.defaults)))
    assert not advantages[alone].any() and advantages[~alone].any()


def test_what_is_left_out_changes_nothing_and_is_counted():
    """Two turns of two agents: without branches the second agent has nobody beside it, whatever it earns."""
    with process_group():
        without = train_alone(config(TWO_POLICIES, TWO_AGENTS, "train.branch_turns=0"))
        branched = train_alone(config(TWO_POLICIES, TWO_AGENTS))
    assert without[-1]["second/left_out"] == 1 and without[-1]["second/grad_norm"] == 0
    assert branched[-1]["second/left_out"] < 0.7 and branched[-1]["second/grad_norm"] > 0
    assert without[-1]["first/left_out"] == branched[-1]["first/left_out"] == 0


def test_a_prompt_that_is_too_long_for_the_first_member_is_not_branched():
    class Long(Talk):
        def observe(self, agent: str) -> str:
            return super().observe(agent) + "x" * 5_000 * (len(self.actions_taken) == 2)

    batch = collector(Long, BOTH, range(4), PLAN).collect(players(BOTH, Scripted(WORDS[:5])), 0)
    assert [(episode.length, episode.truncated) for episode in batch.episodes] == [(2, True)] * 4
    data = batch.trajectories["shared"]
    # Three branches of the second turn, which the long prompt truncates too.
    assert len(data.mask) == 4 * 2 + 3 and batch.steps == 4 * 2 + 3


def test_an_environment_that_cannot_be_copied_is_one_line():
    class Locked(Talk):
        def __init__(self) -> None:
            super().__init__()
            self.lines = (line for line in ("a", "b"))

    with pytest.raises(MarlRayError) as caught:
        collector(Locked, BOTH, range(4), PLAN).collect(players(BOTH, Scripted(WORDS[:5])), 0)
    message = str(caught.value)
    assert message.startswith("environment talk, copy 0") and "\n" not in message
    assert "train.branch_turns: expected 0, or an environment that copy.deepcopy copies" in message


@pytest.mark.parametrize("make", [partial(CodeTeam, turns=3), React])
def test_a_copied_episode_goes_on_by_itself_and_shares_what_no_episode_changes(make):
    import copy

    env = make()
    env.reset(options={"index": 0})
    env.step("nothing")
    before = env.observe(env.agent_selection), env.agent_selection, dict(env.rewards)
    twin = copy.deepcopy(env)
    assert twin.train is env.train and twin.task is env.task
    assert (twin.observe(twin.agent_selection), twin.agent_selection, dict(twin.rewards)) == before
    for word in ("one", "two"):
        twin.step(word)
    assert (env.observe(env.agent_selection), env.agent_selection, dict(env.rewards)) == before
    env.step("one")
    env.step("two")
    assert env.observe(env.agent_selection) == twin.observe(twin.agent_selection)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.branch_turns=1", "algorithm=ppo"], "train.branch_turns=1: expected a language model whose algorithm"),
        (["train.branch_turns=2", "train.horizon=2"], "train.branch_turns=2 must be below train.horizon=2"),
    ],
)
def test_branches_that_nobody_compares_are_refused(changes, message):
    with pytest.raises((ValidationError, MarlRayError), match=message):
        config(*changes)
