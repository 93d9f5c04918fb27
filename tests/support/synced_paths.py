"""A list of the files and folders that a test's process brings onto the disk."""

import os
from pathlib import Path

import pytest


def watch_syncs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which every successful `os.fsync` adds the path that its file or folder has at that moment."""
    paths: list[Path] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", noted)
    return paths
