"""The code team, with a sandbox that runs."""

import json
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pettingzoo.test import api_test

from marl_ray.config.run.sections import EnvConfig
from marl_ray.envs.registry import check_costs, is_text, make_env
from marl_ray.envs.text.code_team import CodeTeam
from marl_ray.envs.text.code_tests import score_program, split_equality
from marl_ray.errors import MarlRayError
from marl_ray.rewards import CallTest, CodeTask, StdioTest
from marl_ray.sandbox import Limits
from marl_ray.sandbox.client.shared_pool import shared_pool

SQUARE = {
    "task_id": "square",
    "prompt": "Square x.",
    "entry_point": "square",
    "tests": [f"assert square({x}) == {x * x}" for x in (5, -6, 7, 1)],
    "public_tests": ["assert square(3) == 9", "assert square(0) == 0"],
    "reference": "def square(x): return x * x",
}
RIGHT = SQUARE["reference"]
ONE_PUBLIC = "def square(x): return x"  # passes square(0), and of the hidden ones square(1)
FOR_PUBLIC = "def square(x): return {0: 0, 3: 9}[x]"
QUICK = Limits(wall_s=1.5)


def team(tmp_path: Any, records: Any = (SQUARE,), **kwargs: Any) -> CodeTeam:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return CodeTeam(str(path), str(path), **kwargs)


def play(env: CodeTeam, *texts: str) -> list[dict[str, float]]:
    """Rewards of every step."""
    env.reset(options={"index": 0})
    rewards = []
    for text in texts:
        env.step(text)
        rewards.append({agent: round(reward, 6) for agent, reward in env.rewards.items()})
    return rewards


def test_a_code_team_keeps_pettingzoos_contract(monkeypatch):
    # This one check of the package reads `dtype` of observations, which a str has not.
    module = sys.modules["pettingzoo.test.api_test"]
    monkeypatch.setattr(module, "_test_observation_space_compatibility", lambda *_, **__: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # style advice of the tests; failures are assertions
        api_test(CodeTeam(count=20, cost=["calls"]), num_cycles=20)


def test_a_right_program_ends_the_episode(tmp_path):
    env = team(tmp_path)
    assert play(env, RIGHT) == [{"generator": 1.1, "reviewer": 1.0}]
    end = {"pass": 1.0, "hidden": 1.0, "public": 1.0, "first": 1.0, "turns": 1.0}
    assert env.infos == {agent: {"solved": True, "metrics": end} for agent in env.agents}


def test_a_review_earns_what_the_revision_gains(tmp_path):
    env = team(tmp_path)
    env.reset(options={"index": 0})
    assert env.observe("generator") == "Square x.\n"
    env.step(ONE_PUBLIC)
    assert env.agent_selection == "reviewer"
    assert env.observe("reviewer") == f"Square x.\n{ONE_PUBLIC}\nsquare(3)=3 not 9\n?"
    env.step("use **")
    assert env.observe("generator") == f"Square x.\n{ONE_PUBLIC}\nsquare(3)=3 not 9\nuse **\n!"
    rewards = play(env, ONE_PUBLIC, "use **", RIGHT)
    assert rewards[0] == {"generator": 0.05, "reviewer": 0.0}
    assert rewards[1] == {"generator": 0.0, "reviewer": 0.0}
    assert rewards[2] == {"generator": 0.05 + 1.0, "reviewer": 0.5 * 0.75 + 1.0}
    assert env.infos["reviewer"]["metrics"] == {"pass": 1.0, "hidden": 1.0, "public": 1.0, "first": 0.0, "turns": 3.0}


def test_a_harmful_review_is_paid_for_and_turns_run_out(tmp_path):
    env = team(tmp_path, review_weight=1.0, shaping=0.2, reward={"code_tests": {"correctness": 2.0}})
    rewards = play(env, ONE_PUBLIC, "worse", "def square(x): return 4")
    assert rewards[2] == {"generator": -0.1, "reviewer": -0.25}
    assert not env.infos["generator"]["solved"] and all(env.terminations.values())


def test_shaping_adds_up_and_only_hidden_tests_score(tmp_path):
    env = team(tmp_path, turns=3)
    rewards = play(env, FOR_PUBLIC)
    assert rewards == [{"generator": 0.1, "reviewer": 0.0}]  # public tests pass, so it is over, and nothing scores
    assert env.infos["generator"]["metrics"]["pass"] == 0.0
    texts = ["x", "a", ONE_PUBLIC, "b", "def square(x): return 1"]
    assert sum(step["generator"] for step in play(env, *texts)) == pytest.approx(0.25)  # one hidden test


def test_a_generator_without_a_reviewer_repairs_by_the_tests_results(tmp_path):
    env = team(tmp_path, reviewer=False, turns=3, repair_prompt="{task}|{tests}|{code}|{result}|{review}")
    assert env.possible_agents == ["generator"]
    env.reset(options={"index": 0})
    env.step("def square(x): return 1 / x")
    shown = "assert square(3) == 9\nassert square(0) == 0"
    expected = f"Square x.|{shown}|def square(x): return 1 / x|square(3)=0.3333333333333333 not 9|"
    assert env.observe("generator") == expected
    env.step("")
    assert env.observe("generator").endswith("||no code|")
    env.step(RIGHT)
    assert env.infos["generator"]["metrics"]["turns"] == 3.0


def test_answers_in_blocks_need_a_block(tmp_path):
    env = team(tmp_path, answer="block")
    assert play(env, f"So:\n```python\n{RIGHT}\n```\nDone.")[0]["reviewer"] == 1.0
    assert play(env, RIGHT)[0]["reviewer"] == 0.0
    assert env.checked.report == "no code"


def test_style_and_efficiency_count_for_programs_that_pass(tmp_path):
    env = team(tmp_path, shaping=0.0, reward={"code_tests": {"style": 0.5, "efficiency": 0.25}})
    (score,) = play(env, RIGHT.replace(": ", ":\n    ") + "\n")  # type: ignore[attr-defined]  # a text
    assert 1.5 < score["reviewer"] <= 1.75
    assert play(env, ONE_PUBLIC)[0]["reviewer"] == 0.0


def test_seconds_calls_and_tokens_are_costs(tmp_path):
    env = team(tmp_path, cost=["seconds", "calls", "tokens"])
    env.reset(options={"index": 0})
    env.step(ONE_PUBLIC)
    seconds, calls, tokens = env.infos["generator"]["cost"]
    assert seconds > 0 and (calls, tokens) == (1.0, len(ONE_PUBLIC))
    env.step("no")
    assert env.infos["reviewer"]["cost"] == (0.0, 0.0, 2.0) and env.infos["generator"]["cost"] == (0.0, 0.0, 0.0)
    made = make_env(EnvConfig(id="code_team", kwargs={"cost": ["tokens"]}))
    assert is_text(made) and made.possible_agents == ["generator", "reviewer"]
    check_costs(made, 1)


TASK = CodeTask(
    hidden=tuple(CallTest(f"assert f({x}) == {2 * x}") for x in (2, 3, 77)),
    public=(CallTest("assert f(1) == 2"), CallTest("y = f(4)\nassert y == 8")),
    entry_point="f",
)
VERDICTS = [
    ("def f(x): return 2 * x", 1.0, 1.0, "passes", 1),
    ("def f(x): return x + 1", 0.5, 0.0, "y = f(4) assert y == 8: AssertionError", 1),
    ("def f(x): return [x, 'a  b']", 0.0, 0.0, "f(1)=[1, 'a b'] not 2", 1),
    ("def f(x): raise KeyError(x)", 0.0, 0.0, "f(1): KeyError", 1),
    ("def f(x): return 2 * x if x != 77 else 1 / 0", 1.0, 2 / 3, "passes", 1),
    ("def f(x:", 0.0, 0.0, "fails: SyntaxError: '(' was never closed (<candidate>, line 1)", 1),
    ("raise AssertionError('boo')", 0.0, 0.0, "fails: boo", 1),
    ("import os\nos._exit(0)", 0.0, 0.0, "fails: crash", 2),
    ("def f(x): raise SystemExit", 0.0, 0.0, "fails: exit", 2),
    ("def f(x): return object()", 0.0, 0.0, "fails: nonbuiltin", 2),
    ("import time\ndef f(x): time.sleep(99)", 0.0, 0.0, "fails: timeout", 2),
    ("import time\ndef f(x):\n  if x == 77: time.sleep(99)\n  return 2 * x", 1.0, 0.0, "passes", 2),
    ("def f(x):\n  if x == 77: exit()\n  return 2 * x", 1.0, 0.0, "passes", 2),
]


@pytest.mark.parametrize(("code", "public", "hidden", "report", "runs"), VERDICTS)
def test_what_the_tests_say(code, public, hidden, report, runs):
    result = score_program(shared_pool(), code, TASK, QUICK)
    assert (result.public, result.hidden, result.report, result.runs) == (public, hidden, report, runs)


def test_a_program_cannot_write_its_own_report():
    forged = "import json\nraise AssertionError('0' * 32 + json.dumps([2, 3, -1, '', '']))"
    for code in (forged, f"def f(x):\n  {forged.replace('import json', 'import json;')[:-1].replace(chr(10), '')})"):
        assert score_program(shared_pool(), code, TASK, QUICK).hidden == 0.0
    liar = "class E(int):\n  __eq__ = lambda *_: True\ndef f(x): return E()"
    assert score_program(shared_pool(), liar, TASK, QUICK).hidden == 0.0


def test_a_program_cannot_show_the_hidden_tests():
    for answer in ("seen", "{str(y): seen for y in seen}", "(y for y in list(seen))", "str(seen)"):
        result = score_program(
            shared_pool(), f"seen = []\ndef f(x):\n    seen.append(x)\n    return {answer}", TASK, QUICK
        )
        assert result.report.startswith("f(1)=") and not set("237") & set(result.report.partition("not")[0])
    assert result.report == "f(1)='[1, 4, 1]' not 2"


def test_only_tests_that_look_at_arguments_see_what_a_call_does_to_them():
    public, hidden = "x = [2, 1]\nf(x)\nassert len(x) < 3", "x = [2, 1]\nassert f(x) == sorted(x)"
    task = CodeTask((CallTest(hidden),), (CallTest(public),), "f")
    emptied = score_program(shared_pool(), "def f(x):\n    x.clear()\n    return []", task, QUICK)
    assert (emptied.public, emptied.hidden) == (1.0, 0.0)


def test_setup_is_for_the_tests_alone_and_without_public_tests_nothing_is_told():
    setup = "import math\ndef f(x): return 0\ndef twice(x): return f(x)"
    task = CodeTask((CallTest("assert math.floor(twice(2)) == 4"),), entry_point="f", setup=setup)
    assert score_program(shared_pool(), "def f(x): return 2 * x", task, QUICK).hidden == 1.0
    for code in ("def f(x): return 0", "def f(x): return math.pi", "import time\ndef f(x): time.sleep(99)"):
        result = score_program(shared_pool(), code, task, QUICK)
        assert (result.public, result.hidden, result.report) == (0.0, 0.0, "no tests")


def test_programs_that_read_and_print():
    task = CodeTask((StdioTest(b"2", b"4\n"), StdioTest(b"-3", b"-6\n")), (StdioTest(b"1", b"2\n"),))
    right = score_program(shared_pool(), "print(2 * int(input()))", task, Limits())
    assert (right.public, right.hidden, right.report, right.runs) == (1.0, 1.0, "passes", 3)
    wrong = score_program(shared_pool(), "print(4)", task, Limits())
    assert (wrong.public, wrong.hidden, wrong.report) == (0.0, 0.5, "fails (wrong): 1 -> 2")


def test_a_program_that_waits_in_every_test_is_not_waited_for_in_each():
    """A step has a deadline, and a task may have hundreds of tests."""
    numbers = [StdioTest(b"%d" % n, b"%d" % n) for n in range(100)]
    program = "import time\nn = int(input())\nif n > 1: time.sleep(99)\nprint(n)"
    result = score_program(shared_pool(), program, CodeTask(tuple(numbers), (numbers[5], numbers[6])), Limits(wall_s=2))
    assert (result.public, result.hidden, result.runs) == (0.0, 0.02, 1 + 3)
    assert result.report == "fails (timeout): 5 -> 5"


@pytest.mark.parametrize(
    ("source", "sides"),
    [
        ("assert f(1, [2]) == 3", ("f(1, [2])", "3")),
        ("assert f('=='), 'text'", ("", "")),
        ("assert f(1) == 2 == 2", ("", "")),
        ("assert f(1) < 2", ("", "")),
        ("x = 1\nassert f(x) == 1", ("", "")),
        ("assert f(", ("", "")),
    ],
)
def test_both_sides_of_an_equality(source, sides):
    assert split_equality(source) == sides


def test_hidden_tests_are_in_no_prompt():
    env = CodeTeam(levels=(1, 2, 3, 4), count=40, prompt="{task} {tests}\n", turns=3)
    for index in range(20):
        env.reset(options={"index": index})
        hidden = {split_equality(test.source)[0] for test in env.task.code.hidden}
        while not all(env.terminations.values()):
            prompt = env.observe(env.agent_selection)
            assert not any(call in prompt for call in hidden)
            env.step("def f(x,y=0):return x")


def test_demonstrations_are_played_and_end_well():
    env = CodeTeam(levels=(1, 2, 3, 4), count=60, seed=3)
    env.reset(options={"index": 0})
    before = env.observe("generator")
    shown = env.demonstrations(40, seed=1)
    assert env.observe("generator") == before and env.demonstrations(40, seed=1) == shown
    agents = Counter(demonstration.agent for demonstration in shown)
    assert 8 <= agents["reviewer"] <= 32 and agents["generator"] == 40 + agents["reviewer"]
    references = {task.prompt: task.code.reference for task in env.train}  # type: ignore[attr-defined]  # of its environment's tasks
    for last, after in zip(shown, [*shown[1:], shown[0]], strict=True):
        task, _, rest = last.prompt.partition("\n")
        if last.agent == "reviewer":
            wrong, right = last.response.split(" should be ")
            assert wrong in rest and right in references[task] and after.agent == "generator"
            assert after.prompt == last.prompt[:-1] + f"{last.response}\n!"
            assert after.response == references[task]
        else:
            assert last.response == references[task]
    assert {demonstration.agent for demonstration in CodeTeam(count=20, turns=1).demonstrations(20, 0)} == {"generator"}


def test_demonstrations_of_a_file(tmp_path):
    env = team(tmp_path, answer="block", mistakes=1.0)
    shown = env.demonstrations(1, 0)
    assert [demonstration.agent for demonstration in shown] == ["generator", "reviewer", "generator"]
    assert shown[-1].response == f"```python\n{RIGHT}\n```"
    (tmp_path / "hidden").mkdir()
    untold = team(tmp_path / "hidden", [{**SQUARE, "public_tests": []}], mistakes=1.0).demonstrations(1, 0)
    assert [demonstration.agent for demonstration in untold] == ["generator", "reviewer", "generator"]
    # Nobody notices a mistake, so none is repaired.
    assert {demonstration.response for demonstration in untold} == {RIGHT, ""}
    folders = [tmp_path / name for name in ("none", "wrong")]
    for folder, reference, message in zip(folders, ("", "x = 1"), ("expected one", "fails its tests"), strict=True):
        folder.mkdir()
        with pytest.raises(MarlRayError, match=f"task square: reference: {message}"):
            team(folder, [{**SQUARE, "reference": reference}]).demonstrations(1, 0)


def test_copies_share_one_sandbox_from_many_threads():
    env = CodeTeam(count=30)

    def episode(index: int) -> bool:
        copy = CodeTeam(count=30)
        copy.reset(options={"index": index})
        copy.step(copy.task.code.reference)
        return bool(copy.infos["generator"]["solved"])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(episode, range(30)))
        assert len({id(pool) for pool in threads.map(lambda _: shared_pool(), range(8))}) == 1
    assert env.tasks > 20


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"turns": 0}, "turns=0, expected 1 or more"),
        ({"answer": "json"}, "answer='json', expected 'program' or 'block'"),
        ({"mistakes": 2}, "mistakes=2, expected 0 to 1"),
        ({"levels": [5]}, "levels: 5, expected some of 1 to 4"),
        ({"prompt": "{code}"}, "prompt: '{code}' cannot be filled"),
        ({"review_prompt": "{review}"}, "review_prompt: '{review}' cannot be filled"),
        ({"shaping": -1}, "shaping=-1, expected a finite number, 0 or more"),
        ({"turns": float("nan")}, "turns=nan, expected a whole number"),
        ({"timeout_s": 0}, "timeout_s=0, expected seconds, more than 0 and less than a day (86,400)"),
        ({"memory_bytes": 1 << 70}, "expected a whole number of bytes, at least 64 MiB (67,108,864) and at most"),
        ({"cost": ["money"]}, "cost: 'money', expected some of"),
    ],
)
def test_mistakes_are_one_line_and_name_the_key(kwargs, message):
    with pytest.raises(MarlRayError) as caught:
        make_env(EnvConfig(id="code_team", kwargs=kwargs))
    assert f"env.kwargs: code_team rejected {kwargs} (" in str(caught.value)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_option_is_named_with_those_that_there_are():
    with pytest.raises(
        MarlRayError, match=r"^env\.kwargs\.budget: code_team has no such argument; expected one of data, "
    ):
        make_env(EnvConfig(id="code_team", kwargs={"budget": 1}))
