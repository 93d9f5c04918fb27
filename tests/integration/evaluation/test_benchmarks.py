"""Every benchmark: how its files are read, and what its verdicts are."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import FileRow, ModelAnswer, Problem, benchmark
from marl_ray.evaluation.benchmarks.codecontests import ContestProblem
from marl_ray.evaluation.data_files import ANY_DIGEST, load_problems
from marl_ray.evaluation.scoring.local import MAX_SOURCE_BYTES, ScoringJob, make_pool, score
from marl_ray.evaluation.writing.samples import Sample
from marl_ray.sandbox import Level, Pool

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHARED = Path(__file__).parents[3].parent / "shared" / "data"
FILES = {
    "humaneval": "humaneval.jsonl",
    "humaneval_plus": "humaneval_plus.jsonl",
    "mbpp": "mbpp.jsonl",
    "mbpp_plus": "mbpp_plus.jsonl",
    "mbpp-sanitized": "sanitized-mbpp.json",
    "bigcodebench-complete": "bigcodebench.jsonl",
    "bigcodebench-instruct": "bigcodebench.jsonl",
    "codecontests": "codecontests.jsonl",
    "jsonl": "own.jsonl",
    "math": "math.jsonl",
}


def problems(name: str, split: str | None = None, file: str | None = None) -> dict[str, Problem]:
    data = load_problems(benchmark(name), str(FIXTURES / (file or FILES[name])), split, ANY_DIGEST)
    return {problem.task_id: problem for problem in data.problems}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with make_pool(1, {"numpy"}, Level.LIMITS) as pool:
        yield pool


def judge(pool: Pool, problem: Problem, text: str, kind="solution", timeout_s=3.0):
    """Passed, by mode, and the whole result."""
    job = ScoringJob("sample", Sample(problem, 0, ModelAnswer(kind, text)), problem.modes, timeout_s)
    row = score(pool, job)
    return {mode: row[mode]["passed"] for mode in problem.modes}, row


BOTH = {"official": True, "hardened": True}
NEITHER = {"official": False, "hardened": False}


@pytest.mark.parametrize("name", FILES)
def test_references_pass_in_every_mode_they_can_be_judged_in(pool, name):
    for problem in problems(name).values():
        if problem.task_id in ("1_B. Any", "BigCodeBench/1", "Mbpp/12"):  # many right answers; needs pandas; see below
            continue
        verdicts = [judge(pool, problem, reference)[0] for reference in problem.references]
        assert not verdicts or all(verdicts[-1].values())


def test_a_humaneval_program_is_the_prompt_the_sample_the_test_and_the_check(pool):
    problem = problems("humaneval")["own/0"]
    assert problem.program(ModelAnswer("completion", "    return 1")).startswith("from typing import List")  # type: ignore[attr-defined]  # of its benchmark's problems
    for kind, text in (
        ("completion", "    return sum(n for n in numbers if n % 2 == 0)"),
        ("solution", "def total(numbers: List[int]):\n    return sum(n for n in numbers if n % 2 == 0)"),
        (
            "output",
            "Sure!\n```python\ndef total(numbers):\n    return sum(n for n in numbers if n % 2 == 0)\n```\nDone.",
        ),
    ):
        assert judge(pool, problem, text, kind)[0] == BOTH


@pytest.mark.parametrize(
    ("body", "official", "hardened"),
    [
        ("    return 0", "failed: ", "fail:wrong"),
        ("    return 1 / 0", "failed: division by zero", "fail:error: ZeroDivisionError"),
        ("    return input()", "failed: ", "fail:"),
        ("    exit()", "failed: 'NoneType' object is not callable", "fail:"),
        ("    raise SystemExit", "failed: ", "fail:exit"),
        ("    while True: pass", "timed out", "timeout"),
        ("    return (", "failed: '(' was never closed", "fail:error: SyntaxError"),
        ("    return '\0'", "failed: source code string cannot contain null bytes", "fail:"),
        ("    return '\ud800'", "failed: 'utf-8' codec can't encode character", "fail:"),
    ],
)
def test_what_fails_has_the_official_words(pool, body, official, hardened):
    passed, row = judge(pool, problems("humaneval")["own/0"], body, "completion", timeout_s=0.5)
    assert passed == NEITHER
    assert row["official"]["result"].startswith(official)
    assert row["hardened"]["result"].startswith(hardened), row


EQUAL = "    class Equal(int):\n        def __eq__(self, other):\n            return True\n    return Equal()"
FRAMES = """    import sys
    frame = sys._getframe()
    while frame:
        if "result" in frame.f_locals:
            frame.f_locals["result"].append("passed")
        frame = frame.f_back
    return -1"""


@pytest.mark.parametrize("body", [EQUAL, FRAMES], ids=["always equal", "walks frames"])
def test_a_forged_official_pass_is_a_suspected_hack(pool, body):
    passed, row = judge(pool, problems("humaneval")["own/0"], body, "completion")
    assert passed == {"official": True, "hardened": False} and row["suspected_hack"]


def test_functions_that_the_official_guard_takes_away_fail_in_official_mode_alone(pool):
    body = "    import os\n    os.getcwd()\n    return sum(n for n in numbers if n % 2 == 0)"
    passed, row = judge(pool, problems("humaneval")["own/0"], body, "completion")
    assert passed == {"official": False, "hardened": True} and row["suspected_hack"]


def test_answers_without_a_complete_block_and_oversized_programs_are_not_run(pool):
    problem = problems("humaneval")["own/0"]
    passed, row = judge(pool, problem, "```python\ndef total", "output")
    assert passed == NEITHER and row["official"]["result"] == "no code" and row["extracted"] is None
    assert row["raw"] == "```python\ndef total"
    passed, row = judge(pool, problem, "#" * (MAX_SOURCE_BYTES + 1))
    assert passed == NEITHER and row["hardened"]["result"] == "too large"


def test_a_program_of_ten_megabytes_has_an_ordinary_verdict(pool):
    text = "    return sum(n for n in numbers if n % 2 == 0)\n#" + "x" * 10_000_000
    assert judge(pool, problems("humaneval")["own/0"], text, "completion", timeout_s=20.0)[0] == BOTH


def test_the_mbpp_prompt_is_the_papers_with_problems_2_3_and_4():
    prompt = problems("mbpp")["Mbpp/11"].prompt
    assert prompt.count("You are an expert Python programmer, and here is your task: ") == 4
    assert prompt.startswith(
        "You are an expert Python programmer, and here is your task: Write a function to join two lists without repeats, "
        "sorted. Your code should pass these tests:\n\nassert join([1], [2]) == [1, 2]\nassert join([2], [2]) == [2]\n"
        "assert join([], []) == []\n[BEGIN]\ndef join(a, b):\n\treturn sorted(set(a) | set(b))\n[DONE]\nYou are"
    )
    assert prompt.endswith("assert area(2) > 12\n[BEGIN]\n")


def test_an_mbpp_completion_ends_at_the_stop_word(pool):
    problem = problems("mbpp")["Mbpp/3"]
    text = "def vowels(text):\n    return sum(map(text.count, 'aeiou'))\n[DONE]\nYou are an expert"
    assert judge(pool, problem, text, "completion")[0] == BOTH


def test_mbpp_tests_that_hand_over_objects_are_left_to_the_official_mode(pool):
    data = load_problems(benchmark("mbpp"), str(FIXTURES / "mbpp.jsonl"), sha256=ANY_DIGEST)
    problem = problems("mbpp")["Mbpp/12"]
    passed, row = judge(pool, problem, problem.references[0])
    assert passed == {"official": True, "hardened": False}
    assert row["hardened"]["result"].startswith("fail:nonbuiltin: argument of type Link")
    assert all(problem.modes == ("official", "hardened") for problem in data.problems)


def test_mbpp_splits_are_the_papers():
    assert set(problems("mbpp", "test")) == {"Mbpp/11", "Mbpp/12"}
    assert set(problems("mbpp", "prompt")) == {"Mbpp/2", "Mbpp/3", "Mbpp/4"}


@pytest.mark.parametrize(
    ("task_id", "code", "base", "plus"),
    [
        ("HumanEval/900", "def mean(xs):\n    return {(1.0, 3.0): 2.0, (2.0,): 2.0}[tuple(xs)]", True, False),
        ("HumanEval/900", "def mean(xs):\n    return sum(xs) / len(xs) + 1e-8", True, True),
        ("HumanEval/900", "def mean(xs):\n    return sum(xs) // len(xs)", True, False),
        ("HumanEval/900", "def mean(xs):\n    return 0", False, False),
        (
            "HumanEval/900",
            "import time\ndef mean(xs): return time.sleep(99) if len(xs) == 3 else sum(xs) / len(xs)",
            True,
            False,
        ),
        ("HumanEval/900", "def mean(xs):\n    print('passed')\n    raise SystemExit", False, False),
        ("HumanEval/900", "def mean(xs", False, False),
        ("HumanEval/900", "x = 1", False, False),
        ("HumanEval/901", "def parts(text):\n    return sorted(text.split(','))", False, False),
        ("HumanEval/32", "def find_zero(xs):\n    return -xs[0] / xs[1] + 1e-6", True, True),
        ("HumanEval/32", "def find_zero(xs):\n    xs.clear()\n    return 1e9", False, False),
        ("Mbpp/2", "def similar_elements(a, b):\n    return sorted(set(a) & set(b))", True, True),
        ("Mbpp/2", "def similar_elements(a, b):\n    return a + b", False, False),
        (
            "Mbpp/2",
            "def similar_elements(a, b):\n    return [x for x in a if (x in b) == isinstance(a, tuple)]",
            True,
            True,
        ),
        ("Mbpp/164", "def are_equivalent(a, b):\n    return 'who knows'", True, True),
        ("Mbpp/295", "def sum_div(n):\n    return 7 if n == 8 else 0", True, True),
        ("Mbpp/454", "import re\ndef check_str(text):\n    return re.match('[aeiouAEIOU]', text)", True, False),
        ("Mbpp/454", "import re\ndef check_str(text):\n    return re.search('^[aeiou]', text)", True, True),
        ("Mbpp/454", "def check_str(text):\n    return True", False, False),
        ("Mbpp/454", "def check_str(text):\n    return 'yes' if text[0].lower() in 'aeiou' else None", True, False),
        ("Mbpp/558", "def digit_distance_nums(a, b):\n    return {1: 1, 100: 2}[a]", True, True),
        ("Mbpp/581", "def surface_Area(b, s):\n    return {3: 33, 4: 56}[b]", True, True),
        ("Mbpp/907", "def check(n):\n    return n + 1", True, True),
    ],
)
def test_evalplus_has_a_base_and_a_plus_score_in_both_modes(pool, task_id, code, base, plus):
    name = "humaneval_plus" if task_id.startswith("HumanEval") else "mbpp_plus"
    passed, row = judge(pool, problems(name)[task_id], code)
    assert passed == {"official": plus, "hardened": plus}, row
    assert {mode: row[mode]["scores"] for mode in passed} == {mode: {"base": base} for mode in passed}, row
    assert not row["suspected_hack"]


def test_evalplus_continues_its_prompt_and_takes_solutions_alone(pool):
    problem = problems("humaneval_plus")["HumanEval/900"]
    assert judge(pool, problem, "    return sum(numbers) / len(numbers)\n", "completion")[0] == BOTH
    assert judge(pool, problem, "def mean(xs: List[float]):\n    return sum(xs) / len(xs)\n")[0] == NEITHER


@pytest.mark.parametrize("body", [EQUAL, FRAMES], ids=["always equal", "walks frames"])
def test_hardened_evalplus_is_not_forged(pool, body):
    body = body.replace('"result"', '"output"').replace('frame.f_locals["output"].append("passed")', "pass")
    passed, _ = judge(pool, problems("humaneval_plus")["HumanEval/900"], body, "completion")
    assert not passed["hardened"]


def test_a_reference_that_fails_decides_about_no_sample(pool):
    row = json.loads((FIXTURES / "humaneval_plus.jsonl").read_text().splitlines()[0])
    problem = benchmark("humaneval_plus").parse([FileRow("f:1", row | {"canonical_solution": "    return 1 / 0\n"})])[0]
    with pytest.raises(
        MarlRayError, match=r"^HumanEval/900: its reference fails on its base inputs here \(ZeroDiv[^\n]*\)$"
    ):
        problem.score(pool, ModelAnswer("solution", "def mean(xs): return 1"), ["hardened"], 3.0)


def test_bigcodebench_prompts_and_the_part_that_needs_no_packages():
    assert problems("bigcodebench-complete")["BigCodeBench/0"].prompt.startswith("import random\ndef task_func")
    assert problems("bigcodebench-instruct")["BigCodeBench/0"].prompt.startswith("A random number")
    assert set(problems("bigcodebench-complete", "stdlib")) == {"BigCodeBench/0"}


HEAD = "import random\n"
RIGHT = "def task_func(low, high):\n    return random.randint(low, high)\n"
WRONG = "def task_func(low, high):\n    return -1\n"


CALLS_NOTHING = """def task_func(low, high):
    if low > high:
        raise ValueError
    return 7 if high == 9 else 2
"""
FORGED = """import os
for fd in range(64):
    try: os.write(fd, b'{"passed": true}')
    except OSError: pass
"""


@pytest.mark.parametrize(
    ("code", "official", "hardened"),
    [
        (RIGHT, True, True),
        (WRONG, False, False),
        ("import unittest\ndef task_func(*_):\n    raise unittest.SkipTest('no')", True, False),
        (
            f"import unittest\nR = unittest.TestResult\nR.addFailure = R.addError = R.addSubTest = lambda *_: None\n{WRONG}",
            True,
            False,
        ),
        (
            f"import unittest\nT = unittest.TestCase\nT.assertTrue = T.assertEqual = lambda *_: None\n{WRONG}",
            False,
            False,
        ),
        (
            "import unittest\ndef task_func(*_):\n    unittest.TestCase.run = lambda *_: None\n    return 2",
            False,
            False,
        ),
        ("import os\ndef task_func(*_):\n    os._exit(0)", False, False),
        ("def task_func(*_):\n    raise SystemExit(0)", False, False),
        ("import sys\nsys.exit(0)", False, False),
        ("import builtins\nbuiltins.all = builtins.len = lambda *_: 0\n" + WRONG, False, False),
        ("import time\ndef task_func(*_):\n    time.sleep(99)", False, False),
        (
            FORGED + WRONG,
            False,
            False,
        ),
        ("def task_func(*_):\n    return 2\nclass TestCases: pass", False, False),
        ("raise KeyboardInterrupt", False, False),
        (
            f"from unittest.mock import NonCallableMock as M\nM.assert_called_once_with = lambda *_: None\n{CALLS_NOTHING}",
            True,
            False,
        ),
    ],
)
def test_bigcodebench_verdicts_and_what_the_guards_catch(pool, code, official, hardened):
    passed, row = judge(pool, problems("bigcodebench-complete")["BigCodeBench/0"], HEAD + code, timeout_s=2.0)
    assert passed == {"official": official, "hardened": hardened}, row
    assert row["suspected_hack"] is (official != hardened)


def test_bigcodebench_flags_what_looks_at_its_judge(pool):
    _, row = judge(pool, problems("bigcodebench-complete")["BigCodeBench/0"], HEAD + RIGHT + "# sys._getframe")
    assert row["hardened"]["passed"] and row["hardened"]["flags"] == ("_getframe",)


def test_codecontests_runs_all_tests_with_a_regular_file_as_stdin(pool):
    problem = problems("codecontests")["1_A. Sums"]
    assert isinstance(problem, ContestProblem) and len(problem.tests) == 3
    assert judge(pool, problem, problem.references[1])[0] == BOTH
    passed, row = judge(pool, problem, problem.references[0])  # reads stdin by its size; floats are one test too many
    assert passed == NEITHER and row["official"]["result"] == "test 3 of 3: exit"


@pytest.mark.parametrize(
    ("program", "official", "hardened"),
    [
        ("print('yes')", True, True),
        ("print('YES', flush=True)\n1 / 0", True, False),
        ("import os\nprint('YES', flush=True)\nos.abort()", True, False),
        ("print('NO')", False, False),
        ("print('YES YES')", False, False),
        ("", False, False),
    ],
)
def test_codecontests_hardened_also_wants_a_good_end(pool, program, official, hardened):
    passed, row = judge(pool, problems("codecontests")["1_C. Yes"], program)
    assert passed == {"official": official, "hardened": hardened}
    assert row["suspected_hack"] is (official != hardened)


def test_sandboxfusions_sample_format_is_read(pool):
    problem = problems("codecontests", file="sandboxfusion.jsonl")["echo"]
    assert judge(pool, problem, "print(input())")[0] == BOTH


def shared(name: str) -> str:
    if not (SHARED / name).exists():
        pytest.skip(f"needs {name} of the shared data")
    return str(SHARED / name)


@pytest.mark.parametrize(
    ("name", "file", "sizes"),
    [
        ("humaneval", "HumanEval.jsonl.gz", {"all": 164}),
        ("humaneval_plus", "HumanEvalPlus.jsonl.gz", {"all": 164}),
        ("mbpp", "mbpp.jsonl", {"all": 974, "test": 500, "validation": 90, "train": 374, "prompt": 10}),
        (
            "mbpp-sanitized",
            "sanitized-mbpp.json",
            {"all": 427, "test": 257, "validation": 43, "train": 120, "prompt": 7},
        ),
        ("bigcodebench-complete", "BigCodeBench-v0.1.4-derived.jsonl.gz", {"all": 1140, "stdlib": 293}),
        ("codecontests", "sandboxfusion_code_contests.jsonl", {"all": 20}),
    ],
)
def test_the_real_files_are_known_and_have_their_sizes(name, file, sizes):
    path = shared(file)
    assert hashlib.sha256(Path(path).read_bytes()).hexdigest() in benchmark(name).known_digests
    assert {split: len(load_problems(benchmark(name), path, split).problems) for split in sizes} == sizes
    for split in sizes:
        assert benchmark(name).title in load_problems(benchmark(name), path, split).variant
