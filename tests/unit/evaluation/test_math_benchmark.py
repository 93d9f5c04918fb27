"""The benchmark `math`: what of an answer counts, and what a file must hold."""

import json
from pathlib import Path

import pytest

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import FileRow, ModelAnswer, benchmark, program_of
from marl_ray.evaluation.data_files import load_problems

FILE = Path(__file__).parents[2] / "fixtures" / "math.jsonl"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("The answer is 56.", True),
        ("7 times 8 is \\boxed{56}, and not 54.", True),
        ("It is 57.", False),
        ("```python\nprint(56)\n```\nSo it is 54", False),  # the last number counts, whatever a block of code says
        ("", False),
    ],
)
@pytest.mark.parametrize("kind", ["output", "solution"])
def test_the_final_answer_counts_and_no_code_is_extracted(answer, right, kind):
    problem = load_problems(benchmark("math"), str(FILE)).problems[0]
    source = program_of(problem, ModelAnswer(kind, answer))
    assert source is not None and source.text == answer
    verdict = problem.score(None, source, ("hardened",), 3.0)["hardened"]
    assert (verdict.passed, verdict.result) == (right, "passed" if right else "wrong answer")


def test_a_problem_without_an_id_is_called_by_its_number_and_no_id_comes_twice():
    problems = load_problems(benchmark("math"), str(FILE)).problems
    assert [problem.task_id for problem in problems] == ["product", "1"]
    lines = [json.loads(line) | {"task_id": "1"} for line in FILE.read_text().splitlines()]
    with pytest.raises(MarlRayError, match=r"^f:1: task_id '1' is already that of f:0$"):
        benchmark("math").parse([FileRow(f"f:{number}", line) for number, line in enumerate(lines)])
    with pytest.raises(MarlRayError, match=r"^f:0: missing key 'answer'$"):
        benchmark("math").parse([FileRow("f:0", {"prompt": "p"})])
