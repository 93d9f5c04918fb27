"""The results of commands: lines for people, or with --json one document for programs."""

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document; all else goes to stderr.")]


def show(as_json: bool, document: Any, lines: Iterable[str]) -> None:
    """Print a command's result on stdout: the document as JSON, or the lines."""
    if as_json:
        print(json.dumps(as_plain_data(document), indent=1, ensure_ascii=False), flush=True)  # some commands serve on
        return
    for line in lines:
        print(line)


@contextlib.contextmanager
def only_result(as_json: bool) -> Iterator[None]:
    """Send what the block prints on stdout to stderr if `as_json`, so that stdout holds the document alone."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def as_plain_data(value: Any) -> Any:
    """Return the value as JSON holds it: records as objects, and null for numbers that are not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_plain_data(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): as_plain_data(part) for key, part in value.items()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Iterable):
        return [as_plain_data(part) for part in value]
    return value


def table_lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose columns are as wide as their widest cells; the first line has the heads."""
    cells = [heads, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
