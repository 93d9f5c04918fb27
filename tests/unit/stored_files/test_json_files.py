"""Files of plain data on a disk that is full, and on any storage."""

import json
import os
import resource

import pytest
from pyarrow import fs

from marl_ray.stored_files.json_files import read_json, write_json

LOCAL = fs.LocalFileSystem()


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, durable):
    """Nor does a process that is killed while it writes: a run whose record is incomplete would be refused for ever."""
    path, limits = tmp_path / "run.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_json(LOCAL, str(path), {"first": 1}, durable)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_json(LOCAL, str(path), {"second": "is longer than the disk has room for"}, durable)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["run.json"] and json.loads(path.read_text()) == {"first": 1}


def test_a_file_that_is_nested_too_deeply_is_no_json(tmp_path):
    (tmp_path / "run.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"^it is nested too deeply$"):
        read_json(LOCAL, str(tmp_path / "run.json"))


@pytest.mark.parametrize("durable", [False, True])
def test_what_was_written_is_read_again_on_any_storage(tmp_path, durable):
    for storage, path in ((LOCAL, str(tmp_path / "local")), (fs.SubTreeFileSystem(str(tmp_path), LOCAL), "other")):
        assert read_json(storage, path) is None
        write_json(storage, path, {"steps": [1, None]}, durable)
        assert read_json(storage, path) == {"steps": [1, None]}
        with pytest.raises(TypeError):
            write_json(storage, path, {"steps": object()}, durable)
        assert read_json(storage, path) == {"steps": [1, None]}
