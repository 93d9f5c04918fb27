"""`marl-ray evaluate`: alone and on Ray, killed and resumed, with what users get wrong."""

import gzip
import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes.command_line import PROGRAM, ROOT, keys_of, marl_ray
from waiting import until

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import ModelAnswer, benchmark
from marl_ray.evaluation.data_files import ANY_DIGEST, load_problems
from marl_ray.evaluation.options import ScoringOptions
from marl_ray.evaluation.scoring.evaluate import evaluate, prepare_evaluation
from marl_ray.evaluation.scoring.local import ScoringJob
from marl_ray.evaluation.scoring.ray_scoring import ScoringNode, ray_scorer, score_batches
from marl_ray.evaluation.writing.samples import Sample
from marl_ray.sandbox import Level

pytestmark = pytest.mark.shared_ray("one")

FIXTURES = ROOT / "tests/fixtures"
SHARED = ROOT.parent / "shared" / "data"
HUMANEVAL = ["--benchmark", "humaneval", "--data", str(FIXTURES / "humaneval.jsonl"), "--sha256", "any"]
SAMPLES = str(FIXTURES / "humaneval_samples.jsonl")


def run_evaluate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return marl_ray("evaluate", *arguments)


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_bytes())


def results(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"needs {name} of the shared data")
    return SHARED / name


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixture's samples, scored in one process."""
    out = tmp_path_factory.mktemp("scored") / "out"
    done = run_evaluate(*HUMANEVAL, "--samples", SAMPLES, "--out", out, "--k", "1,6", "--local")
    assert done.returncode == 0, done.stderr
    assert "official  pass@1    0.5833333333333333" in done.stdout
    return out


def test_scores_intervals_verdicts_and_hacks_are_in_the_report(scored):
    summary = report(scored)
    first, second = summary["problems"]["own/0"], summary["problems"]["own/1"]
    assert (first["official"]["pass@1"], second["official"]["pass@1"]) == (0.4999999999999999, 0.6666666666666666)
    assert first["passed"] == {"official": 3, "hardened": 4} and second["passed"] == {"official": 4, "hardened": 3}
    assert summary["scores"]["official"]["pass@6"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    low, high = (summary["scores"]["official"]["pass@1"][key] for key in ("low", "high"))
    assert low == 0.4999999999999999 and high == pytest.approx(2 / 3)
    assert summary["suspected_hacks"] == ["own/0#3", "own/1#1"]
    assert summary["samples"] == 12 and summary["levels"]
    assert summary["verdicts"]["official"]["passed"] == 7
    assert summary["evaluation"]["variant"].endswith("; ready completions and solutions; 3 s")
    markdown = (scored / "report.md").read_text()
    assert markdown.startswith("# HumanEval, file of sha256 ") and "own/1#1" in markdown


def test_raw_and_extracted_code_are_both_in_the_results(scored, tmp_path):
    answer = "Here:\n```python\ndef total(numbers):\n    return sum(n for n in numbers if n % 2 == 0)\n```\nThe end."
    rows = [{"task_id": "own/0", "output": answer}, {"task_id": "own/1", "output": "I do not know."}]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_evaluate(*HUMANEVAL, "--samples", tmp_path / "s.jsonl", "--out", tmp_path / "out", "--local")
    assert done.returncode == 0, done.stderr
    first, second = sorted(results(tmp_path / "out"), key=lambda row: row["task_id"])
    assert first["raw"] == answer and first["extracted"] == answer.split("```")[1].removeprefix("python\n")
    assert first["official"]["passed"] and first["hardened"]["passed"]
    assert (second["extracted"], second["official"]["result"]) == (None, "no code")


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on(tmp_path):
    slow = "    import time\n    time.sleep(0.2)\n    return sum(n for n in numbers if n % 2 == 0)\n"
    rows = [{"task_id": "own/0", "completion": slow + f"# {n}\n"} for n in range(40)]
    rows.append({"task_id": "own/1", "completion": "    return x / 4"})
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        *HUMANEVAL,
        "--samples",
        str(tmp_path / "s.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--mode",
        "official",
    ]
    arguments += ["--local", "--workers", "1"]
    with subprocess.Popen([PROGRAM, "evaluate", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        written = tmp_path / "out/results.jsonl"
        until(
            lambda: process.poll() is not None or (written.exists() and len(results(written.parent)) >= 3),
            "three results",
            100,
        )
        assert process.poll() is None, "the evaluation ended before it was killed"
        process.send_signal(signal.SIGKILL)
    before = (tmp_path / "out/results.jsonl").read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert 3 <= before.count(b"\n") < 41 and not (tmp_path / "out/report.json").exists()
    done = run_evaluate(*arguments)
    assert done.returncode == 0, done.stderr
    after = (tmp_path / "out/results.jsonl").read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 41
    assert report(tmp_path / "out")["scores"]["official"]["pass@1"]["value"] == 1.0


def test_a_finished_evaluation_is_not_run_again(scored, tmp_path):
    shutil.copytree(scored, tmp_path / "out")
    done = run_evaluate(*HUMANEVAL, "--samples", SAMPLES, "--out", tmp_path / "out", "--k", "1", "--local")
    assert done.returncode == 0 and results(tmp_path / "out") == results(scored)
    assert list(report(tmp_path / "out")["scores"]["official"]) == ["pass@1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--benchmark", "humaneval3", "--samples", SAMPLES],
            "'humaneval3' is unknown; did you mean humaneval",
        ),
        ([*HUMANEVAL, "--samples", "missing.jsonl"], "missing.jsonl: cannot be read"),
        ([*HUMANEVAL[:4], "--samples", SAMPLES], "humaneval.jsonl has "),
        ([*HUMANEVAL, "--samples", SAMPLES, "--k", "1,7"], "--k: problem 'own/0' has only 6 samples, not 7"),
        ([*HUMANEVAL, "--samples", SAMPLES, "--k", "one"], "--k: expected whole numbers"),
        ([*HUMANEVAL, "--samples", FIXTURES / "own.jsonl"], "own.jsonl:1: expected exactly one of completion"),
        ([*HUMANEVAL, "--samples", SAMPLES, "--split", "test"], "--split: humaneval has all, not 'test'"),
        (
            ["--benchmark", "humaneval", "--samples", SAMPLES, "--data", "hub"],
            "--data: hub needs the package datasets (pip install ",
        ),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, tmp_path):
    done = run_evaluate(*arguments, "--out", tmp_path / "out", "--local")
    assert done.returncode == 2 and done.stderr.startswith("marl-ray: ") and len(done.stderr.splitlines()) == 1
    assert message in done.stderr and not (tmp_path / "out").exists()


def test_the_folder_of_another_benchmark_is_refused_and_kept(scored):
    before = (scored / "results.jsonl").read_bytes()
    options = [
        "--benchmark",
        "jsonl",
        "--data",
        FIXTURES / "own.jsonl",
        "--samples",
        scored.parent / "own_samples.jsonl",
    ]
    rows = [
        {"task_id": "add", "solution": "def add(a, b): return a + b"},
        {"task_id": "double", "solution": "print(4)"},
    ]
    (scored.parent / "own_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_evaluate(*options, "--out", scored, "--local")
    assert done.returncode == 2 and "holds an evaluation with benchmark 'humaneval', not 'jsonl'" in done.stderr
    assert (scored / "results.jsonl").read_bytes() == before
    done = run_evaluate(*options, "--out", scored.parent / "own", "--local")
    assert done.returncode == 0 and "hardened  pass@1    0.5 " in done.stdout


def test_weighted_means_over_evaluations(scored, tmp_path):
    done = marl_ray("aggregate", f"{scored}=3")
    assert done.returncode == 0 and "0.5833  (" in done.stdout and "weight 3" in done.stdout
    done = marl_ray("aggregate", f"{scored}=inf", f"{scored}=1")
    assert done.returncode == 2 and f"expected each folder once, {scored} is given twice" in done.stderr
    done = marl_ray("aggregate", str(scored), "--json")
    document = json.loads(done.stdout)
    assert set(document) == keys_of("aggregate") and document["low"] < document["value"] < document["high"]
    of_episodes = {"score", "interval", "returns", "lengths", "truncated"}
    assert {*report(scored), "folder"} == keys_of("evaluate") - of_episodes
    done = marl_ray("aggregate", str(tmp_path))
    assert done.returncode == 2 and "report.json: cannot be read: No such file" in done.stderr


def test_problems_whose_own_references_fail_are_left_out_and_counted(tmp_path):
    right = "import sys\nfor line in sys.stdin:\n    print(sum(map(float, line.split())))\n"
    rows = [{"task_id": "1_A. Sums", "solution": right}, {"task_id": "1_B. Any", "solution": "print(2)"}]
    rows.append({"task_id": "1_C. Yes", "solution": "print('no')"})
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--benchmark", "codecontests", "--data", FIXTURES / "codecontests.jsonl", "--sha256", "any"]
    done = run_evaluate(*data, "--samples", tmp_path / "s.jsonl", "--out", tmp_path / "out", "--local")
    assert done.returncode == 0, done.stderr
    summary = report(tmp_path / "out")
    assert summary["filtered"] == ["1_B. Any"] and summary["without_reference"] == 1
    assert set(summary["problems"]) == {"1_A. Sums", "1_C. Yes"}
    assert summary["scores"]["official"]["pass@1"]["value"] == 0.5


def test_on_ray_the_results_are_those_of_one_process(ray_cluster, scored, tmp_path):
    data = str(FIXTURES / "humaneval.jsonl")
    planned = prepare_evaluation(
        ScoringOptions(
            benchmark="humaneval", samples=SAMPLES, data=data, sha256=ANY_DIGEST, out=tmp_path / "out", k=(1, 6)
        )
    )
    ray_report = evaluate(planned, ray_scorer(2, planned.packages, Level.PATHS))
    assert ray_report["scores"] == report(scored)["scores"] and ray_report["problems"] == report(scored)["problems"]


@pytest.mark.long
def test_a_node_that_dies_leaves_its_samples_to_the_others(ray_cluster):
    import ray

    problems = load_problems(benchmark("humaneval"), str(FIXTURES / "humaneval.jsonl"), sha256=ANY_DIGEST).problems
    source = ModelAnswer(
        "completion", "    import time\n    time.sleep(0.1)\n    return sum(n for n in numbers if n % 2 == 0)"
    )
    jobs = [ScoringJob("sample", Sample(problems[0], number, source), ("official",), 5.0) for number in range(24)]
    remote: Any = ray.remote(ScoringNode)
    nodes = {name: (remote.options(num_cpus=1).remote(1, frozenset(), Level.LIMITS), 1) for name in ("one", "two")}
    dying = nodes["one"][0]
    batches = score_batches(nodes, jobs)
    scored_rows = next(batches)
    ray.kill(dying)
    for rows in batches:
        scored_rows = scored_rows + rows
    assert sorted(row["sample"] for row in scored_rows) == list(range(24)) and all(
        row["official"]["passed"] for row in scored_rows
    )
    assert list(nodes) == ["two"]
    ray.kill(nodes["two"][0])
    with pytest.raises(MarlRayError, match=r"evaluate: (no actor is left|3 actors died)"):
        list(score_batches(nodes, jobs))


def test_the_official_example_file_has_the_official_score(tmp_path):
    data, samples = shared("example_problem.jsonl"), shared("example_samples.jsonl")
    done = run_evaluate("--benchmark", "humaneval", "--data", data, "--samples", samples, "--out", tmp_path, "--local")
    assert done.returncode == 0, done.stderr
    assert report(tmp_path)["scores"]["official"]["pass@1"]["value"] == 0.4999999999999999


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "not_built_in", "not_judged"),
    [
        ("humaneval", "HumanEval.jsonl.gz", [], []),
        ("humaneval_plus", "HumanEvalPlus.jsonl.gz", [], []),
        ("mbpp", "mbpp.jsonl", [], ["Mbpp/367", "Mbpp/601", "Mbpp/927"]),
        ("mbpp-sanitized", "sanitized-mbpp.json", ["Mbpp/737#0", "Mbpp/787#0", "Mbpp/794#0"], []),  # return re.Match
    ],
)
def test_all_official_references_pass(tmp_path, name, file, not_built_in, not_judged):
    path = shared(file)
    problems = load_problems(benchmark(name), str(path)).problems
    with gzip.open(tmp_path / "s.jsonl.gz", "wt") as samples:
        for problem in problems:
            samples.write(json.dumps({"task_id": problem.task_id, "solution": problem.references[0]}) + "\n")
    arguments = ["--benchmark", name, "--data", path, "--samples", tmp_path / "s.jsonl.gz", "--out", tmp_path / "out"]
    done = run_evaluate(*arguments, "--local", "--timeout", "20")
    assert done.returncode == 0, done.stderr
    summary = report(tmp_path / "out")
    assert summary["scores"]["official"]["pass@1"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert summary["suspected_hacks"] == not_built_in
    assert summary["not_judged"]["hardened"] == not_judged
