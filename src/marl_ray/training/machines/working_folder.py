"""The folder in which the processes of a run work."""

import os


def enter_folder(folder: str) -> None:
    """Work in the driver's `folder` if this machine has it.

    Relative paths of the config are then read from there: Ray Train and Ray Tune start their processes in folders
    of their own.
    """
    if os.path.isdir(folder):
        os.chdir(folder)
