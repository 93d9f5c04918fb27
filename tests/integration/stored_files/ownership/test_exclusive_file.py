"""Processes that create a file at once: one of them has created it. Leases test it on each kind of storage."""

import threading

from pyarrow import fs

from marl_ray.stored_files.ownership import exclusive_file


def test_writers_at_once_leave_what_one_of_them_wrote(tmp_path, monkeypatch):
    """On storage that can only overwrite; what they write differs in length."""
    monkeypatch.setattr(exclusive_file, "SETTLE_S", 0.05)
    other = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    for turn in range(20):
        together = threading.Barrier(6)
        created: list[bool] = []

        def write(k: int, name: str, together: threading.Barrier, created: list[bool]) -> None:
            together.wait(60)
            created.append(exclusive_file.create(other, name, b"%d" % k * (10 + k)))

        threads = [threading.Thread(target=write, args=(k, f"{turn}.json", together, created)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(created) == [False] * 5 + [True]
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())
