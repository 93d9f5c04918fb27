"""Records of JSONL, JSON and Parquet files, on disk or in any file system that pyarrow knows."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from pyarrow import fs, parquet
from pydantic import BaseModel, ValidationError

from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.errors import MarlRayError, one_line, one_line_without


class FileRow(NamedTuple):
    """One record of a file, and where it stands, for messages."""

    where: str
    values: Any


def read_bytes(uri: str) -> bytes:
    """Read a local file, or one of a file system that pyarrow knows (`s3://bucket/key`).

    Raises MarlRayError naming it if it cannot be read.
    """
    try:
        if "://" not in uri:
            return Path(os.path.expanduser(uri)).read_bytes()
        system, path = fs.FileSystem.from_uri(uri)
        with system.open_input_stream(path, compression=None) as stream:
            return bytes(stream.read())
    except (OSError, pa.ArrowException, ValueError) as error:
        raise MarlRayError(f"{uri}: cannot be read: {one_line_without(error, uri)}") from error


def read_records(name: str, data: bytes) -> Iterator[FileRow]:
    """Yield the records of a .jsonl, .json (an array) or .parquet file, each perhaps in gzip.

    Raises MarlRayError that names the file if it is damaged or holds no array, and the line that is not JSON or not
    UTF-8.
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
        yield from (FileRow(f"{name}[{number}]", values) for number, values in enumerate(table.to_pylist()))
    elif path.endswith(".json"):
        text = _decode_json(name, data)
        if not isinstance(text, list):
            raise MarlRayError(f"{name}: expected a JSON array")
        yield from (FileRow(f"{name}[{number}]", values) for number, values in enumerate(text))
    else:
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                yield FileRow(f"{name}:{number}", _decode_json(f"{name}:{number}", line))


def _decode_json(where: str, data: bytes) -> object:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MarlRayError(f"{where}: not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise MarlRayError(f"{where}: not JSON: {error.msg} at {line}column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise MarlRayError(f"{where}: not JSON: {one_line(error)}") from error


R = TypeVar("R", bound=BaseModel)


def read_record(model: type[R], row: FileRow) -> R:
    """Return a checked record. Raises MarlRayError naming file, line and field."""
    try:
        return model.model_validate(row.values)
    except ValidationError as error:
        raise MarlRayError(f"{row.where}: {first_mistake(error, row.values, model)}") from error
