"""Tasks that are made: splits that share no prompt, sums that are right, and as many tests as promised."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.envs.text.base import is_held_out
from marl_ray.envs.text.synthetic.arithmetic import arithmetic
from marl_ray.envs.text.synthetic.families import FAMILIES
from marl_ray.envs.text.synthetic.function_tests import HIDDEN_TESTS, PUBLIC_TESTS
from marl_ray.envs.text.synthetic.mutants import mutants
from marl_ray.envs.text.synthetic.programs import SyntheticProgramTask, programs
from marl_ray.rewards import math_reward

LEVELS = (1, 2, 3, 4)


@pytest.mark.parametrize("make", [arithmetic, programs])
def test_splits_are_disjoint_and_seeds_change_the_tasks_and_not_the_split(make):
    train, test, other = (make(200, LEVELS, *rest) for rest in (("train", 0), ("test", 0), ("train", 1)))
    prompts = [{task.prompt for task in tasks} for tasks in (train, test, other)]
    assert len(prompts[0]) == len(train) <= 200 and len(prompts[1]) == len(test)
    assert not (prompts[0] | prompts[2]) & prompts[1] and prompts[0] != prompts[2]
    assert make(200, LEVELS, "train", 0) == train
    assert set(Counter(task.level for task in train)) == set(Counter(task.level for task in test)) == set(LEVELS)


@pytest.mark.parametrize(("count", "split", "expected"), [(8, "train", (3, 3, 2)), (1000, "test", (86, 85, 85))])
def test_there_are_no_more_tasks_than_asked_for_or_held_out(count, split, expected):
    counts = Counter(task.level for task in arithmetic(count, (2, 4, 5), split))
    assert tuple(counts[level] for level in (2, 4, 5)) == expected


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_sums_are_right(level):
    tasks = arithmetic(150, (level,), "train")
    assert len(tasks) == 150 and {task.level for task in tasks} == {level}
    for task in tasks:
        assert int(task.answer) == eval(task.prompt.removesuffix("="))
        assert math_reward(task.prompt + task.answer, task.answer) == 1.0


def test_wrong_arguments_are_named():
    for arguments, message in (((0, (1,)), "count=0"), ((1, ()), "levels: none"), ((1, (1, 9)), "levels: 9")):
        with pytest.raises(ValueError, match=message):
            programs(*arguments, "train")


def test_there_are_many_families_and_all_is_short():
    assert len(FAMILIES) == len({family.text + family.kind for family in FAMILIES}) > 60
    tasks = programs(600, LEVELS, "train")
    assert max(len(task.prompt) for task in tasks) <= 40
    assert max(len(task.code.reference) for task in tasks) < 60
    kinds = {(task.kind, task.prompt.translate(str.maketrans("", "", "0123456789'"))) for task in tasks}  # type: ignore[attr-defined]  # of its environment's tasks
    assert len(kinds) > 100


def test_tests_are_as_many_as_promised_and_public_ones_are_no_hidden_ones():
    sixth = SyntheticProgramTask("l item 5", "l", "x[5]", 2)  # most lists are too short for it
    for task in (*programs(100, LEVELS, "train"), sixth):
        hidden, public = ({test.source for test in tests} for tests in (task.code.hidden, task.code.public))
        assert (len(hidden), len(public)) == (HIDDEN_TESTS, PUBLIC_TESTS) and not hidden & public


def test_mutants_change_one_token():
    mutated = mutants("def f(x):\n    return x[-3:] + [len('a') <= 0]  # 7\n")
    assert ("def f(x):\n    return x[-4:] + [len('a') <= 0]  # 7\n", "4", "3") in mutated
    assert {(mutant.right, mutant.wrong) for mutant in mutated} == {
        ("-", "+"), ("3", "4"), ("3", "2"), ("3", "5"), ("+", "-"), ("'a'", "'b'"), ("'a'", "'c'"), ("<=", ">="),
        ("0", "1"), ("0", "2"),
    }  # fmt: skip
    assert mutants("def f(:\n  '''") == []


@pytest.mark.parametrize("first", ['x = "a\x0cb"', "# a\u2028b", "# a\x1cb\x85c", "\x0c", "# a\r\nz = x"])
def test_only_line_ends_of_python_end_a_line_of_a_mutant(first):
    mutated = [code for code, wrong, _ in mutants(f"{first}\ny = 1\n") if wrong == "2"]
    assert mutated == [f"{first}\ny = 2\n"]


@given(st.text(max_size=30))
@settings(max_examples=50)
def test_any_prompt_is_on_one_side_and_larger_shares_contain_smaller(prompt):
    assert not is_held_out(prompt, 0.0)
    assert not is_held_out(prompt, 0.1) or is_held_out(prompt, 0.2)
