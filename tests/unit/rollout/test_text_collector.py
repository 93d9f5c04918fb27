"""Text environments played by language models: rows, rewards to go, waves, values, metrics, evaluation."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys.collectors import (
    ALONE,
    BOTH,
    EACH,
    POLICY,
    Repeater,
    Scripted,
    collector,
    on_two_workers,
    players,
    policy,
    texts,
)
from toys.text_envs import Echo, Quitter, Slow, Talk

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.choice import make_engine
from marl_ray.rollout.protocol import CollectPlan
from marl_ray.rollout.rng import EVALUATION_STREAMS, TRAINING_STREAMS, response_stream
from marl_ray.rollout.text.responses import TokenPlayer
from marl_ray.rollout.text.transcripts import mean_metrics

FIELDS = ("mask", "rewards", "costs", "terminated", "truncated", "greedy", "group", "episode", "agent", "turn")


def test_a_row_is_a_response_with_the_ids_that_the_engine_gave():
    engine = Scripted()
    batch = collector(Talk, BOTH, range(2)).collect(players(BOTH, engine), 0)
    data = batch.trajectories["shared"]
    prompts = {prompt.stream: prompt for call in engine.calls for prompt in call}
    assert len(prompts) == len(data.mask) == batch.steps
    assert data.prompts is not None
    for row in range(len(data.mask)):
        copy, agent, turn = int(data.episode[row]), int(data.agent[row]), int(data.turn[row])
        prompt = prompts[response_stream(TRAINING_STREAMS, 0, 0, copy, agent, turn)]
        completion = engine.say(prompt, 3)
        n = len(completion.ids)
        assert data.actions[row, :n].tolist() == completion.ids and not data.actions[row, n:].any()
        torch.testing.assert_close(data.log_probs[row, :n], torch.tensor(completion.log_probs))
        assert data.mask[row].tolist() == [True] * n + [False] * (data.mask.shape[1] - n)
        # Prompts stand on the right, where the response begins.
        width = data.prompts.shape[1] - len(prompt.ids)
        assert data.prompts[row].tolist() == [-1] * width + list(prompt.ids)
        assert data.terminated[row].nonzero().flatten().tolist() == [n - 1] and not data.truncated[row].any()
    assert data.observations.shape == (*data.mask.shape, 0) and data.states is None and data.action_masks is None
    order = list(zip(data.episode.tolist(), data.turn.tolist(), data.agent.tolist(), strict=True))
    assert order == sorted(order)
    assert data.group.tolist() == data.episode.tolist()  # groups of one
    assert not data.values.any() and not data.bootstrap.any() and data.cost_values.shape == (*data.mask.shape, 1)


def test_a_response_without_an_end_is_truncated():
    data = collector(Talk, BOTH).collect(players(BOTH, Scripted(ends=False)), 0).trajectories["shared"]
    assert not data.terminated.any() and data.truncated.sum(1).eq(1).all()
    assert (data.truncated.long().argmax(1) == data.mask.sum(1) - 1).all()


def slow_rewards_to_go(make: Callable, words: Sequence[str]) -> tuple[list[tuple[str, float, float]], float]:
    """The (agent, reward to go, cost to go) of each turn, and the mean return: replay, then sum over all that follows."""
    env, history = make(), []
    env.reset(seed=0)
    for word in words:
        while env.terminations[env.agent_selection]:
            env.step(None)
        agent = env.agent_selection
        env.step(word)
        cost = sum(np.sum(info.get("cost", 0.0)) for info in env.infos.values())
        history.append((agent, dict(env.rewards), cost))
    rows = []
    for t, (agent, _, _) in enumerate(history):
        reward = sum(rewards.get(agent, 0.0) for _, rewards, _ in history[t:])
        rows.append((agent, reward, sum(cost for _, _, cost in history[t:])))
    return rows, sum(sum(rewards.values()) for _, rewards, _ in history) / 2


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([Talk, Quitter, partial(Talk, 9), partial(Talk, 1)]))
def test_a_row_gets_what_its_agent_receives_from_its_turn_on(iteration, make):
    batch = collector(make, EACH, range(2)).collect(players(EACH), iteration)
    for number, episode in enumerate(batch.episodes):
        spoken: dict[str, list[tuple[str, float, float]]] = {}
        for name, (agent,) in EACH.items():
            data = batch.trajectories[name]
            rows = (data.episode == number).nonzero().flatten()
            last = data.mask.sum(1) - 1
            assert data.turn[rows].tolist() == list(range(len(rows)))
            at_end = data.rewards[rows, last[rows]], data.costs[rows, last[rows], 0]
            torch.testing.assert_close(data.rewards[rows].sum(1), at_end[0])
            torch.testing.assert_close(data.costs[rows, :, 0].sum(1), at_end[1])
            spoken_text = [texts(data)[row] for row in rows]
            spoken[agent] = list(zip(spoken_text, *(x.tolist() for x in at_end), strict=True))
        # Who speaks when is the environment's rule: turns alternate until `teller` may be gone.
        unspoken = {agent: list(turns) for agent, turns in spoken.items()}
        order: list[tuple[str, str, float, float]] = []
        while any(unspoken.values()):
            agent = "teller" if len(order) % 2 and unspoken["teller"] else "asker"
            order.append((agent, *unspoken[agent].pop(0)))
        expected, ret = slow_rewards_to_go(make, [spoken_text for _, spoken_text, _, _ in order])
        assert [(agent, reward, cost) for agent, _, reward, cost in order] == expected
        assert episode.episode_return == pytest.approx(ret) and episode.length == len(order)
        assert episode.costs == (float(len(order)),)
        assert episode.tokens == sum(len(spoken_text.encode()) + 1 for _, spoken_text, _, _ in order)


def test_episodes_are_truncated_after_horizon_turns():
    batch = collector(partial(Talk, 9), BOTH, plan=CollectPlan(3, has_whole_episodes=True)).collect(
        players(BOTH, Scripted(["no", "cat"])), 0
    )
    assert [(e.length, e.step, e.truncated, e.solved) for e in batch.episodes] == [(3, 2, True, None)] * 8
    assert batch.steps == 24 and len(batch.trajectories["shared"].mask) == 24


@pytest.mark.parametrize("scripted", [True, False])
def test_data_does_not_depend_on_the_number_of_workers(scripted):
    engine = Scripted() if scripted else make_engine(POLICY)
    plan = CollectPlan(6, has_whole_episodes=True, group_size=2, has_greedy_copies=True)
    single = collector(Talk, EACH, range(8), plan).collect(players(EACH, engine), 2)
    parts = on_two_workers(
        lambda rank, gather: collector(Talk, EACH, range(4 * rank, 4 * rank + 4), plan, gather=gather).collect(
            players(EACH, engine), 2
        )
    )
    assert single.steps == sum(part.steps for part in parts)
    assert single.episodes == [episode for part in parts for episode in part.episodes]
    for name in EACH:
        data, split = single.trajectories[name], [part.trajectories[name] for part in parts]
        assert data.prompts is not None
        start = 0
        for part in split:
            rows = slice(start, start := start + len(part.mask))
            steps, width = part.mask.shape[1], part.prompts.shape[1]
            for field in (*FIELDS, "actions", "log_probs"):
                of_rows, part_values = getattr(data, field)[rows], getattr(part, field)
                of_rows = of_rows[:, :steps] if of_rows.dim() > 1 else of_rows
                torch.testing.assert_close(of_rows, part_values, rtol=1e-4, atol=1e-5)
            assert torch.equal(data.prompts[rows, -width:], part.prompts)
            assert (data.prompts[rows, :-width] == -1).all() and not data.mask[rows, steps:].any()
    assert sorted(single.transcripts) == sorted(transcript for part in parts for transcript in part.transcripts)
    assert mean_metrics([single.sums]) == pytest.approx(mean_metrics(part.sums for part in parts))


def test_a_policy_answers_all_copies_in_one_call_per_wave():
    engine = Scripted(["no"])
    collector(Talk, EACH, plan=CollectPlan(4, has_whole_episodes=True)).collect(players(EACH, engine), 0)
    assert [len(call) for call in engine.calls] == [8] * 4
    assert len({prompt.stream for call in engine.calls for prompt in call}) == 32


@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_values_are_the_critics_own_in_reward_units(micro_batch):
    model = policy(critic=True, signals=2)
    norms = (ValueNorm().add_batch(1.0, 5.0), ValueNorm().add_batch(-2.0, 8.0), ValueNorm().add_batch(0.5, 2.0))
    team = {"shared": TokenPlayer(model, Scripted(), BOTH["shared"], norms[0], norms[1:], micro_batch)}
    data = collector(partial(Talk, cost=("x", "y")), BOTH, signals=2).collect(team, 0).trajectories["shared"]
    with torch.no_grad():
        expected = model.evaluate(data.prompts, data.actions, data.mask)
    assert data.cost_values is not None and expected.cost_values is not None
    torch.testing.assert_close(data.values, norms[0].denormalize(expected.values) * data.mask)
    for k in (0, 1):
        costs = norms[k + 1].denormalize(expected.cost_values[..., k]) * data.mask
        torch.testing.assert_close(data.cost_values[..., k], costs)
    assert data.values[data.mask].ne(0).all() and not data.values.requires_grad


def test_tokens_are_counted_here_where_they_are_a_cost():
    team = players(BOTH, Scripted())
    make = partial(Talk, cost=("turns", "tokens"))
    batch = collector(make, BOTH, signals=2).collect(team, 0)
    for episode in batch.episodes:
        assert episode.costs == (episode.length, episode.tokens)
    data = batch.trajectories["shared"]
    first = data.turn.eq(0) & data.agent.eq(0)
    assert data.costs[first].sum(1)[:, 1].tolist() == [episode.tokens for episode in batch.episodes]


def test_metrics_are_by_role_and_transcripts_are_bounded():
    batch = collector(Talk, BOTH).collect(players(BOTH, Scripted(["no", "banana"])), 0)
    metrics = mean_metrics([batch.sums])
    data = batch.trajectories["shared"]
    lengths = data.mask.sum(1).double()
    for agent, name in enumerate(BOTH["shared"]):
        of_agent = data.agent == agent
        assert metrics[f"{name}/response_tokens"] == pytest.approx(float(lengths[of_agent].mean()))
        assert metrics[f"{name}/ended"] == 1.0
    returns = [(metrics["asker/reward"] + metrics["teller/reward"]) / 2]
    assert returns == pytest.approx([np.mean([episode.episode_return for episode in batch.episodes])])
    assert metrics["env/words"] == 4.0 and metrics["env/solved"] == np.mean([e.solved for e in batch.episodes])
    assert len(batch.transcripts) == 2
    transcript = batch.transcripts[0]
    assert [line.agent for line in transcript.lines] == ["asker", "teller"] * 2
    assert transcript.lines[1].prompt.endswith(f"heard {transcript.lines[0].response!r}")
    row = int(((data.episode == transcript.copy) & (data.turn == 0) & (data.agent == 0)).nonzero())
    assert transcript.lines[0].response == texts(data)[row] and transcript.lines[0].reward == float(
        data.rewards[row].sum()
    )


def test_evaluation_plays_held_out_tasks_and_changes_nothing_of_training():
    engine = Scripted()
    trained, other = collector(Talk, BOTH, range(3)), collector(Talk, BOTH, range(3))
    played = other.play(players(BOTH, engine), [4, 7], samples=2)
    assert [(e.task, e.sample) for e in played] == [(4, 0), (4, 1), (7, 0), (7, 1)]
    assert trained.collect(players(BOTH), 0).episodes == other.collect(players(BOTH), 0).episodes
    # Any number of copies and any split of the tasks gives the same episodes.
    alone = collector(Talk, BOTH, range(5, 6)).play(players(BOTH), [7], samples=2)
    strip = [episode._replace(copy=0) for episode in (*played[2:], *alone)]
    assert strip[:2] == strip[2:]
    others = other.play(players(BOTH), [4, 7, 9], samples=2, key=1)
    assert [e.tokens for e in others[:4]] != [e.tokens for e in played]
    greedy = other.play(players(BOTH, Scripted(["stop", "no"])), range(4), greedy=True)
    assert [episode.length for episode in greedy] == [1] * 4
    engine.calls.clear()
    collector(Echo, ALONE, range(3)).play(players(ALONE, engine), [4])
    assert b"4 test" in bytes(i for i in engine.calls[0][0].ids if i < 256)


def test_a_solved_task_is_told():
    played = collector(Echo, ALONE).play(players(ALONE, Repeater()), range(5))
    assert all(
        episode.solved and episode.episode_return == 1.0 and episode.metrics == {"words": 1.0} for episode in played
    )


def test_streams_differ_by_everything_that_they_are_for():
    numbers = [(kind, i, a, c, g, t) for kind in (TRAINING_STREAMS, EVALUATION_STREAMS) for i in range(4) for a in range(3)
               for c in range(4) for g in range(3) for t in range(4)]  # fmt: skip
    assert len({response_stream(*number) for number in numbers}) == len(numbers)
    assert (
        response_stream(TRAINING_STREAMS, 1, 0, 2, 0, 3) == response_stream(TRAINING_STREAMS, 1, 0, 2, 0, 3) < 1 << 64
    )


def test_copies_step_side_by_side():
    Slow.max_asleep = 0
    collector(Slow, ALONE).collect(players(ALONE), 0)
    assert Slow.max_asleep > 1


def test_every_agent_needs_a_policy():
    with pytest.raises(
        MarlRayError, match=r"^groups: \[\['asker'\]\] expected to hold each of \['asker', 'teller'\] once$"
    ):
        collector(Talk, {"one": ["asker"]})


def test_a_truncated_episode_is_not_solved():
    """The share is of all episodes, on any number of workers, wherever the others of the batch are."""
    engine = Scripted(["stop", "no"])
    short = CollectPlan(2, has_whole_episodes=True)
    batch = collector(partial(Talk, 9), BOTH, range(40), short).collect(players(BOTH, engine), 0)
    truncated = sum(episode.truncated for episode in batch.episodes)
    assert 0 < truncated < 40 and all(episode.solved is None for episode in batch.episodes if episode.truncated)
    assert mean_metrics([batch.sums])["env/solved"] == 0
    solved = collector(partial(Talk, 9), BOTH, range(40), short).collect(players(BOTH, Scripted(["stop a", "cat"])), 0)
    assert "env/solved" not in mean_metrics([solved.sums])  # all are truncated, so nobody knows that this one tells
