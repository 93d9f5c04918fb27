"""EvalPlus' rules of comparison, and how its files are read."""

import json
import math
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import FileRow, benchmark
from marl_ray.evaluation.benchmarks.evalplus import mbpp_inputs
from marl_ray.evaluation.benchmarks.sandboxed.evalplus_driver import (
    TimeLimitError,
    check,
    dumps,
    is_near,
    loads,
    outputs,
    same,
    time_limit,
)
from marl_ray.extensions import BENCHMARK

FIXTURES = Path(__file__).parents[2] / "fixtures"
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=4)
)
HASHABLE = LEAVES | st.complex_numbers(allow_nan=False) | st.tuples(LEAVES, LEAVES)
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=3) | st.frozensets(HASHABLE, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(HASHABLE, inner, max_size=3),
    max_leaves=10,
)


@given(VALUES)
def test_values_cross_as_they_are(value):
    back = loads(dumps(value))
    assert back == value and type(back) is type(value)


def test_what_is_wanted_may_be_large_not_a_number_or_counted():
    assert loads(dumps(10**5000)) == 10**5000
    assert math.isnan(loads(dumps([math.nan]))[0])
    assert loads(dumps(Counter("aab"))) == Counter("aab")
    with pytest.raises(TypeError, match="an output of type builtin_function"):
        dumps([len, dumps])


@pytest.mark.parametrize(
    ("output", "want", "close"),
    [
        (1.0, 1.0 + 9e-7, True),
        (1.0, 1.0 + 3e-6, False),
        ([1, 2.0], [1.0, 2.0], True),
        ([1.0], [1.0, 2.0], False),
        ((1.0,), [1.0], True),
        ([[1.0], [2.0]], [[1.0], [2.0 + 1e-7]], True),
        ([[1.0], [2.0]], [[1.0, 1.0], [2.0, 2.0]], False),
        ("1.0", 1.0, False),
        (None, 1.0, False),
        (math.inf, math.inf, True),
        (math.nan, math.nan, False),
        (1.0, math.inf, False),
        (-math.inf, math.inf, False),
        ([5.0, 1.0], [-math.inf, 1.0], False),
        ([math.inf, 1.0], [math.inf, 1.0 + 1e-7], True),
        (1e12, 1e12 + 1e4, True),
    ],
)
def test_what_is_near_counts_as_equal(output, want, close):
    assert is_near(output, want, 1e-6) is close


@pytest.mark.parametrize(
    ("name", "given_to", "output", "want", "right"),
    [
        ("f", [1], (1, 2), [1, 2], False),
        ("f", [1], True, 1, True),
        ("are_equivalent", [1, 2], "anything", True, True),
        ("sum_div", [1], 0, 1, True),
        ("sum_div", [1], 2, 1, False),
        ("surface_Area", [3, 4], 33, 33, True),
        ("surface_Area", [4, 5], 59, 56, True),
        ("surface_Area", [4, 5], 60, 56, False),
        ("digit_distance_nums", [100, 1], 2, 18, True),
        ("digit_distance_nums", [100, 1], 3, 18, False),
        ("similar_elements", [(), ()], [2, 1, 1], (1, 2), True),
        ("Diff", [(), ()], [2, 1, 3], (1, 2), False),
        ("check_str", ["a"], "a match", True, True),
        ("check_str", ["a"], None, True, False),
        ("check_str", ["a"], False, False, True),
        ("check_str", ["a"], False, True, False),
    ],
)
def test_special_oracles_judge_their_tasks(name, given_to, output, want, right):
    assert same(name, given_to, output, want, 0.0) is right


def check_outputs(function, inputs, expected, atol=0.0, name="f", limit=5.0):
    check(function, name, "base", dumps(inputs), dumps(expected), atol, [limit] * len(inputs))


def test_floats_are_met_nearly_and_other_outputs_exactly():
    check_outputs(lambda x: x + 1e-8, [[1.0]], [1.0])
    with pytest.raises(AssertionError, match=r"^base input 2 of 2$"):
        check_outputs(lambda x: x, [[1], [2]], [1, 3])
    with pytest.raises(AssertionError, match="input 1 of 1"):
        check_outputs(lambda x: x + 1e-8, [[1]], [1])
    with pytest.raises(AssertionError, match="input 1 of 1"):
        check_outputs(lambda x: 1, [[1.0]], [1.0 + 1e-9])  # an int is no float
    check_outputs(lambda x: x + 1e-8, [[1.0], [2]], [1.0, 2.0])
    check_outputs(lambda x: [x + 1e-4], [[1]], [[1.0]], atol=1e-3)


def test_a_zero_is_found_wherever_it_is_and_the_function_cannot_change_its_polynomial():
    check_outputs(lambda xs: 1.0, [[[-1, 0, 1]]], [-1.0], atol=1e-4, name="find_zero")

    def clears(xs):
        xs.clear()
        return 5.0

    with pytest.raises(AssertionError):
        check_outputs(clears, [[[-1, 0, 1]]], [-1.0], atol=1e-4, name="find_zero")


def test_an_input_has_its_own_time():
    with pytest.raises(AssertionError, match=r"base input 1 of 1: took over 0\.05 s"):
        check_outputs(lambda x: time.sleep(5), [[1]], [None], limit=0.05)
    with pytest.raises(AssertionError, match="took over"):
        check_outputs(lambda x: (1 for _ in iter(int, 1)), [[1]], [[1]], name="Diff", limit=0.05)


def test_a_time_limit_leaves_the_timer_that_was_running():
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        signal.setitimer(signal.ITIMER_REAL, 50)
        with pytest.raises(TimeLimitError), time_limit(0.01):
            time.sleep(5)
        assert 40 < signal.getitimer(signal.ITIMER_REAL)[0] < 50
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_reference_sees_fresh_inputs_and_prints_nothing(capsys):
    program = "def f(xs):\n    print(xs)\n    xs.append(1)\n    return len(xs)\n"
    printed, seconds = outputs(program, "f", dumps([[[1]], [[1, 2]]]), False)
    assert loads(printed) == [2, 3] and len(seconds) == 2
    assert loads(outputs("def f(x): return x or None", "f", dumps([[0], [1]]), True)[0]) == [False, True]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("number", "given_to", "meant"),
    [
        (1, [[1, [2]]], [[1, [2]]]),
        (2, [[[1], [2]]], [[(1,), (2,)]]),
        (63, [[[[1, 2], [3]]]], [[[(1, 2), (3,)]]]),
        (75, [[[[1], [2]], 3]], [[[(1,), (2,)], 3]]),
        (106, [[[1], [2]]], [[[1], (2,)]]),
        (115, [[[[1, 1], [], 2]]], [[[{1}, {}, {}]]]),
        (124, [["1", "2j"]], [(1.0, 2j)]),
        (250, [[[1], 2]], [[(1,), 2]]),
        (252, [["1+2j"]], [[1 + 2j]]),
        (259, [[[[1], [2]], [[3]]]], [[((1,), (2,)), ((3,),)]]),
        (278, [[[[1], 2]]], [[((1,), 2)]]),
        (307, [[[1], 2, 3]], [[(1,), 2, 3]]),
        (580, [[[1, [2, [3]]]]], [((1, (2, (3,))),)]),
        (722, [[{"a": [1, 2]}, 3]], [[{"a": (1, 2)}, 3]]),
    ],
)
def test_mbpp_inputs_are_what_the_tasks_mean(number, given_to, meant):
    assert mbpp_inputs(number, given_to) == meant


def row(name: str, **change) -> list[FileRow]:
    record = json.loads((FIXTURES / f"{name}.jsonl").read_text().splitlines()[0]) | change
    return [FileRow("f:1", {key: value for key, value in record.items() if value is not ...})]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "humaneval",
            {"plus_input": []},
            "f:1: unknown key 'plus_input'; expected one of task_id, prompt, entry_point",
        ),
        ("humaneval", {"base_input": []}, "f:1: unknown key 'base_input'"),
        ("humaneval_plus", {"more_input": []}, "f:1: unknown key 'more_input'"),
        ("humaneval_plus", {"plus_input": ...}, "f:1: missing key 'plus_input'"),
        ("humaneval_plus", {"plus_input": [1]}, r"f:1: plus_input\.0: expected a list"),
        ("humaneval_plus", {"task_id": "Mbpp/2"}, "f:1: task_id 'Mbpp/2': expected HumanEval/ and a number"),
        ("mbpp_plus", {"base_input": [[1]]}, "f:1: base_input: not in the form of Mbpp/2"),
        ("mbpp_plus", {"test_list": []}, "f:1: unknown key 'test_list'"),
        ("mbpp", {"hidden_tests": []}, "f:1: unknown key 'hidden_tests'"),
        ("bigcodebench", {"tests": ""}, "f:1: unknown key 'tests'"),
        ("codecontests", {"more_tests": {}}, "f:1: unknown key 'more_tests'"),
        ("codecontests", {"public_tests": {"input": ["1"], "output": ["1"], "checker": "x"}}, "public_tests.checker"),
        ("sandboxfusion", {"canonical": ""}, "f:1: unknown key 'canonical'"),
    ],
)
def test_fields_that_nobody_knows_are_refused_by_name(name, change, message):
    chosen = {"bigcodebench": "bigcodebench-complete", "sandboxfusion": "codecontests"}.get(name, name)
    with pytest.raises(MarlRayError, match=message):
        benchmark(chosen).parse(row(name, **change))


def test_what_a_prompt_of_mbpp_plus_shows_is_public():
    problem = benchmark("mbpp_plus").parse(row("mbpp_plus"))[0]
    assert [test.source for test in problem.visible_task.public] == ["assert similar_elements(1) == 1"]
    assert [test.source for test in problem.visible_task.hidden] == ["pass"] and not problem.visible_task.reference


@pytest.mark.parametrize(
    ("given_id", "written_id"), [("HumanEval/3", "HumanEval/3"), ("3", "HumanEval/3"), ("Mbpp/3", "Mbpp/3")]
)
def test_samples_may_name_their_problem_in_several_ways(given_id, written_id):
    assert benchmark("humaneval_plus").canonical_id(given_id) == written_id


def test_a_benchmark_says_how_models_write_for_it():
    assert {name for name in BENCHMARK.builtins if getattr(BENCHMARK.load(name), "writes", "") == "completion"} == {
        "humaneval", "humaneval_plus", "mbpp", "mbpp-sanitized", "mbpp_plus", "bigcodebench-complete",
    }  # fmt: skip
