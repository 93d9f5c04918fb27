"""Files of tasks: formats, and rows that are refused by file, line and field."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from marl_ray.envs.text.tasks import MathTask, StaticProgramTask, read_code, read_math
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import benchmark
from marl_ray.rewards import CallTest, CodeTask, StdioTest
from marl_ray.stored_files.record_files import read_records

SUM = {"prompt": "1+1=", "answer": "2"}
ADD = {
    "task_id": "add",
    "prompt": "Add two numbers.",
    "entry_point": "add",
    "tests": ["assert add(1, 2) == 3"],
    "public_tests": ["assert add(0, 0) == 0"],
    "setup": "import math",
    "reference": "def add(a, b): return a + b",
    "level": 2,
}
DOUBLE = {"task_id": "double", "prompt": "Double.", "cases": [{"stdin": "2", "stdout": "4"}]}
ADDED = CodeTask(
    (CallTest("assert add(1, 2) == 3"),), (CallTest("assert add(0, 0) == 0"),), "add", "import math", ADD["reference"]
)


def write_lines(tmp_path: Path, lines: list[object], name: str = "data.jsonl") -> str:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_a_line_is_a_task_of_mathematics(tmp_path):
    full = {"prompt": "a", "answer": 0.5, "solution": "half, so 0.5", "task_id": "x", "level": 3}
    tasks = read_math(write_lines(tmp_path, [SUM, "", full]))
    assert tasks == (MathTask("0", "1+1=", "2"), MathTask("x", "a", "0.5", "half, so 0.5", 3.0))


def test_a_line_is_a_task_of_code(tmp_path):
    tasks = read_code(write_lines(tmp_path, [ADD, DOUBLE]))
    assert tasks[0] == StaticProgramTask("add", ADD["prompt"], ADDED, 2.0)
    assert tasks[1] == StaticProgramTask("double", "Double.", CodeTask((StdioTest(b"2", b"4"),)))


def test_one_file_serves_training_and_evaluation(tmp_path):
    path = write_lines(tmp_path, [ADD, DOUBLE])
    problems = benchmark("jsonl").parse(read_records(path, Path(path).read_bytes()))
    assert [problem.task for problem in problems] == [task.code for task in read_code(path)]  # type: ignore[attr-defined]  # of its benchmark's problems
    assert [problem.task_id for problem in problems] == [task.task_id for task in read_code(path)]


def test_json_and_parquet_and_uris(tmp_path):
    expected = read_code(write_lines(tmp_path, [ADD, DOUBLE]))
    path = tmp_path / "data.json"
    path.write_text(json.dumps([ADD, DOUBLE]))
    assert read_code(str(path)) == expected
    columns = {
        key: [ADD.get(key), DOUBLE.get(key)] for key in {**ADD, **DOUBLE}
    }  # nulls where a record has no such field
    parquet.write_table(pa.table(columns), tmp_path / "data.parquet")
    assert read_code(str(tmp_path / "data.parquet")) == expected
    assert read_code(f"file://{tmp_path}/data.parquet") == expected


CODE = {key: value for key, value in ADD.items() if key != "task_id"}
REFUSED = [
    (read_math, [SUM, {"prompt": "a"}], r"data.jsonl:2: missing key 'answer'"),
    (read_math, [{"prompt": "", "answer": "2"}], r"data.jsonl:1: prompt: expected a length of at least 1"),
    (read_math, [SUM, "", {**SUM, "anwser": "2"}], r"data.jsonl:3: unknown key 'anwser'; did you mean answer\?"),
    (read_math, [{**SUM, "answer": ["2"]}], r"data.jsonl:1: answer"),
    (read_math, [{**SUM, "level": "high"}], r"data.jsonl:1: level: expected a number"),
    (read_math, [SUM, "{"], r"data.jsonl:2: not JSON"),
    (read_math, ["[]"], r"data.jsonl:1: expected"),
    (read_math, [], r"data.jsonl: expected at least one task"),
    (read_math, [{**SUM, "task_id": "a"}] * 2, r"data.jsonl:2: task_id 'a' is already that of .*data.jsonl:1"),
    (read_math, [SUM, {**SUM, "task_id": "0"}], r"data.jsonl:2: task_id '0' is already that of"),
    (read_code, [{**CODE, "tests": "assert True"}], r"data.jsonl:1: tests: expected a list"),
    (read_code, [{**CODE, "tests": ["assert True", 1]}], r"data.jsonl:1: tests.1: expected text"),
    (read_code, [{**CODE, "tests": []}], r"data.jsonl:1: expected either tests or cases"),
    (read_code, [{**CODE, "entry_point": ""}], r"data.jsonl:1: entry_point: expected with tests, and only there"),
    (read_code, [{**DOUBLE, "public_tests": ["x"]}], r"data.jsonl:1: public_tests: expected tests of one kind"),
    (read_code, [{**DOUBLE, "cases": [{"stdin": "2"}]}], r"data.jsonl:1: missing key 'cases.0.stdout'"),
]


@pytest.mark.parametrize(("read", "lines", "message"), REFUSED)
def test_what_is_refused_is_named_by_file_line_and_field(tmp_path, read, lines, message):
    with pytest.raises(MarlRayError, match=message) as caught:
        read(write_lines(tmp_path, lines))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MarlRayError, match=r"/no\.jsonl: cannot be read: No such file or directory$"):
        read_math(str(tmp_path / "no.jsonl"))
