"""The link `NAME/bundle`, which leads to the best bundle of a run.

On remote storage it is a file with the bundle's URI.
"""

import re
import shutil
from pathlib import Path

from pyarrow import fs

from marl_ray.stored_files.temporary_files import temporary_path

LINK_NAME = "bundle"
"""Name in a run's folder; the bundle of a checkpoint has the same name in the checkpoint's folder."""
LINK_CONTENT = re.compile(rf"[^\s]+/(checkpoint_\d[^/\s]*)/{LINK_NAME}")
"""Content of the file that stands for the link on remote storage."""


def link_bundle(filesystem: fs.FileSystem, folder: str, checkpoint: str, uri: str) -> None:
    """Let the link of the run's `folder` lead to the bundle of the checkpoint of this name. Raises OSError.

    `uri` is the folder as users name it, which remote storage keeps.
    """
    link = Path(folder, LINK_NAME)
    if not isinstance(filesystem, fs.LocalFileSystem):
        if filesystem.get_file_info(str(link)).type == fs.FileType.Directory:
            filesystem.delete_dir(str(link))  # a copy of the run's folder followed its link
        with filesystem.open_output_stream(str(link)) as stream:
            stream.write(f"{uri}/{checkpoint}/{LINK_NAME}\n".encode())
        return
    if link.is_dir() and not link.is_symlink():  # a copy of the run's folder followed its link
        shutil.rmtree(link)
    temporary = Path(temporary_path(str(link)))
    temporary.unlink(missing_ok=True)
    # The link is relative, so that the folder may be moved.
    temporary.symlink_to(Path(checkpoint, LINK_NAME), target_is_directory=True)
    temporary.replace(link)


def linked_bundle(filesystem: fs.FileSystem, folder: str) -> str | None:
    """Return the path of the bundle's link on local storage, or the bundle's URI on remote storage.

    Return None where there is no bundle, or a file of something else in place of the link.
    """
    path = f"{folder}/{LINK_NAME}"
    kind = filesystem.get_file_info(path).type  # of what a link leads to
    local = isinstance(filesystem, fs.LocalFileSystem)
    if kind == fs.FileType.Directory:
        return path if local else f"{filesystem.type_name}://{path}"
    if kind != fs.FileType.File:
        return None
    with filesystem.open_input_stream(path) as stream:
        uri = bytes(stream.read()).decode(errors="replace").strip()
    match = LINK_CONTENT.fullmatch(uri)
    if match is None:
        return None
    copied = f"{folder}/{match[1]}/{LINK_NAME}"
    if folder in uri or filesystem.get_file_info(copied).type != fs.FileType.Directory:
        return uri
    return copied if local else f"{filesystem.type_name}://{copied}"  # the run's folder has been copied since
