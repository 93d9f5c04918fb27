"""Groups of episodes of text environments: tasks and seeds, the greedy member, refills, curricula."""

import json
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from toys.collectors import ALONE, BOTH, SAID, Scripted, collector, on_two_workers, players, texts
from toys.text_envs import WORDS, Echo, Talk

from marl_ray.errors import MarlRayError
from marl_ray.rollout.protocol import CollectPlan


def test_members_of_a_group_share_task_and_seed_and_tasks_go_on_over_iterations():
    plan = CollectPlan(2, has_whole_episodes=True, group_size=4)
    engine = Scripted()
    first = collector(Echo, ALONE, plan=plan)
    batch = first.collect(players(ALONE, engine), 0)
    assert [episode.task for episode in batch.episodes] == [0] * 4 + [1] * 4
    prompts = [prompt.ids for prompt in engine.calls[0]]
    assert len(set(prompts[:4])) == len(set(prompts[4:])) == 1 and prompts[0] != prompts[4]
    data = batch.trajectories["only"]
    assert data.group.tolist() == [0] * 4 + [1] * 4 and data.episode.tolist() == list(range(8))
    resumed = collector(Echo, ALONE, plan=plan, state=first.state())
    again, also = first.collect(players(ALONE), 1), resumed.collect(players(ALONE), 1)
    assert [episode.task for episode in again.episodes] == [2] * 4 + [3] * 4
    assert again.episodes == also.episodes and first.state() == resumed.state() == {"position": 4}


def test_the_first_member_plays_greedily():
    plan = CollectPlan(6, has_whole_episodes=True, group_size=4, has_greedy_copies=True)
    data = collector(Talk, BOTH, plan=plan).collect(players(BOTH, Scripted(["no", *SAID])), 0).trajectories["shared"]
    assert torch.equal(data.greedy, data.episode % 4 == 0)
    answers = texts(data)
    assert {answers[row] for row in data.greedy.nonzero().flatten()} == {"no"}
    assert len({answers[row] for row in (~data.greedy).nonzero().flatten()}) > 2


def test_groups_that_teach_nothing_are_played_again_on_other_tasks():
    plan = CollectPlan(2, has_whole_episodes=True, group_size=2)
    again = CollectPlan(2, has_whole_episodes=True, group_size=2, refills=4, refill_policies=("only",))
    team = players(ALONE, Scripted(WORDS))
    before = collector(Echo, ALONE, range(16), plan).collect(team, 0)
    played = collector(Echo, ALONE, range(16), again)
    after = played.collect(team, 0)

    def teaching(batch) -> list[int]:
        scores = np.array([episode.episode_return for episode in batch.episodes]).reshape(8, 2)
        return np.flatnonzero(scores[:, 0] != scores[:, 1]).tolist()

    assert 0 < len(teaching(before)) < len(teaching(after)) < 8
    assert after.steps > before.steps and len(after.episodes) == 16
    teaching_copies = [c for g in teaching(before) for c in (2 * g, 2 * g + 1)]
    assert [after.episodes[c] for c in teaching_copies] == [before.episodes[c] for c in teaching_copies]
    # Every attempt takes the tasks that follow, and what still teaches nothing leaves no rows.
    tasks = [episode.task for episode in after.episodes]
    assert max(tasks) >= 8 and len(set(tasks)) == 8 and played.position * 2 == after.steps
    assert sorted(set(after.trajectories["only"].group.tolist())) == teaching(after)
    parts = on_two_workers(
        lambda rank, gather: collector(Echo, ALONE, range(8 * rank, 8 * rank + 8), again, gather=gather).collect(
            team, 0
        )
    )
    assert after.episodes == [episode for part in parts for episode in part.episodes]


@pytest.mark.parametrize("curriculum", ["easiest_first", "toys.text_envs:least_solved"])
def test_a_curriculum_is_the_same_for_any_number_of_workers_and_after_a_resume(curriculum):
    plan = CollectPlan(2, has_whole_episodes=True, group_size=2, refills=2, refill_policies=("only",))
    team = players(ALONE, Scripted(["red"] * 4 + ["green"]))

    def run(rank: int = 0, gather: Callable = lambda value: [value], workers: int = 1, resume: bool = False):
        """Episodes of each iteration, and the last state."""
        copies = range(8 // workers * rank, 8 // workers * (rank + 1))
        make = partial(collector, Echo, ALONE, copies, plan, gather=gather, curriculum=curriculum)
        play, played = make(), []
        for iteration in range(6):
            if resume:
                play = make(state=json.loads(json.dumps(play.state())))
            played.append(play.collect(team, iteration).episodes)
        return played, play.state()

    unbroken, state = run()
    tasks = {episode.task for episodes in unbroken for episode in episodes}
    assert tasks <= set(range(Echo.tasks)) and len(tasks) > 2
    assert state["solved"].keys() >= set(map(str, tasks)) and any(mean > 0 for _, mean in state["solved"].values())
    assert run(resume=True) == (unbroken, state)
    (first, state_0), (second, state_1) = on_two_workers(partial(run, workers=2))
    assert state_0 == state_1 == state
    assert [[*a, *b] for a, b in zip(first, second, strict=True)] == unbroken


def test_a_curriculum_needs_to_know_what_is_solved():
    class Silent(Echo):
        def finish(self, solved: bool) -> None:
            super().finish(solved)
            del self.infos["speaker"]["solved"]

    with pytest.raises(MarlRayError, match=r'^train\.curriculum: environment echo, copy 0 reports no .*"solved"'):
        collector(Silent, ALONE, curriculum="easiest_first").collect(players(ALONE), 0)


def test_a_worker_may_have_no_rows():
    plan = CollectPlan(2, has_whole_episodes=True, group_size=2, refill_policies=("only",))
    data = collector(Echo, ALONE, plan=plan).collect(players(ALONE, Scripted(["nothing"])), 0).trajectories["only"]
    assert data.mask.shape == data.prompts.shape == (0, 1) and data.costs.shape == (0, 1, 1) and data.agents == 1


def test_groups_say_how_their_members_differ_and_episodes_their_decisions():
    played = collector(Echo, ALONE, range(16), CollectPlan(2, has_whole_episodes=True, group_size=4))
    batch = played.collect(players(ALONE, Scripted(WORDS)), 0)
    scores = np.array([episode.episode_return for episode in batch.episodes]).reshape(4, 4)
    metrics = played.group_sums["only"].metrics()
    assert metrics["informative_groups"] == np.mean(np.ptp(scores, axis=1) > 0)
    assert metrics["group_std"] == pytest.approx(scores.std(1).mean())
    mask = batch.trajectories["only"].mask.sum(1)
    assert [episode.decisions for episode in batch.episodes] == [{"only": int(count)} for count in mask]
    assert played.running_episodes == []
