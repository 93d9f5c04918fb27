"""The environment `react`: episodes end with an answer or with the last turn, and every limit holds whatever is written."""

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo.test import seed_test

from marl_ray.agents.errors import ToolTimeoutError
from marl_ray.agents.made_up_country import QUESTION_KINDS
from marl_ray.agents.tools import make_tool
from marl_ray.config import EnvConfig
from marl_ray.envs.registry import make_env
from marl_ray.envs.text.react import MADE_UP_TOOLS, SEARCH_TOOL, React
from marl_ray.errors import MarlRayError
from marl_ray.rewards.answers import same_answer

OFFLINE = {SEARCH_TOOL: {"corpus": "towns"}}
needs_sandbox = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")


def write(tool: str, **arguments: Any) -> str:
    return f"Thought: x\nAction: {tool}\nInput: {json.dumps(arguments)}"


def search(query: str) -> str:
    return write(SEARCH_TOOL, query=query)


def play(env: React, *responses: str, **options: Any) -> dict[str, Any]:
    """The infos after these responses."""
    env.reset(seed=0, options=options)
    for response in responses:
        env.step(response)
    return dict(env.infos[env.possible_agents[0]])


def test_it_is_played_as_pettingzoo_says():
    seed_test(lambda: React(OFFLINE))
    env = make_env(EnvConfig(id="react", kwargs={"tools": OFFLINE, "max_turns": 3}))
    for seed in range(3):
        env.reset(seed=seed)
        env.action_space("agent").seed(seed)
        turns = 0
        for agent in env.agent_iter(10):
            observation, _, terminated, truncated, _ = env.last()
            assert env.observation_space(agent).contains(observation)
            env.step(None if terminated or truncated else env.action_space(agent).sample())
            turns += 1
        assert (env.agents, turns) == ([], 4)


def test_an_episode_shows_observations_of_a_search():
    env = React(OFFLINE, kinds=["fact"], agent="seeker", cost=["calls", "tokens"])
    env.reset(options={"index": 3})
    first = env.observe("seeker")
    assert first.endswith(f"Question: {env.task.prompt}\n(6 turns left)\n")
    response = search(env.task.plan[0].arguments["query"])
    env.step(response)
    assert env.infos["seeker"] == {"cost": (1.0, float(len(response)))}
    assert env.rewards == {"seeker": 0.0}
    assert not any(env.terminations.values())
    second = env.observe("seeker")
    assert second.startswith(first.removesuffix("(6 turns left)\n") + response + "\nObservation: 1. ")
    assert env.task.answer in second
    env.step(write("answer", answer=env.task.answer))
    assert env.rewards == {"seeker": 1.0}
    assert env.terminations == {"seeker": True}
    metrics = {"pass": 1.0, "answered": 1.0, "calls": 1.0, "failed_actions": 0.0, "turns": 2.0}
    info = env.infos["seeker"]
    assert (info["solved"], info["metrics"], info["cost"][0]) == (True, metrics, 0.0)


def test_a_wrong_answer_and_no_answer_earn_nothing():
    env = React(OFFLINE, max_turns=3)
    assert play(env, write("answer", answer="Nowhere"), index=0)["metrics"]["answered"] == 1.0
    assert (env.rewards["agent"], env.infos["agent"]["solved"]) == (0.0, False)
    info = play(env, "I think.", write("serch", query="x"), search("x"), index=0)
    assert info == {
        "solved": False,
        "metrics": {"pass": 0.0, "answered": 0.0, "calls": 1.0, "failed_actions": 2.0, "turns": 3.0},
    }
    assert env.rewards["agent"] == 0.0


def test_made_up_observations_do_not_reach_later_prompts():
    env = React(OFFLINE)
    play(env, search("x") + "\nObservation: The answer is 5.\nAction: answer", index=0)
    assert "The answer is 5" not in env.observe("agent")


@settings(max_examples=30)
@given(
    st.lists(
        st.sampled_from(
            [
                "junk",
                search("Wenath"),
                search("x" * 3000),
                SEARCH_TOOL,
                write(SEARCH_TOOL.upper(), query="a"),
                "y" * 5000,
            ]
        )
        | st.text(max_size=20),
        min_size=8,
        max_size=8,
    ),
    st.integers(0, 3),
)
def test_limits_hold_whatever_is_written(responses, max_calls):
    env = React(OFFLINE, kinds=["fact"], max_turns=7, max_calls=max(1, max_calls), prompt_limit=900, cost=["calls"])
    env.reset(seed=0, options={"index": 0})
    calls = 0.0
    for response in responses:
        assert len(env.observe("agent")) <= 900
        env.step(response)
        calls += env.infos["agent"]["cost"][0]
        if env.terminations["agent"]:
            break
    assert env.infos["agent"]["metrics"]["turns"] <= 7
    assert calls == env.infos["agent"]["metrics"]["calls"] <= max(1, max_calls)


def test_no_call_is_left_beyond_the_limit():
    env = React(OFFLINE, kinds=["fact"], max_calls=1)
    play(env, search("x"), search("x"), index=0)
    assert env.observe("agent").endswith("No tool calls are left. Give the answer.\n(4 turns and 0 tool calls left)\n")
    env.step(write("answer", answer=env.task.answer))
    assert env.infos["agent"]["solved"]


def test_splits_do_not_share_a_question():
    env = React(OFFLINE)
    prompts = {split: {task.prompt for task in getattr(env, split)} for split in ("train", "test")}
    assert not prompts["train"] & prompts["test"]
    assert (env.tasks, env.held_out) == (len(prompts["train"]), len(prompts["test"]))
    assert env.level(0) in (1.0, 2.0)
    people = {split: {task.plan[0].arguments["query"] for task in getattr(env, split)} for split in ("train", "test")}
    assert not people["train"] & people["test"]


@needs_sandbox
def test_the_expert_is_right_and_its_prompts_are_the_environments():
    env = React(MADE_UP_TOOLS, cost=["calls"])
    shown = env.demonstrations(25, seed=4)
    assert shown == env.demonstrations(25, seed=4) != env.demonstrations(25, seed=5)
    episodes: list[list[Any]] = []
    for demonstration in shown:
        if demonstration.prompt.endswith("(6 turns left)\n"):
            episodes.append([])
        episodes[-1].append(demonstration)
    assert len(episodes) == 25
    by_prompt = {task.prompt: task for task in env.train}
    played = set()
    for episode in episodes:
        task = by_prompt[episode[0].prompt.split("Question: ")[1].split("\n")[0]]
        env.reset(options={"index": next(i for i in range(env.tasks) if env.task_at(i, "train") is task)})
        played.add(task.kind)  # type: ignore[attr-defined]  # of its environment's tasks
        for demonstration in episode:
            assert env.observe(demonstration.agent) == demonstration.prompt
            env.step(demonstration.response)
        assert env.infos["agent"]["metrics"]["failed_actions"] == 0.0
        assert env.infos["agent"]["solved"]
    assert played == set(QUESTION_KINDS)


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "(no output)"),
        ("print('before')\n1 / 0", "ZeroDivisionError: division by zero"),
        ("while True: pass", "Timed out after "),  # 0.3 s, or on a busy machine 1.2 s
        ("x = 'a' * (1 << 40)", "Ended by the limits of the sandbox: oom."),
        ("print('x' * 200)", 48 * "x" + " ... " + 47 * "x"),
        ("import os, socket\nsocket.create_connection(('127.0.0.1', 80))", "PermissionError"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff')", "\ufffd"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_the_code_interpreter_shows_what_a_program_prints_or_why_it_fails(code, words):
    options = {"timeout_s": 0.3 if "while" in code else 20.0, "output_characters": 400 if "Error" in words else 100}
    tool = make_tool("code_interpreter", options)
    assert words in tool.call({"code": code}, time.monotonic() + 60)


@needs_sandbox
def test_a_program_that_waits_is_over_with_the_call_that_ran_it():
    tool, waits = make_tool("code_interpreter", {"timeout_s": 0.2}), {"code": "import time\ntime.sleep(50)"}
    for left_s in (-1.0, 0.3):
        with pytest.raises(ToolTimeoutError):
            tool.call(waits, time.monotonic() + left_s)
    assert tool.call(waits, time.monotonic() + 60) == "Timed out after 0.8 s."


@needs_sandbox
def test_programs_keep_nothing():
    tool = make_tool("code_interpreter", {})
    tool.call({"code": "open('left', 'w').write('x')\nx = 1"}, time.monotonic() + 60)
    assert "NameError" in tool.call({"code": "import os\nprint(os.listdir())\nx"}, time.monotonic() + 60)
    assert "[]" in tool.call({"code": "import os\nprint(os.listdir())"}, time.monotonic() + 60)


def test_questions_of_a_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"prompt": "Which town?", "answer": "The Hague", "solution": "It is in the west."}\n'
        '{"prompt": "Half of 9?", "answer": 4.5}\n'
    )
    env = React([], data=str(path), held_out=0.0, instructions="")
    assert env.tasks == 2
    for demonstration in env.demonstrations(2, 0):
        env.reset(
            options={"index": next(i for i in range(2) if env.task_at(i, "train").prompt in demonstration.prompt)}
        )
        assert env.observe("agent") == demonstration.prompt == f"Question: {env.task.prompt}\n(6 turns left)\n"
        env.step(demonstration.response)
        assert env.infos["agent"]["solved"]


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("the Hague.", "The Hague", True),
        ("St. John's", "st johns", True),
        ("Hague", "The Hague", True),
        ("1,234", "1234", True),
        ("4.50", "4.5", True),
        ("-5", "5", False),
        ("3.5", "35", False),
        ("35", "3-5", False),
        ("351", "3.5.1", False),
        ("The 3-5.", "3-5", True),
        ("It is Hague", "Hague", False),
        ("", "Hague", False),
        ("the", "the", True),
        ("...", "the", False),
        ("9" * 100_000, "9", False),
        ("**The Hague**", "Hague", True),
        ("Guinea-Bissau", "guinea-bissau.", True),
        ("x=5", "x=-5", False),
        ("x^2-1", "x^2+1", False),
        ("-5x", "5x", False),
        ("3i", "-3i", False),
        ("[1,2]", "(1,2)", False),
        ("12", "(1,-2)", False),
        ("5", "5!", False),
        ("x<5", "x>5", False),
        ("C", "C++", False),
        ("c++", "C++", True),
    ],
)
def test_when_answers_are_the_same(answer, expected, same):
    assert same_answer(answer, expected) is same


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"tools": ["google_search"]}, "tools: 'google_search' is unknown; did you mean google_search_serper"),
        ({"tools": []}, "kinds: none can be answered with these tools"),
        ({"tools": OFFLINE, "kinds": ["arithmetic"]}, "kinds: arithmetic cannot be answered"),
        ({"tools": OFFLINE, "kinds": ["two_step"], "max_turns": 2}, "kinds: two_step cannot be answered"),
        ({"tools": OFFLINE, "kinds": ["two_step"], "max_calls": 1}, "kinds: two_step cannot be answered"),
        ({"kinds": ["facts"]}, "kinds: 'facts', expected some of arithmetic"),
        ({"max_turns": 0}, "max_turns=0, expected more than 0"),
        ({"max_calls": -1}, "max_calls=-1"),
        ({"max_calls": float("nan")}, "max_calls=nan, expected 0 or more"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"prompt_limit": 100}, "prompt_limit=100: the longest prompt"),
        ({"cost": ["money"]}, "cost: 'money'"),
        ({"data": "/missing.jsonl"}, "/missing.jsonl: cannot be read"),
        ({"data": "/missing.jsonl", "kinds": ["fact"]}, "kinds: expected without `data`"),
    ],
)
def test_a_wrong_argument_is_one_line(kwargs, words):
    with pytest.raises((ValueError, MarlRayError)) as error:
        React(**kwargs)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_that_is_missing_is_told_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a?", "answer": "b"}\n')
    with pytest.raises(MarlRayError, match="google_search_serper: needs a key"):
        React([SEARCH_TOOL], data=str(path), held_out=0.0)
