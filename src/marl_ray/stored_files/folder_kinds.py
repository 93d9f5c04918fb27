"""The folders under a storage: the kinds of runs and sweeps, by the files that they hold, and the names of bundles'.

A run or a sweep has its name for itself, because all that it writes lies in the folder of that name.
"""

from pyarrow import fs

from marl_ray.errors import MarlRayError, one_line
from marl_ray.stored_files.storages import open_storage
from marl_ray.stored_files.temporary_files import TEMPORARY_NAME

RUN_KIND, SWEEP_KIND = "run", "sweep"
RUN_FILE, SWEEP_FILE = "run.json", "sweep.json"
"""The record of a run, and the records of a sweep."""
RECORD_FILES = {RUN_KIND: RUN_FILE, SWEEP_KIND: SWEEP_FILE}
"""Kind -> the file by which a folder is of that kind."""
OWNER_FOLDER = "owner"
"""Folder, in that of a run or a sweep, with the lease of its driver."""
DIGEST_DIGITS = 16
"""Hexadecimal digits of a bundle's digest in the name of its folder, in messages and in the names made from it."""
CURVE_PICTURE, BENCHMARKS_PICTURE = "return.png", "benchmarks.png"
"""Drawings of a finished run in its folder: the learning curve, and pass@1 of the benchmarks that it was scored on."""
ERRORS_FOLDER = "errors"
"""Folder of tracebacks in a run's folder, which a check of the run may write before there is an owner."""
DRIVER_FILES = frozenset({OWNER_FOLDER, ERRORS_FOLDER, *RECORD_FILES.values(), "metrics.jsonl"})
"""The files and folders that tell a driver's folder: it writes one of the first two before any other, and metrics stay where
somebody has deleted all of these."""


def refuse_other_kind(storage: str, name: str, kind: str) -> None:
    """Raise MarlRayError if the name is taken under the storage by a folder of another kind, or that cannot be told.

    A name is claimed for a `kind` by this check first. The trials of a sweep claim none: they lie within its folder. A
    folder in which no driver has begun is something else's unless it is empty: that of `marl-ray try`, or of MLflow's files.
    """
    filesystem, root = open_storage(storage)
    try:
        names = _names_in(filesystem, f"{root}/{name}")
    except NotADirectoryError as error:
        raise MarlRayError(f"name: {name!r} is a file under {storage!r}; choose another name") from error
    except OSError as error:
        raise MarlRayError(f"storage: {storage!r} cannot be read: {one_line(error)}") from error
    for other, record in RECORD_FILES.items():
        if other != kind and record in names:
            raise MarlRayError(f"name: {name!r} is a {other} under {storage!r}; choose another name")
    if names and not names & DRIVER_FILES:
        raise MarlRayError(
            f"name: {name!r} under {storage!r} is the folder of something else than a {kind}, with {min(names)}; "
            "choose another name"
        )


def is_of_driver(filesystem: fs.FileSystem, folder: str) -> bool:
    """Return True if the folder is that of a run or a sweep. Raises OSError if it cannot be read."""
    return not DRIVER_FILES.isdisjoint(_names_in(filesystem, folder))


def _names_in(filesystem: fs.FileSystem, folder: str) -> set[str]:
    """Return the names of what is in a folder, without what is being written; none where there is no such folder."""
    infos = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    return {info.base_name for info in infos if not TEMPORARY_NAME.fullmatch(info.base_name)}
