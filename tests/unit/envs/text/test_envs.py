"""Text environments: what they share, how they are made, and what is refused."""

import sys
import warnings
from typing import Any

import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.test import api_test

from marl_ray.config import ConstraintConfig, CostConfig, EnvConfig
from marl_ray.envs.copies import warm_up
from marl_ray.envs.registry import check_costs, is_text, make_env
from marl_ray.envs.text.base import AnyText, TextEnv, split_tasks, task_index
from marl_ray.envs.text.math_tasks import MathTasks
from marl_ray.envs.text.tasks import MathTask
from marl_ray.errors import MarlRayError
from marl_ray.rewards import math_reward

TASKS = tuple(MathTask(str(i), f"task {i}", str(i), level=i) for i in range(10))


class Echo(TextEnv):
    """`speaker` writes, `listener` repeats: 1 for both if it is the same, and 0.5 to the speaker for the first word."""

    def __init__(self, cost: Any = (), seed: int = 0, tasks: tuple[MathTask, ...] = TASKS):
        super().__init__(["speaker", "listener"], tasks, tasks[:3], seed=seed, cost=cost)

    def begin(self) -> None:
        self.ask("speaker", self.task.prompt if self.task else "say")

    def act(self, agent: str, text: str) -> None:
        if agent == "speaker":
            self.expected = text
            self.earn(0.5, "speaker")
            self.ask("listener", text)
            return
        self.spend(agent, calls=2, seconds=0.5)
        self.earn(1.0)
        self.finish(text == self.expected, {"length": float(len(text))})


class Mixed(AECEnv):
    """Reads texts and chooses numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["a"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Text(5)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)


class Together(ParallelEnv):
    """Texts for all at once."""

    possible_agents = ("a",)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Text(5)

    action_space = observation_space


def prompts(env: Any, indices: Any, split: str = "train", seed: int | None = None) -> list[str]:
    texts = []
    for index in indices:
        env.reset(seed=seed, options={"index": index, "split": split})
        texts.append(env.observe(env.agent_selection))
    return texts


@pytest.mark.parametrize("make", [Echo, lambda: Echo(cost=["tokens"]), MathTasks])
def test_environments_of_texts_keep_pettingzoos_contract(make, monkeypatch):
    # This one check of the package reads `dtype` of observations, which a str has not.
    module = sys.modules["pettingzoo.test.api_test"]
    monkeypatch.setattr(module, "_test_observation_space_compatibility", lambda *_, **__: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # style advice of the tests; failures are assertions
        api_test(make(), num_cycles=50)


def test_agents_of_an_episode_speak_in_turn():
    env = Echo(cost=["tokens", "calls", "seconds"])
    env.reset(options={"index": 0})
    assert env.agent_selection == "speaker" and env.observe("speaker").startswith("task ")
    assert env.observe("listener") == ""
    env.step("h\u00e9")
    assert env.rewards == {"speaker": 0.5, "listener": 0.0} and not any(env.terminations.values())
    assert env.infos == {"speaker": {"cost": (3.0, 0.0, 0.0)}, "listener": {"cost": (0.0, 0.0, 0.0)}}
    assert (env.agent_selection, env.last()[0]) == ("listener", "h\u00e9")
    env.step("he")
    assert env.rewards == {"speaker": 1.0, "listener": 1.0} and all(env.terminations.values())
    end = {"solved": False, "metrics": {"length": 2.0, "turns": 2.0}}
    assert env.infos == {"speaker": {**end, "cost": (0.0, 0.0, 0.0)}, "listener": {**end, "cost": (2.0, 2.0, 0.5)}}
    assert env.last()[1] == 1.5
    env.step(None)
    env.step(None)
    assert env.agents == []
    env.reset()
    assert env.agents == env.possible_agents and env.last()[1] == 0.0


def test_what_is_no_text_is_refused():
    env = Echo()
    env.reset()
    with pytest.raises(TypeError, match="action of speaker is of type int, expected str"):
        env.step(3)
    with pytest.raises(ValueError, match=r"^cost: 'bytes', expected some of tokens, calls, seconds$"):
        Echo(cost=["bytes"])


def test_the_order_of_tasks_depends_on_seed_and_index_alone():
    order = prompts(Echo(), range(30))
    for epoch in range(3):
        assert sorted(order[10 * epoch : 10 * epoch + 10]) == [task.prompt for task in TASKS]
    assert order[:10] != order[10:20] != order[20:]
    assert prompts(Echo(), reversed(range(30))) == order[::-1]
    assert prompts(Echo(), range(30), seed=7) == order
    assert prompts(Echo(seed=1), range(30)) != order
    levels = [Echo().level(index) for index in range(30)]
    assert [f"task {level:.0f}" for level in levels] == order
    assert (Echo().tasks, Echo().held_out) == (10, 3)


def test_held_out_tasks_have_one_order():
    order = prompts(Echo(), range(6), "test")
    assert sorted(order[:3]) == ["task 0", "task 1", "task 2"] and order[:3] == order[3:]
    assert prompts(Echo(seed=5), range(6), "test") == order


def test_without_an_index_the_seed_draws_the_task():
    def drawn(env: Echo, seed: int | None) -> str:
        env.reset(seed=seed)
        return env.observe("speaker")

    first, other = Echo(), Echo()
    same = [drawn(first, 3), *(drawn(first, None) for _ in range(20))]
    assert same == [drawn(other, 3), *(drawn(other, None) for _ in range(20))] and len(set(same)) > 1


def test_a_split_without_tasks_and_an_unknown_split_are_refused():
    env = Echo(tasks=())
    env.reset()
    assert env.observe("speaker") == "say"
    with pytest.raises(MarlRayError, match=r"^split='dev', expected 'train' or 'test'$"):
        Echo().reset(options={"split": "dev"})
    env = MathTasks()
    env.test = ()
    with pytest.raises(MarlRayError, match=r"^env\.kwargs: math has no tasks in split 'test'$"):
        env.reset(options={"split": "test", "index": 0})


@given(st.integers(1, 200), st.integers(0, 2**32), st.integers(0, 5))
@settings(max_examples=50)
def test_every_epoch_has_every_task_once(count, seed, epoch):
    assert sorted(task_index(count, seed, epoch * count + i) for i in range(count)) == list(range(count))


def test_the_held_out_share_is_kept_and_does_not_depend_on_other_tasks():
    tasks = [MathTask(str(i), f"task {i}", "1") for i in range(4000)]
    train, test = split_tasks(tasks, 0.1)
    assert 300 < len(test) < 500 and len(train) + len(test) == 4000
    again = split_tasks(tasks[::-2], 0.1)[1]
    assert set(again) <= set(test)


@given(st.text())
def test_every_text_is_in_the_space(text):
    space = AnyText()
    space.seed(0)
    assert space.contains(text) and space.contains(space.sample()) and len(space.sample()) <= 64
    assert not space.contains(text.encode("utf-8", "surrogatepass")) and space == AnyText()


def test_make_env_knows_text_environments(monkeypatch):
    env = make_env(EnvConfig(id="math", kwargs={"levels": [1], "cost": ["tokens"]}))
    assert is_text(env) and env.possible_agents == ["solver"] and env.level(0) == 1
    warm_up(EnvConfig(id="math"), branches=True)
    check_costs(env, 1)
    with pytest.raises(MarlRayError, match=r'2 given, but infos\[agent\]\["cost"\] has 1'):
        check_costs(env, 2)
    monkeypatch.setitem(sys.modules, "own_texts", sys.modules[__name__])
    env = make_env(EnvConfig(id="own_texts:Echo", kwargs={"seed": 3}))
    assert isinstance(env, Echo) and is_text(env)
    assert not is_text(make_env(EnvConfig(id="budget_dag")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "maths"}, "env.id: 'maths' is unknown; did you mean math\\?"),
        ({"id": "own_texts:Mixed"}, "env.id: own_texts:Mixed has Text spaces; expected an AECEnv in which every"),
        ({"id": "own_texts:Together"}, "env.id: own_texts:Together has Text spaces; expected an AECEnv in which every"),
        (
            {"id": "math", "kwargs": {"levels": [9]}},
            r"env.kwargs: math rejected .*\(levels: 9, expected some of 1 to 5",
        ),
        ({"id": "math", "kwargs": {"colour": 1}}, "env.kwargs.colour: math has no such argument"),
        ({"id": "math", "kwargs": {"prompt": "{question}"}}, r"math rejected .*\(prompt: .* expected only \{task\}\)"),
        ({"id": "math", "kwargs": {"prompt": "{"}}, r"math rejected .*\(prompt: "),
        (
            {"id": "math", "kwargs": {"tolerance": -1}},
            r"math rejected .*\(tolerance=-1, expected a finite number, 0 or more",
        ),
        ({"id": "math", "kwargs": {"held_out": 1}}, r"math rejected .*\(held_out=1, expected at least 0 and below 1"),
        ({"id": "math", "kwargs": {"test_data": "a"}}, r"math rejected .*\(test_data: expected with `data`"),
        ({"id": "math", "kwargs": {"data": "/none.jsonl"}}, "/none.jsonl: cannot be read"),
        ({"id": "math", "cost": CostConfig(action=1.0)}, "env.cost: only MultiGrid environments have priced costs"),
    ],
)
def test_mistakes_are_one_line_and_name_the_key(monkeypatch, config, message):
    monkeypatch.setitem(sys.modules, "own_texts", sys.modules[__name__])
    with pytest.raises(MarlRayError, match=message) as caught:
        make_env(EnvConfig(**config))
    assert "\n" not in str(caught.value)


def test_texts_cannot_be_masked():
    with pytest.raises(
        MarlRayError, match=r"^constraints: hard_limit needs actions that can be masked; those of math are texts$"
    ):
        make_env(EnvConfig(id="math"), [ConstraintConfig(budget=1, hard_limit=2)])


def test_mathematics_from_a_file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "half of 3?", "answer": "1.5", "solution": "3/2 is \\\\boxed{1.5}"}\n')
    env = MathTasks(str(path), str(path), prompt="Q: {task} A:")
    assert prompts(env, [0]) == prompts(env, [0], "test") == ["Q: half of 3? A:"]
    (shown,) = env.demonstrations(1, 0)
    assert (shown.agent, shown.prompt) == ("solver", "Q: half of 3? A:") and shown.response.endswith("boxed{1.5}")
    env.step("It is \\frac{3}{2}")
    assert env.rewards == {"solver": 1.0} and env.infos["solver"]["solved"]
    assert env.infos["solver"]["metrics"] == {"pass": 1.0, "turns": 1.0}
    path.write_text('{"prompt": "half of 5?", "answer": "2.5", "solution": "2"}\n')
    with pytest.raises(MarlRayError, match=r"^task 0: solution: expected to end with the answer '2\.5'$"):
        MathTasks(f"file://{path}", f"file://{path}").demonstrations(1, 0)
    with pytest.raises(ValueError, match=r"held_out=0\.9999: leaves no training task"):
        MathTasks(f"file://{path}", held_out=0.9999)


def test_demonstrations_are_right_and_of_training_tasks():
    env = MathTasks(count=100)
    shown = env.demonstrations(50, seed=1)
    held_out = {task.prompt for task in env.test}
    answers = {task.prompt: task.answer for task in env.train}  # type: ignore[attr-defined]  # of its environment's tasks
    shown_prompts = {demonstration.prompt for demonstration in shown}
    assert len(shown_prompts) == 50 and not held_out & shown_prompts
    assert all(math_reward(demonstration.response, answers[demonstration.prompt]) for demonstration in shown)
    assert shown == env.demonstrations(50, seed=1) != env.demonstrations(50, seed=2)


HOSTILE = ["", "\x00", "\ud800", "{task}", "{0.__class__}", "<|im_end|>" * 1000, "a" * 10_000_000, "9" * 100_000,
           "1e999999999", "\\boxed{" + "{" * 20_000, "\\frac{" * 10_000, "1/0", "nan", "\u0661" * 100,
           "Action: answer\nInput: " + "[" * 100_000, 'Action: answer\nInput: {"answer": "\\ud800"}',
           'Action: answer\nInput: {"answer": ' + "9" * 50_000 + "}"]  # fmt: skip


@pytest.mark.parametrize(("name", "kwargs"), [("math", {}), ("react", {"max_turns": 2})])
def test_an_answer_never_raises(name, kwargs):
    env = make_env(EnvConfig(id=name, kwargs=kwargs))
    for text in HOSTILE:
        env.reset(seed=0, options={"index": 1})
        while env.agents and not env.terminations[env.agent_selection]:
            env.step(text)
        assert env.rewards[env.possible_agents[0]] == 0
