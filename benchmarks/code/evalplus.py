"""EvalPlus here: whether its references pass, and what its inputs find that the original benchmark's do not.

    .venv/bin/python -m benchmarks.code.evalplus --data FOLDER    # HumanEvalPlus.jsonl.gz, MbppPlus.jsonl.gz if there

References and mutants of them (`judge_agreement.mutants`) are scored in both modes. A mutant that passes the base inputs and
fails the plus ones is what EvalPlus is for; one on which the modes disagree is listed.
Writes `benchmarks/results/evalplus.{json,md}`.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.code.judge_agreement import mutants
from benchmarks.records import load_before, machine, store
from marl_ray.evaluation.benchmarks import Mode, ModelAnswer, Problem, benchmark
from marl_ray.evaluation.data_files import load_problems
from marl_ray.evaluation.scoring.local import make_pool
from marl_ray.sandbox import Level, Pool

FILES = {"humaneval_plus": "HumanEvalPlus.jsonl.gz", "mbpp_plus": "MbppPlus.jsonl.gz"}
MODES: tuple[Mode, Mode] = ("official", "hardened")
MUTANTS = 2
"""Mutants of each reference."""


def score_programs(
    pool: Pool, programs: Sequence[tuple[Problem, str]], timeout_s: float, threads: int
) -> list[dict[str, Any]]:
    """Return the base and plus scores of programs, by mode."""

    def result_of(program: tuple[Problem, str]) -> dict[str, Any]:
        problem, text = program
        verdicts = problem.score(pool, ModelAnswer("solution", text), MODES, timeout_s)
        results: dict[str, Any] = {
            mode: {"plus": verdict.passed, **verdict.scores, "result": verdict.result}
            for mode, verdict in verdicts.items()
        }
        return {"task_id": problem.task_id, **results}

    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(result_of, programs))


def measure_benchmark(name: str, path: Path, workers: int) -> dict[str, Any]:
    """Score the references and mutants of one benchmark."""
    data = load_problems(benchmark(name), str(path))
    references = [(problem, problem.references[0]) for problem in data.problems]
    changed = [(problem, text) for problem, code in references for text in mutants(code, MUTANTS, problem.task_id)]
    row: dict[str, Any] = {"variant": data.variant}
    with make_pool(workers, {"numpy"}, Level.PATHS) as pool:
        row["level"] = pool.level.name.lower()
        for what, programs in (("references", references), ("mutants", changed)):
            begin = time.perf_counter()
            results = score_programs(pool, programs, benchmark(name).timeout_s, workers)
            row[what] = {
                "programs": len(results),
                "seconds": time.perf_counter() - begin,
                **{
                    f"{mode} {score}": sum(result[mode][score] for result in results)
                    for mode in MODES
                    for score in ("base", "plus")
                },
                "disagree": [result for result in results if len({result[mode]["plus"] for mode in MODES}) > 1],
            }
            if what == "references":
                row["failing"] = [result for result in results if not all(result[mode]["plus"] for mode in MODES)]
    return row


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the result as Markdown for people."""
    lines = [
        "# EvalPlus",
        "",
        "| programs | all | official base | official plus | hardened base | hardened plus | seconds |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        for what in ("references", "mutants"):
            part = row[what]
            scores = " | ".join(str(part[f"{mode} {score}"]) for mode in MODES for score in ("base", "plus"))
            lines.append(f"| {name} {what} | {part['programs']} | {scores} | {part['seconds']:.0f} |")
    lines.append("")
    for name, row in rows.items():
        failing = (
            ", ".join(f"{result['task_id']} ({result['hardened']['result']})" for result in row["failing"]) or "none"
        )
        others = [*row["references"]["disagree"], *row["mutants"]["disagree"]]
        disagree = "; ".join(
            f"{result['task_id']} ({result['official']['result']} / {result['hardened']['result']})"
            for result in others
        )
        lines.append(f"{name}: {row['variant']}, sandbox level {row['level']}. References that fail: {failing}. ")
        lines.append(f"The modes disagree on {len(others)} programs{': ' + disagree if others else ''}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    load = load_before()
    paths = {name: arguments.data / file for name, file in FILES.items()}
    rows = {name: measure_benchmark(name, path, arguments.workers) for name, path in paths.items() if path.exists()}
    result = {"machine": machine("marl-ray", "numpy"), "load_before": load, "benchmarks": rows}
    store("evalplus", result, table(rows))


if __name__ == "__main__":
    main()
