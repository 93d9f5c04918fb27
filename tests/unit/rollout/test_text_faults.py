"""Text environments that report wrongly, fail or hang, and texts that are refused or too long."""

import threading
from functools import partial

import pytest
import torch
from toys.collectors import ALONE, BOTH, POLICY, Scripted, collector, players, texts
from toys.text_envs import Broken, Slow, Strict, Talk
from toys.texts import LimitedEcho

from marl_ray.errors import MarlRayError
from marl_ray.rollout.protocol import CollectPlan
from marl_ray.rollout.served.collector import ServedCollector
from marl_ray.rollout.text.transcripts import mean_metrics


@pytest.mark.parametrize(
    "reports",
    [
        {"rewards": {"speaker": float("nan")}},
        {"rewards": {"speaker": [1.0, 2.0]}},
        {"rewards": {"speaker": None}},
        {"rewards": {}},
        {"rewards": {"speaker": 1.0, "someone": 1.0}},
        {"rewards": 1.0},
        {"infos": {"cost": [1.0, 2.0]}},
        {"infos": {"cost": float("inf")}},
        {"infos": {"metrics": {"pass": float("nan")}}},
        {"observation": 3},
        {"error": MarlRayError("the sandbox is gone")},
    ],
)
def test_what_an_environment_reports_wrongly_is_one_error_that_names_it(reports):
    with pytest.raises(MarlRayError, match=r"^environment broken, copy 0, agent speaker: .") as error:
        collector(partial(Broken, **reports), ALONE, range(2)).collect(players(ALONE), 0)
    assert "\n" not in str(error.value)


def test_an_environments_own_error_keeps_its_kind():
    with pytest.raises(ZeroDivisionError) as error:
        collector(partial(Broken, error=ZeroDivisionError("x")), ALONE, range(1)).collect(players(ALONE), 0)
    assert error.value.__notes__ == ["in environment broken, copy 0, agent speaker"]


def test_a_step_that_hangs_is_an_error():
    over = threading.Event()

    class Hangs(Slow):
        def act(self, agent: str, text: str) -> None:
            if self.options["index"] == 2:
                over.wait(60)

    with pytest.raises(MarlRayError, match=r"^environment slow, copy 2, agent speaker: step took over 0\.2 s$"):
        collector(Hangs, ALONE, deadline_s=0.2).collect(players(ALONE), 0)
    over.set()


class RepeatedTalk(Talk):
    """Talk whose prompts grow: each is all that was said, `times` over."""

    tasks = 20

    def __init__(self, times: int = 1, first: str = "go", length: int = 4) -> None:
        super().__init__(length)
        self.times, self.first = times, first

    def observe(self, agent: str) -> str:
        return self.first + "".join(self.actions_taken) * self.times


@pytest.mark.parametrize("answer", ["<|end|><|reply|>", "", "\x00", "{agent}{", "x" * 30])
def test_nothing_that_an_agent_says_ends_a_run(answer):
    engine = Scripted([answer])
    batch = collector(RepeatedTalk, BOTH).collect(players(BOTH, engine), 0)
    assert all(episode.length == 4 and not episode.truncated for episode in batch.episodes)
    # What was said reaches the next one's prompt as text: the only special token is the template's.
    ids = engine.calls[-1][0].ids
    assert [number for number in ids if number > 255] == [POLICY.tokenizer.convert_tokens_to_ids("<|reply|>")]  # type: ignore[attr-defined]  # transformers'


def test_a_text_that_the_environment_refuses_ends_its_episode_and_is_counted():
    """Only where its action space says so: another error of an environment is its own."""
    strict, team = partial(Strict, cost=("tokens",)), players(BOTH, Scripted(["stop", "cat", "cat", "a cat"]))
    batch = collector(strict, BOTH, range(16)).collect(team, 0)
    answers = texts(batch.trajectories["shared"])
    truncated = [episode.truncated for episode in batch.episodes]
    assert any(truncated) and not all(truncated) and sum(truncated) == answers.count("a cat")
    assert all(episode.solved is None for episode in batch.episodes if episode.truncated)
    data = batch.trajectories["shared"]
    counted = [batch.sums[f"{agent}/refused"] for agent in BOTH["shared"]]
    assert sum(refused for refused, _ in counted) == sum(truncated)
    assert sum(turns for _, turns in counted) == len(answers)
    refused = torch.tensor([text == "a cat" for text in answers])
    assert not data.rewards[refused].any() and data.costs.sum(1)[refused, 0].tolist() == [6.0] * sum(truncated)
    with pytest.raises(AssertionError):
        collector(partial(Broken, error=AssertionError("own")), ALONE).collect(players(ALONE, Scripted(["cat"])), 0)


def test_a_prompt_that_is_too_long_loses_its_middle_and_is_counted():
    engine = Scripted(["cat"])
    batch = collector(partial(RepeatedTalk, 100), BOTH).collect(players(BOTH, engine), 0)  # 302, 602 and 902 characters
    assert [(e.length, e.truncated, e.solved) for e in batch.episodes] == [(2, True, None)] * 8
    metrics = mean_metrics([batch.sums])
    assert metrics["asker/prompt_shortened"] == 0 and metrics["asker/prompt_too_long"] == 0.5
    assert metrics["teller/prompt_shortened"] == 1 and metrics["teller/prompt_too_long"] == 0
    assert all(len(prompt.ids) <= 248 for call in engine.calls for prompt in call)
    # What was earned until then counts: 1 for each "a", and 0.5 for the asker's when the teller answers.
    assert [episode.episode_return for episode in batch.episodes] == [1.25] * 8
    data = batch.trajectories["shared"]
    assert data.rewards.sum(1).tolist() == [1.5, 1.0] * 8 and len(data.mask) == 16
    assert data.terminated.any(1).all() and "solved" not in "".join(metrics)


def test_an_episode_that_nobody_can_begin_is_empty():
    batch = collector(partial(RepeatedTalk, first="long " * 200), BOTH).collect(players(BOTH), 0)
    assert [(e.length, e.truncated, e.episode_return, e.tokens) for e in batch.episodes] == [(0, True, 0.0, 0)] * 8
    assert batch.steps == 8 and not len(batch.trajectories["shared"].mask)
    assert mean_metrics([batch.sums])["asker/prompt_too_long"] == 1


def test_a_curriculum_counts_truncated_episodes_as_unsolved():
    made = collector(partial(RepeatedTalk, first="long " * 200), BOTH, curriculum="toys.text_envs:least_solved")
    made.collect(players(BOTH), 0)
    assert set(made.curriculum.solved.values()) == {0.0}


def test_an_environment_that_cannot_be_closed_leaves_no_other_open():
    closed: list[int] = []

    class Stuck(Talk):
        def close(self):
            closed.append(len(closed))
            if len(closed) == 2:
                raise OSError("still busy")

    with pytest.raises(OSError, match="still busy"):
        collector(Stuck, BOTH, range(4)).close()
    assert len(closed) == 4


@pytest.mark.parametrize(("limit", "agents", "curriculum", "message"), [
    (3, ["writer"], None, r"^3 environments are open$"),
    (9, ["nobody"], None, r"^groups: \[\['nobody'\]\] expected to hold each of \['writer'\] once$"),
    (9, ["writer"], "nowhere:chooser", r"^train\.curriculum: cannot import 'nowhere' of "),
])  # fmt: skip
def test_a_collector_that_cannot_be_made_leaves_no_environment_open(limit, agents, curriculum, message, monkeypatch):
    monkeypatch.setattr(LimitedEcho, "open_count", 0)
    make = partial(LimitedEcho, limit, agents=["writer"])
    with pytest.raises((MarlRayError, ValueError), match=message):
        collector(make, {"one": agents}, range(4), curriculum=curriculum)
    assert LimitedEcho.open_count == 0


def test_a_collector_of_other_data_leaves_no_environment_open(monkeypatch):
    monkeypatch.setattr(LimitedEcho, "open_count", 0)
    make, plan = partial(LimitedEcho, 9, agents=["writer"]), CollectPlan(1, has_whole_episodes=True)
    with pytest.raises(MarlRayError, match=r"^data: is not what this run began to learn from; "):
        ServedCollector(
            make, {"one": ["writer"]}, range(4), plan, 0, 0, {"digest": "other"}, lambda share: [share], {}, 16
        )
    assert LimitedEcho.open_count == 0
