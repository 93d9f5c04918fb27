"""Synthetic programs and their mutants in the sandbox."""

import random
from collections.abc import Iterator

import pytest

from marl_ray.envs.text.code_tests import score_program
from marl_ray.envs.text.synthetic.mutants import mutants
from marl_ray.envs.text.synthetic.programs import programs
from marl_ray.sandbox import Level, Limits, Pool

LEVELS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, min_level=Level.LIMITS) as pool:
        yield pool


@pytest.mark.parametrize("level", LEVELS)
def test_references_pass_and_mutants_fail_in_the_sandbox(pool, level):
    draw = random.Random(level)
    for task in draw.sample(programs(100, (level,), "train"), 10):
        right = score_program(pool, task.code.reference, task.code, Limits())
        assert (right.public, right.hidden, right.report) == (1.0, 1.0, "passes"), task
        caught = [score_program(pool, m.code, task.code, Limits()).hidden < 1 for m in mutants(task.code.reference)]
        assert sum(caught) > len(caught) / 2, task  # some are the same function, as (x%20)%30 and (x%20)%31


def test_most_mistakes_fail_a_public_test(pool):
    tasks = programs(200, (1, 2), "train")[::10]
    passing = [
        score_program(pool, mutant.code, task.code, Limits()).public < 1
        for task in tasks
        for mutant in mutants(task.code.reference)[:2]
    ]
    assert sum(passing) > 0.8 * len(passing)
