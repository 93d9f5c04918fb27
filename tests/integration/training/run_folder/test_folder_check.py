"""The check of a run's folder, while other drivers come and go."""

import contextlib
import threading
import time

from pyarrow import fs
from toy_runs.runs import config

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.stored_files.ownership.owners import newest_number
from marl_ray.training.run_folder.record import check_folder

LOCAL = fs.LocalFileSystem()


def test_a_check_of_the_folder_leaves_what_another_began_there(tmp_path):
    run_config, folder = config(f"storage={tmp_path}", "name=first"), str(tmp_path / "first")
    missing, ended = [], threading.Event()

    def check() -> None:
        while not ended.is_set():
            with contextlib.suppress(MarlRayError):  # the folder has just been deleted
                check_folder(run_config)

    thread = threading.Thread(target=check)
    thread.start()
    for _ in range(100):
        with contextlib.suppress(MarlRayError, ValueError), Lease(LOCAL, folder, "run 'first'") as lease:
            time.sleep(0.001)
            missing += [lease.number] * (newest_number(LOCAL, folder) != lease.number)
            raise ValueError("so that the folder is deleted")
    ended.set()
    thread.join(60)
    assert missing == []
