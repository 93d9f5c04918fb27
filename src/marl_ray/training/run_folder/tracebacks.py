"""The tracebacks of workers and of the driver, in `errors/` of the run's folder."""

import contextlib
from collections.abc import Iterable

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.stored_files.folder_kinds import ERRORS_FOLDER
from marl_ray.training.run_folder.record import filesystem_of


def write_traceback(config: RunConfig, whose: str, text: str) -> str:
    """Write the traceback of the driver or of a worker to the run's folder, and return its path.

    Ray Train does not bring a worker's to the driver. The path is empty if the traceback could not be written.
    """
    filesystem, folder = filesystem_of(config)
    path = f"{folder}/{ERRORS_FOLDER}/{whose}.txt"
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        filesystem.create_dir(f"{folder}/{ERRORS_FOLDER}")
        with filesystem.open_output_stream(path) as stream:
            stream.write(text.encode())
        return path
    return ""


def traceback_of(config: RunConfig, ranks: Iterable[int]) -> str:
    """Return the path of the traceback of the first of these workers that left one; "" if none did."""
    filesystem, folder = filesystem_of(config)
    paths = (f"{folder}/{ERRORS_FOLDER}/worker-{rank}.txt" for rank in ranks)
    return next((path for path in paths if filesystem.get_file_info(path).type == fs.FileType.File), "")
