"""Score samples one at a time, or many at once on this machine."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Literal

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import Mode, SampleVerdict, Verdicts, program_of
from marl_ray.evaluation.writing.samples import Sample
from marl_ray.json_types import JsonObject
from marl_ray.sandbox import Level, Pool
from marl_ray.sandbox.client.pool import WARM_MODULES
from marl_ray.sandbox.limits import WALL_FACTOR

MAX_SOURCE_BYTES = 32 << 20
"""A larger program is not run; its verdict is `too large`."""
SLACK_S = 60.0
"""Seconds that scoring a sample may take beyond its time limits; after that it is an error."""
START_S = 5.0
"""Seconds that starting and ending one run may take on a busy machine."""

JobKind = Literal["sample", "reference"]
"""A sample, or a reference of the benchmark that must pass before samples are scored."""
ResultRow = JsonObject
"""Result of a job, as a line of results.jsonl."""


@dataclass(frozen=True)
class ScoringJob:
    """One sample, or one reference solution, to score."""

    kind: JobKind
    sample: Sample
    modes: tuple[Mode, ...]
    timeout_s: float

    @property
    def max_wall_s(self) -> float:
        """Upper bound of the job's wall time, in seconds."""
        return len(self.modes) * self.sample.problem.max_time_limits * (WALL_FACTOR * self.timeout_s + START_S)


Scorer = Callable[[Sequence[ScoringJob]], Iterator[list[ResultRow]]]
"""Yields results, in any order, in batches."""


def make_pool(workers: int, packages: Iterable[str], min_level: Level) -> Pool:
    """Make a sandbox pool whose programs may import these packages, if they are installed."""
    installed = [name for name in sorted(packages) if importlib.util.find_spec(name)]
    return Pool(workers, warm=(*WARM_MODULES, *installed), min_level=min_level)


def score(pool: Pool, job: ScoringJob) -> ResultRow:
    """Score one job; returns its result as a line of results.jsonl."""
    sample, problem = job.sample, job.sample.problem
    modes = [mode for mode in job.modes if mode in problem.modes]
    source = program_of(problem, sample.source)
    if source is None:
        verdicts: Verdicts = dict.fromkeys(modes, SampleVerdict(False, "no code"))
    elif len(source.text.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        verdicts = dict.fromkeys(modes, SampleVerdict(False, "too large"))
    else:
        verdicts = problem.score(pool, source, modes, job.timeout_s)
    row: ResultRow = {
        "what": job.kind,
        "task_id": problem.task_id,
        "sample": sample.number,
        "kind": sample.source.kind,
        "raw": sample.source.text,
        "extracted": None if source is None else source.text,
    }
    row |= {mode: asdict(verdicts[mode]) if mode in verdicts else None for mode in job.modes}
    return row | {"suspected_hack": modes_disagree(verdicts)}


def modes_disagree(verdicts: Verdicts) -> bool:
    """Return True if the modes disagree, which makes a sample a suspected hack.

    Some programs without a hack disagree too, see docs/evaluation.md.
    """
    return len({verdict.passed for verdict in verdicts.values()}) > 1


def score_locally(pool: Pool, jobs: Sequence[ScoringJob], workers: int) -> Iterator[list[ResultRow]]:
    """Yield results as they come, in batches, from `workers` runs at a time.

    Raises MarlRayError, which names what was running, if nothing is scored for longer than any of the runs may take.
    """
    remaining = iter(jobs)
    threads = ThreadPoolExecutor(workers, thread_name_prefix="score")
    try:
        running = {threads.submit(score, pool, job): job for job in islice(remaining, 2 * workers)}
        while running:
            patience = max(job.max_wall_s for job in running.values()) * 2 + SLACK_S
            done, _ = wait(running, timeout=patience, return_when=FIRST_COMPLETED)
            if not done:
                names = ", ".join(sorted(job.sample.problem.task_id for job in running.values()))
                raise MarlRayError(f"evaluate: nothing was scored for {patience:.0f} s; running: {names}")
            for future in done:
                del running[future]
            running |= {threads.submit(score, pool, job): job for job in islice(remaining, len(done))}
            yield [future.result() for future in done]
    finally:
        # A run that hangs must not be waited for; it ends with the pool.
        threads.shutdown(wait=False, cancel_futures=True)
