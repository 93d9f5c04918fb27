"""Databases of the newest schema without its migrations, which cost most of what many a test of a gateway does."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import sqlalchemy as sa

from marl_ray.experiments.store.facade import open_stores


@cache
def _template() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    folder = tempfile.TemporaryDirectory(prefix="marl-ray-migrated-")
    path = Path(folder.name, "experiments.db")
    open_stores(f"sqlite:///{path}").close()
    return path, folder  # which is removed when the process ends


def migrate(url: str) -> str:
    """The URL of an SQLite database, whose file is made if it is not there.

    A new file has all tables and nothing in them.
    """
    path = Path(str(sa.make_url(url).database))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_template()[0], path)
    return url
