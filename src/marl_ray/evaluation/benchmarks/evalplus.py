"""EvalPlus (Liu et al. 2023, arXiv 2305.01210): HumanEval+ and MBPP+.

Functions are compared with a reference on many inputs. A sample has two scores: `base`, the inputs of the original
benchmark, and the sample's own, base and plus inputs together, which the field reports as HumanEval+ and MBPP+.
Expected outputs are the reference's in a sandboxed run of its own, once per process and problem. An input may take 1 s,
or four times as long as the reference took; base and plus inputs may each take 60 s in all. CPU time decides.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import resources
from typing import Any

from typing_extensions import override

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import (
    NO_TESTS,
    Benchmark,
    BenchmarkRecord,
    Mode,
    ModelAnswer,
    Problem,
    SampleVerdict,
    Verdicts,
    parse_python,
    unique_problems,
)
from marl_ray.evaluation.benchmarks.sandboxed.evalplus_driver import COMPARED_WITH_NONE, dumps
from marl_ray.rewards.code import CallTest, CodeTask
from marl_ray.sandbox import Limits, Pool, Status
from marl_ray.sandbox.limits import WALL_FACTOR
from marl_ray.stored_files.record_files import FileRow, read_record

MIN_S, REFERENCE_FACTOR, TASK_S = 1.0, 4.0, 60.0
"""Minimum seconds of an input, multiple of the reference's seconds, and maximum seconds of all base or all plus inputs.

All are those of evalplus 0.3.1: the first two of its config.py, the last of its eval/__init__.py.
"""
REFERENCE_S = 60.0
"""CPU seconds of the reference on all base or all plus inputs, our own choice: evalplus sets no limit."""
MEMORY_BYTES = 4 << 30
"""Limit of the address space: the 4 GiB that eval/__init__.py of evalplus 0.3.1 takes by default."""
OUTPUT_BYTES = 256 << 20
"""Maximum bytes of the encoded outputs of a reference, our own choice: evalplus keeps them in its own process."""
TEST_PARTS = ("base", "plus")
_EXISTENCE_WRAPPER = """


_{0} = {0}


def {0}(*arguments):
    output = _{0}(*arguments)
    return output if isinstance(output, bool) else output is not None
"""
"""Code behind a program whose outputs, matches of patterns, cannot cross: the judge compares their existence alone."""


class EvalPlusRecord(BenchmarkRecord):
    """A line of HumanEvalPlus.jsonl.gz or MbppPlus.jsonl.gz."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    base_input: list[list[object]]
    plus_input: list[list[object]]
    atol: float
    contract: str = ""
    """Assertions on inputs, for authors of new inputs."""
    test: str = ""
    """HumanEval's own test, which the base inputs come from."""
    assertion: str = ""
    """MBPP's own test, which the base inputs come from."""


@dataclass(frozen=True)
class ReferenceOutputs:
    """Results of the reference on some inputs."""

    outputs: str
    """List of outputs, encoded by `dumps`."""
    seconds: tuple[float, ...]
    """Time limit of each input."""


@dataclass(frozen=True)
class EvalPlusProblem(Problem):
    """A function, and inputs on which it is compared with the reference."""

    base: str
    plus: str
    """Lists of argument lists, encoded by `dumps`; so is `base`."""
    atol: float
    examples: tuple[str, ...]
    """Assertions that the prompt shows."""

    @property
    @override
    def max_time_limits(self) -> float:
        return 2 * len(TEST_PARTS)

    @property
    @override
    def visible_task(self) -> CodeTask:
        return CodeTask(NO_TESTS, tuple(map(CallTest, self.examples)), self.entry_point, "import math")

    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Judge a sample: a completion continues the prompt, a solution stands alone.

        Plus inputs run only if base inputs passed.
        """
        program = self.prompt + source.text if source.kind == "completion" else source.text
        return {mode: self._verdict(pool, program, mode, timeout_s) for mode in modes}

    def _verdict(self, pool: Pool, program: str, mode: Mode, timeout_s: float) -> SampleVerdict:
        wall_s = cpu_s = 0.0
        result, base = "passed", False
        for part, inputs in zip(TEST_PARTS, (self.base, self.plus), strict=True):
            expected = _reference_outputs(pool, self.task_id, part, self.references[0], self.entry_point, inputs)
            limits = Limits(cpu_s=min(timeout_s, sum(expected.seconds)) + 1, memory_bytes=MEMORY_BYTES)
            if mode == "official":
                arguments = f"{self._arguments(part, inputs, expected, 1.0)}, signal.ITIMER_PROF"
                call = f"check(load({program!r}, {self.entry_point!r}), {arguments})"
                result = pool.official(f"{driver_source()}\n{call}\n", limits)
            else:
                call = f"check(_function, {self._arguments(part, inputs, expected, WALL_FACTOR)})"
                tests = f"_function = {self.entry_point}\n{driver_source()}\n{call}\n"
                candidate = program + (
                    _EXISTENCE_WRAPPER.format(self.entry_point) if self.entry_point in COMPARED_WITH_NONE else ""
                )
                done = pool.judge(candidate, tests, entry_point=self.entry_point, limits=limits, in_place=False)
                wall_s, cpu_s = wall_s + done.wall_s, cpu_s + done.cpu_s
                result = f"{done.verdict}: {done.message}" if done.message else done.verdict
            if result != "passed":
                break
            base = True
        return SampleVerdict(result == "passed", result, wall_s, cpu_s, pool.level.name.lower(), scores={"base": base})

    def _arguments(self, part: str, inputs: str, expected: ReferenceOutputs, factor: float) -> str:
        """Return the arguments of `check` behind the function as Python, with time limits multiplied by `factor`."""
        seconds = [factor * limit for limit in expected.seconds]
        return f"{self.entry_point!r}, {part!r}, {inputs!r}, {expected.outputs!r}, {self.atol!r}, {seconds!r}"


@lru_cache(maxsize=4096)
def _reference_outputs(pool: Pool, task_id: str, part: str, reference: str, name: str, inputs: str) -> ReferenceOutputs:
    """Return the reference's outputs.

    Raises MarlRayError if the reference fails here, because then nothing can be compared with it.
    """
    call = f"outputs({reference!r}, {name!r}, {inputs!r}, {name in COMPARED_WITH_NONE})"
    program = f"{driver_source()}\nresults, seconds = {call}\nprint(json.dumps([results, seconds]))\n"
    limits = Limits(cpu_s=REFERENCE_S, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES)
    done = pool.run(program, limits=limits)
    if done.status is not Status.OK:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise MarlRayError(f"{task_id}: its reference fails on its {part} inputs here ({last or done.status})")
    text, seconds = json.loads(done.stdout)
    return ReferenceOutputs(text, tuple(max(MIN_S, REFERENCE_FACTOR * second) for second in seconds))


@cache
def driver_source() -> str:
    """Return the program that runs a task in the sandbox."""
    return (
        resources.files("marl_ray.evaluation.benchmarks.sandboxed")
        .joinpath("evalplus_driver.py")
        .read_text(encoding="utf-8")
    )


Inputs = list[Any]


def _as_tuples(items: Sequence[Any]) -> list[Any]:
    return [tuple(item) for item in items]


def _as_nested_tuples(value: object) -> Any:
    return tuple(map(_as_nested_tuples, value)) if isinstance(value, list) else value


_CONVERTED_TASKS: tuple[tuple[Callable[[Inputs], Sequence[Any]], tuple[int, ...]], ...] = (
    (  # every argument is a tuple
        _as_tuples,
        (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809),
    ),
    (  # every argument is a list of tuples
        lambda arguments: [_as_tuples(argument) for argument in arguments],
        (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780),
    ),
    (lambda arguments: [_as_tuples(arguments[0]), arguments[1]], (75, 413, 444, 753)),
    (lambda arguments: [arguments[0], tuple(arguments[1])], (106, 750)),
    (lambda arguments: [[set(item) if isinstance(item, list) and item else {} for item in arguments[0]]], (115,)),
    (lambda arguments: (float(arguments[0]), complex(arguments[1])), (124,)),
    (lambda arguments: [tuple(arguments[0]), arguments[1]], (250, 405, 446, 617, 720, 763, 808)),
    (lambda arguments: [complex(arguments[0])], (252,)),
    # Every argument a tuple of tuples.
    (lambda arguments: [tuple(_as_tuples(argument)) for argument in arguments], (259, 401, 445)),
    (lambda arguments: [tuple(tuple(item) if isinstance(item, list) else item for item in arguments[0])], (278,)),
    (lambda arguments: [tuple(arguments[0]), arguments[1], arguments[2]], (307,)),
    (_as_nested_tuples, (580, 615, 791)),
    (lambda arguments: [{key: tuple(value) for key, value in arguments[0].items()}, *arguments[1:]], (722,)),
)
_CONVERSIONS = {number: change for change, numbers in _CONVERTED_TASKS for number in numbers}


def mbpp_inputs(number: int, inputs: Inputs) -> Inputs:
    """Return the inputs of an MBPP+ task, of which JSON lacks tuples, sets and complex numbers.

    The inputs are converted as `mbpp_deserialize_inputs` of evalplus 0.3.1 (data/mbpp.py) does it. Raises TypeError,
    ValueError, IndexError or AttributeError for inputs of another form.
    """
    change = _CONVERSIONS.get(number)
    return inputs if change is None else [change(arguments) for arguments in inputs]


def parse(prefix: str, rows: Iterable[FileRow]) -> tuple[Problem, ...]:
    """Return the problems of an EvalPlus file; `prefix` begins its task ids."""
    return unique_problems((row, _make_problem(prefix, read_record(EvalPlusRecord, row), row.where)) for row in rows)


def _make_problem(prefix: str, record: EvalPlusRecord, where: str) -> Problem:
    id_prefix, _, number = record.task_id.partition("/")
    if id_prefix != prefix or not number.isdecimal():
        raise MarlRayError(f"{where}: task_id {record.task_id!r}: expected {prefix}/ and a number")
    parts = {}
    for part in TEST_PARTS:
        inputs = record.base_input if part == "base" else record.plus_input
        try:
            parts[part] = dumps(mbpp_inputs(int(number), inputs) if prefix == MBPP else inputs)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise MarlRayError(f"{where}: {part}_input: not in the form of {record.task_id}") from error
    return EvalPlusProblem(
        record.task_id,
        record.prompt,
        record.entry_point,
        (record.prompt + record.canonical_solution,),
        parts["base"],
        parts["plus"],
        record.atol,
        tuple(line for line in record.prompt.splitlines() if line.startswith("assert ") and _is_python(line)),
    )


def _is_python(line: str) -> bool:
    try:
        return bool(parse_python(line).body)
    except (SyntaxError, ValueError):
        return False


def _canonical_id(prefix: str, task_id: str) -> str:
    id_prefix, _, number = task_id.rpartition("/")
    return f"{prefix}/{number}" if id_prefix.lower() in ("", prefix.lower()) else task_id


HUMANEVAL, MBPP = "HumanEval", "Mbpp"


def _benchmark(name: str, title: str, prefix: str, stop: tuple[str, ...], known: Mapping[str, str]) -> Benchmark:
    return Benchmark(
        name=name,
        title=title,
        parse=partial(parse, prefix),
        modes=("official", "hardened"),
        timeout_s=TASK_S,
        ks=(1, 10, 100),
        known_digests=known,
        canonical_id=partial(_canonical_id, prefix),
        writes="completion",
        stop=stop,
        notes="base and plus inputs, compared with the reference as evalplus does",
    )


HUMANEVAL_PLUS = _benchmark(
    "humaneval_plus",
    "HumanEval+",
    HUMANEVAL,
    ("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    {"272720b90ac375502c8ed23cd791c2a93dfb22a911641a494da74a426c09f101": "v0.1.10, 164 problems"},
)
MBPP_PLUS = _benchmark("mbpp_plus", "MBPP+", MBPP, ('\n"""', "\nassert", "\nif __name__", "\nprint("), {})
