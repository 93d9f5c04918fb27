"""Rewards by name and by `package.module:NAME`: what is refused before a run, and what an answer may not break."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from marl_ray.cli import main
from marl_ray.config import EnvConfig
from marl_ray.envs.registry import check_reward, make_env
from marl_ray.envs.text.math_tasks import MathTasks
from marl_ray.envs.text.tasks import MathTask, StaticProgramTask
from marl_ray.errors import MarlRayError
from marl_ray.extensions import REWARD
from marl_ray.rewards.answers import same_answer
from marl_ray.rewards.code import CallTest, CodeTask
from marl_ray.rewards.protocol import make_reward

SECONDS = "expected seconds, more than 0 and less than a day (86,400)"
BYTES = "expected a whole number of bytes, at least 64 MiB (67,108,864) and at most 256 TiB (281,474,976,710,656)"
TASK = MathTask("t", "3+4=", "7")
OWN = '''
"""Rewards of a user."""


def short(prompt, answer, task, metrics, per_character=0.1):
    return metrics["pass"] * max(0.0, 1 - per_character * len(answer))


class Bonus:
    def __init__(self, word, bonus=0.5):
        self.word, self.bonus = word, bonus

    def __call__(self, prompt, answer, task):
        has = self.word in answer
        return (answer == task.answer) + self.bonus * has, {"has_word": has}


def fragile(prompt, answer, task):
    return 1 / (len(answer) - 3)


def nothing(prompt, answer, task): ...


def infinite(prompt, answer, task):
    return float("inf")


def wrong_metrics(prompt, answer, task):
    return 1.0, {"part": "large"}


def two(prompt, answer):
    return 1.0


class Silent:
    pass


def stops(prompt, answer, task):
    from marl_ray.errors import MarlRayError

    raise MarlRayError("the service of our reward is gone")
'''


@pytest.fixture
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_rewards", None)


def paid(reward: Any, answer: str, task: Any = TASK, **metrics: float) -> float:
    return make_reward(reward).pay("read", answer, task, metrics)[0]


@pytest.mark.parametrize(
    ("reward", "answer", "value"),
    [
        ("math_answer", "It is 7", 1.0),
        ("math_answer", "It is 8", 0.0),
        ("short_answer", "**7**", 1.0),
        ("short_answer", "It is 7", 0.0),
        ("exact_match", " 7\n", 1.0),
        ("exact_match", "7.0", 0.0),
        ({"exact_match": {"ignore_case": True}}, "7", 1.0),
        ({"exact_match": None}, "7", 1.0),
    ],
)
def test_a_built_in_reward_compares_with_the_tasks_answer(reward, answer, value):
    assert paid(reward, answer) == value


def test_the_tolerance_is_an_option():
    task = MathTask("t", "pi?", "3.14")
    assert [paid(reward, "3.2", task) for reward in ("math_answer", {"math_answer": {"tolerance": 0.1}})] == [0.0, 1.0]


def test_words_are_compared_without_case_and_articles():
    assert paid({"exact_match": {"ignore_case": True}}, "PARIS", MathTask("t", "?", "Paris")) == 1.0
    assert paid("exact_match", "PARIS", MathTask("t", "?", "Paris")) == 0.0
    assert paid("short_answer", "the Eiffel tower.", MathTask("t", "?", "Eiffel Tower")) == 1.0
    assert same_answer("the Eiffel tower.", "Eiffel Tower")


def test_the_environments_own_judgement_is_a_reward():
    assert [paid("solved", "", **{"pass": share}) for share in (0.0, 1.0)] == [0.0, 1.0]


def play(reward: Any, answer: str) -> MathTasks:
    env = MathTasks(reward=reward)
    env.reset(options={"index": 0})
    env.step(answer.replace("RIGHT", env.task.answer))
    return env


@pytest.mark.usefixtures("own_rewards")
def test_a_function_gets_its_options_and_the_environments_metrics():
    env = play({"own_rewards:short": {"per_character": 0.25}}, "RIGHT")
    assert env.rewards["solver"] == 1 - 0.25 * len(env.task.answer)
    assert env.infos["solver"]["metrics"] == {"pass": 1.0, "turns": 1.0, "reward_failed": 0.0}
    assert play("own_rewards:short", "wrong").rewards["solver"] == 0.0


@pytest.mark.usefixtures("own_rewards")
def test_a_class_is_made_with_its_options_and_reports_metrics():
    env = play({"own_rewards:Bonus": {"word": "so"}}, "so it is")
    assert env.rewards["solver"] == 0.5 and not env.infos["solver"]["solved"]
    assert env.infos["solver"]["metrics"] == {"pass": 0.0, "has_word": 1.0, "turns": 1.0, "reward_failed": 0.0}


@pytest.mark.usefixtures("own_rewards")
@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("math_answr", "reward: 'math_answr' is unknown; did you mean math_answer or short_answer?"),
        ("own_rewards:shrt", "'shrt' of 'own_rewards:shrt' is not in the module; did you mean short?"),
        ("no_rewards:f", "reward: cannot import 'no_rewards' of 'no_rewards:f' (ModuleNotFoundError"),
        ({"own_rewards:short": {"per_char": 1}}, "has no option 'per_char'; did you mean per_character?"),
        ({"own_rewards:short": {"answer": 1}}, "has no option 'answer'; expected one of per_character"),
        ({"own_rewards:short": {"metrics": {}}}, "has no option 'metrics'; expected one of per_character"),
        ({"own_rewards:Bonus": {}}, "own_rewards:Bonus rejected {} (Bonus.__init__() missing 1 required"),
        ({"own_rewards:Bonus": {"wrd": 1}}, "own_rewards:Bonus has no option 'wrd'; did you mean word?"),
        ("own_rewards:two", "own_rewards:two has the parameters (prompt, answer) (too many positional arguments)"),
        ("own_rewards:Silent", "own_rewards:Silent makes a Silent that cannot be called"),
        ("own_rewards:OWN_NAME", "'OWN_NAME' of 'own_rewards:OWN_NAME' is not in the module"),
        ("math:pi", "reward: 'math:pi' is not callable"),
        (
            {"math_answer": {"tolerance": -1}},
            "math_answer rejected {'tolerance': -1} (tolerance=-1, expected a finite number, 0 or more)",
        ),
        ("code_tests", "reward: code_tests reads task.code, which tasks of this environment do not have"),
        ({"solved": {}, "math_answer": {}}, "reward: expected NAME or {NAME: {OPTION: VALUE}}, got"),
        ({"solved": 3}, "reward: expected NAME or {NAME: {OPTION: VALUE}}, got"),
        (3, "reward: expected NAME or {NAME: {OPTION: VALUE}}, got 3"),
    ],
)
def test_a_wrong_choice_is_one_line(reward, words):
    with pytest.raises(MarlRayError) as error:
        make_env(EnvConfig(id="math", kwargs={"reward": reward}))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"code_tests": {"stle": 1}}, "reward: code_tests has no option 'stle'; did you mean style?"),
        (
            {"code_tests": {"style": -1}},
            "code_tests rejected {'style': -1} (style=-1, expected a finite number, 0 or more)",
        ),
        ({"code_tests": {"correctness": math.inf}}, "(correctness=inf, expected a finite number, 0 or more)"),
        ({"code_tests": {"timeout_s": 0}}, f"(timeout_s=0, {SECONDS})"),
        ({"code_tests": {"timeout_s": 1e12}}, f"(timeout_s=1000000000000.0, {SECONDS})"),
        ({"code_tests": {"timeout_s": math.inf}}, f"(timeout_s=inf, {SECONDS})"),
        ({"code_tests": {"memory_bytes": 1}}, f"(memory_bytes=1, {BYTES})"),
        ({"code_tests": {"memory_bytes": 1 << 70}}, f"(memory_bytes={1 << 70}, {BYTES})"),
        ("math_answer", "reward: math_answer reads task.answer, which tasks of this environment do not have"),
    ],
)
def test_a_wrong_choice_for_programs_is_one_line(reward, words):
    with pytest.raises(MarlRayError) as error:
        make_env(EnvConfig(id="code_team", kwargs={"reward": reward, "count": 2}))
    assert words in str(error.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_programs_are_tested_where_the_environment_has_not():
    tests = tuple(CallTest(f"assert double({number}) == {2 * number}") for number in range(4))
    task = StaticProgramTask("t", "Double x.", CodeTask(tests, entry_point="double"))
    assert paid("code_tests", "def double(x): return 2 * x", task) == 1.0
    assert paid({"code_tests": {"correctness": 2.0}}, "def double(x): return 0", task) == 0.5
    assert paid("code_tests", "", task, hidden=0.25) == 0.25


@pytest.mark.usefixtures("own_rewards")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "ValueError: returned None, expected a finite number"),
        ("infinite", "ValueError: returned inf, expected a finite number"),
        ("wrong_metrics", "ValueError: metric part: 'large', expected a finite number"),
        ("stops", "the service of our reward is gone"),
    ],
)
def test_a_broken_reward_is_named_before_a_run(name, words):
    with pytest.raises(MarlRayError) as error:
        check_reward(make_env(EnvConfig(id="math", kwargs={"reward": f"own_rewards:{name}"})))
    assert words in str(error.value)
    assert name == "stops" or str(error.value).startswith(f"reward: own_rewards:{name} fails on the answer ")


@pytest.mark.usefixtures("own_rewards")
def test_an_answer_that_a_reward_fails_on_pays_nothing_and_is_counted(caplog):
    with caplog.at_level(logging.WARNING):
        env = play("own_rewards:fragile", "abc")
    assert env.rewards["solver"] == 0.0
    assert env.infos["solver"]["metrics"] == {"pass": 0.0, "reward_failed": 1.0, "turns": 1.0}
    assert "own_rewards:fragile fails on the answer 'abc' to task" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.usefixtures("own_rewards")
def test_a_reward_ends_a_run_only_with_the_error_that_users_see():
    with pytest.raises(MarlRayError, match=r"^the service of our reward is gone$"):
        play("own_rewards:stops", "abc")


@pytest.mark.usefixtures("own_rewards")
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"reward": "own_rewards:shrt"},
            "reward: 'shrt' of 'own_rewards:shrt' is not in the module; did you mean short?",
        ),
        ({"reward": {"own_rewards:short": {"per_char": 1}}}, "has no option 'per_char'; did you mean per_character?"),
        ({"reward": "own_rewards:nothing"}, "reward: own_rewards:nothing fails on the answer"),
        ({"reward": "own_rewards:short"}, ""),
    ],
)
def test_a_dry_run_refuses_a_reward(kwargs, words, tmp_path, capsys):
    solver = {"model": {"preset": "tiny-0.2m", "context": 64}, "generation": {"max_tokens": 6}}
    train = {"env_copies": 8, "group_size": 4, "horizon": 1}
    run = {"name": "r", "algorithm": "grpo", "env": {"id": "math", "kwargs": kwargs}, "team": {"solver": solver}}
    (tmp_path / "run.yaml").write_text(json.dumps({**run, "train": train}))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.yaml"), "--dry-run"])
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == (2 if words else 0)
    assert words in printed.err if words else "own_rewards:short" in printed.out


def test_a_built_in_is_not_asked_before_a_run():
    env = MathTasks(reward={"llm_judge": {"url": "http://127.0.0.1:9", "model": "m"}})
    check_reward(env)
    assert env.agents == []


def test_every_built_in_reward_is_made_by_its_name():
    options = {"llm_judge": {"offline": True}}
    assert [make_reward({name: options.get(name)}).name for name in REWARD.builtins] == list(REWARD.builtins)
