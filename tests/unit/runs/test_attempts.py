"""The folder of a driver that has written no record: what the commands of runs say of it."""

import json
import os
from pathlib import Path

from processes.command_line import keys_of, marl_ray
from pyarrow import fs

from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.stored_files.ownership.owners import owner_file

LOCAL = fs.LocalFileSystem()


def test_a_driver_that_was_killed_before_its_first_record_is_listed_and_deleted(tmp_path):
    with Lease(LOCAL, str(tmp_path / "begun"), "sweep 'begun'") as lease:
        (row,) = json.loads(marl_ray("runs", "ls", "--json", "--storage", tmp_path).stdout)
        assert set(row) == keys_of("runs ls") and (row["kind"], row["state"]) == ("attempt", "starting")
        error = marl_ray("runs", "show", "begun", "--storage", tmp_path).stderr
        assert f"has no record yet: its driver, process {os.getpid()} of" in error and "is starting" in error
        assert "is alive" in marl_ray("runs", "rm", "begun", "--storage", tmp_path, "--yes").stderr
        path = Path(owner_file(lease.folder, lease.number))
        owner = json.loads(path.read_text())
    path.write_text(json.dumps(owner | {"began": owner["began"] + 1}))  # as its process would leave it
    assert "  attempt, died  " in marl_ray("runs", "ls", "--storage", tmp_path).stdout
    for command in (["show", "begun"], ["logs", "begun"], ["resume", "begun"], ["compare", "begun"]):
        error = marl_ray("runs", *command, "--storage", tmp_path).stderr
        assert "'begun' under" in error and "has ended without one; the same command begins it again" in error
        assert error.count("\n") == 1
    deleted = marl_ray("runs", "rm", "begun", "--storage", tmp_path, "--yes", "--json")
    assert json.loads(deleted.stdout)["files"] == 1
    assert not (tmp_path / "begun").exists()
