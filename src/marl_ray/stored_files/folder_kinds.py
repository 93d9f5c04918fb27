"""The kinds of folders under a storage, runs and sweeps, by the files that they hold.

A run or a sweep has its name for itself, because all that it writes lies in the folder of that name.
"""

from marl_ray.errors import MarlRayError, one_line
from marl_ray.storages import open_storage

RUN_KIND, SWEEP_KIND = "run", "sweep"
RUN_FILE, SWEEP_FILE = "run.json", "sweep.json"
"""The record of a run, and the records of a sweep."""
RECORD_FILES = {RUN_KIND: RUN_FILE, SWEEP_KIND: SWEEP_FILE}
"""Kind -> the file by which a folder is of that kind."""


def refuse_other_kind(storage: str, name: str, kind: str) -> None:
    """Raise MarlRayError if the name is taken under the storage by a folder of another kind, or that cannot be told.

    A name is claimed for a `kind` by this check first. The trials of a sweep claim none: they lie within its folder.
    """
    filesystem, root = open_storage(storage)
    others = [other for other in RECORD_FILES if other != kind]
    try:
        infos = filesystem.get_file_info([f"{root}/{name}/{RECORD_FILES[other]}" for other in others])
    except OSError as error:
        raise MarlRayError(f"storage: {storage!r} cannot be read: {one_line(error)}") from error
    for other, info in zip(others, infos, strict=True):
        if info.is_file:
            raise MarlRayError(f"name: {name!r} is a {other} under {storage!r}; choose another name")
