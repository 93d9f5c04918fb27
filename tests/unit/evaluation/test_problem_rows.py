"""Rows of CodeContests, MBPP and our own format: which are read, which are refused, and how outputs are compared."""

import ast
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import FileRow, benchmark
from marl_ray.evaluation.data_files import ANY_DIGEST, load_problems
from marl_ray.rewards import outputs_match

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_mbpp_without_the_prompts_examples_is_refused(tmp_path):
    lines = (FIXTURES / "mbpp.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "m.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(MarlRayError, match=r"/m\.jsonl:1: problem 2 is missing; the prompt's examples are 2, 3 and 4$"):
        load_problems(benchmark("mbpp"), str(tmp_path / "m.jsonl"), sha256=ANY_DIGEST)


def test_mbpp_samples_may_name_their_problem_in_three_ways():
    same = benchmark("mbpp").canonical_id
    assert {same("2"), same("Mbpp/2"), same("MBPP/2")} == {"Mbpp/2"}
    assert same("HumanEval/2") == "HumanEval/2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"public_tests": {"input": ["1"], "output": []}}, "expected two lists of the same length"),
        ({"public_tests": {"input": [], "output": []}}, "expected at least one test"),
        ({"solutions": {"language": [3], "solution": []}}, "expected two lists of the same length"),
        ({"public_tests": None}, "public_tests: expected"),
        ({"memory_limit_bytes": 1 << 70}, "memory_limit_bytes: expected"),
        ({"content": "x", "labels": "?", "test": "[]"}, "expected SandboxFusion's JSON"),
    ],
)
def test_bad_codecontests_rows_are_refused(change, message):
    row = json.loads((FIXTURES / "codecontests.jsonl").read_text().splitlines()[1]) | change
    row = change if "content" in change else row
    with pytest.raises(MarlRayError, match=f"^f:1: .*{message}"):
        benchmark("codecontests").parse([FileRow("f:1", row)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tset": []}, "unknown key 'tset'"),
        ({"tests": []}, "expected either tests or cases"),
        ({"entry_point": ""}, "entry_point: expected with tests"),
    ],
)
def test_bad_rows_of_our_own_format_are_refused(change, message):
    row = json.loads((FIXTURES / "own.jsonl").read_text().splitlines()[0]) | change
    with pytest.raises(MarlRayError, match=f"^f:1: {message}"):
        benchmark("jsonl").parse([FileRow("f:1", row)])


@pytest.mark.parametrize(
    ("output", "expected", "match"),
    [
        (b"YES", b"yes\n", True),
        (b"1 2\n3", b"1\t2\r\n\v3 ", True),
        (b"0.300001", b"0.3", True),
        (b"0.30002", b"0.3", False),
        (b"1e2", b"100", True),
        (b"+5", b"5", True),
        (b"5.", b"5", True),
        (b"9007199254740993", b"9007199254740992", True),
        (b"1000000.1", b"1000000", False),
        (b"1_0", b"10", False),
        (b"0x10", b"16", False),
        (b"nan 1", b"nan 2", False),
        (b"inf a", b"inf b", False),
        (b"nan", b"NaN", True),
        (b"nan 1.0", b"nan 1", False),
        (b"a b", b"a", False),
        (b"", b" \n", True),
        (b"a\x0cb", b"a b", False),
        (b"\xff", b"\xff", True),
        ("\u0661".encode(), b"1", False),
        (b"9" * 100_000, b"9" * 100_001, False),
    ],
)
def test_outputs_are_compared_as_the_official_cpp_does(output, expected, match):
    assert outputs_match(output, expected) is match


@given(st.lists(st.floats(-1e3, 1e3) | st.integers(-999, 999) | st.text("abc", min_size=1), max_size=8))
def test_white_space_and_case_never_matter(values):
    tokens = [str(value) for value in values]
    assert outputs_match(" ".join(tokens).upper().encode(), "\n".join(tokens).encode())


def test_the_program_inside_the_sandbox_needs_nothing_but_the_standard_library():
    path = Path(__file__).parents[3] / "src/marl_ray/evaluation/benchmarks/sandboxed/unittest_driver.py"
    tree = ast.parse(path.read_text())
    imported = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert imported <= sys.stdlib_module_names
