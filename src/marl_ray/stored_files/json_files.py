"""Reads and writes plain data as files of JSON, on any storage."""

import json
from typing import Any

from pyarrow import fs

from marl_ray.json_types import JsonValue
from marl_ray.stored_files.temporary_files import write_file


def write_json(filesystem: fs.FileSystem, path: str, data: Any, durable: bool = False) -> None:
    """Write plain data to a file as `write_file` does, in a folder that exists.

    Raises TypeError for data that JSON does not know, and OSError.
    """
    write_file(filesystem, path, json.dumps(data, indent=1).encode(), durable)


def read_json(filesystem: fs.FileSystem, path: str) -> JsonValue:
    """Return the plain data in a file; None where there is no such file. Raises OSError or ValueError."""
    if filesystem.get_file_info(path).type == fs.FileType.NotFound:
        return None
    with filesystem.open_input_stream(path) as stream:
        text = stream.read()
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
