"""The choice of the next task: the built-in order by difficulty, own choosers, and their memory."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys.text_envs import WORDS, Echo, Talk

from marl_ray.errors import MarlRayError
from marl_ray.rollout.text.curriculum import PASSED_SHARE, Curriculum, easiest_first


def last_first(position, solved, tasks):
    return tasks - 1 - position % tasks


def no_task(position, solved, tasks):
    return tasks


@given(st.lists(st.floats(0, 5), min_size=1, max_size=40), st.integers(0, 1000))
def test_easiest_first_begins_with_the_easiest_tenth(levels, position):
    tasks = len(levels)
    choose = easiest_first(levels)
    first = {choose(p, {}, tasks) for p in range(position, position + tasks)}
    assert len(first) == -(-tasks // 10)
    assert max(levels[i] for i in first) <= min([levels[i] for i in range(tasks) if i not in first], default=5.0)
    # All solved, all are open, and each comes once in a round.
    everything = dict.fromkeys(range(tasks), 1.0)
    assert sorted(choose(p, everything, tasks) for p in range(position, position + tasks)) == list(range(tasks))


def test_a_further_part_opens_when_the_open_ones_are_solved():
    choose = easiest_first([float(i) for i in range(20)])

    def opened(solved):
        return {choose(p, solved, 20) for p in range(200)}

    assert opened({}) == opened({0: 1.0, 1: 0.3}) == {0, 1}
    assert opened({0: 1.0, 1: 2 * PASSED_SHARE - 1}) == {0, 1, 2, 3}
    assert opened({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}) == {0, 1, 2, 3, 4, 5}
    assert opened(dict.fromkeys(range(4, 20), 1.0)) == {0, 1}


def test_levels_are_the_environments():
    curriculum = Curriculum("easiest_first", Echo(), {})
    assert {curriculum.task(p) % len(WORDS) for p in range(20)} == {0}


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.25, 1.0])), max_size=30), st.integers(0, 30))
def test_a_running_mean_continues_from_its_state(outcomes, count):
    unbroken, first = Curriculum("easiest_first", Echo(), {}), Curriculum("easiest_first", Echo(), {})
    unbroken.add(outcomes)
    first.add(outcomes[:count])
    second = Curriculum("easiest_first", Echo(), first.state())
    second.add(outcomes[count:])
    assert second.state() == unbroken.state()
    for index in {index for index, _ in outcomes}:
        shares = [share for i, share in outcomes if i == index]
        assert min(shares) <= unbroken.solved[index] <= max(shares)
        if len(shares) <= 5:
            assert unbroken.solved[index] == pytest.approx(sum(shares) / len(shares))


def test_own_choosers_are_found_by_their_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_choosers", sys.modules[__name__])
    assert [Curriculum("own_choosers:last_first", Echo(), {}).task(p) for p in range(3)] == [19, 18, 17]
    with pytest.raises(
        MarlRayError, match=r"^train\.curriculum=own_choosers:no_task: chose 20, expected a whole number in \[0, 20\)$"
    ):
        Curriculum("own_choosers:no_task", Echo(), {}).task(0)


@pytest.mark.parametrize(
    ("name", "env", "message"),
    [
        ("easiest_first", Talk, "with `tasks`"),
        ("hardest_first", Echo, "expected easiest_first or package.module:callable"),
        ("no_such_module:choose", Echo, "cannot import 'no_such_module' of"),
        ("math:no_such_name", Echo, "'no_such_name' of 'math:no_such_name' is not in the module"),
        ("math:pi", Echo, "expected a callable"),
    ],
)
def test_a_wrong_curriculum_is_one_line(name, env, message):
    with pytest.raises(MarlRayError, match=r"^train\.curriculum") as error:
        Curriculum(name, env(), {})
    assert message in str(error.value) and "\n" not in str(error.value)
