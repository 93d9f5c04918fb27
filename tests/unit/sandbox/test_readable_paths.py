"""The paths that programs may read: of the installed packages those alone that are loaded, wherever Python keeps them."""

import sys
from types import ModuleType

import pytest

from marl_ray.sandbox.confinement.readable_paths import PACKAGE_FOLDERS, needed_paths


@pytest.mark.parametrize("folder", PACKAGE_FOLDERS)
@pytest.mark.parametrize(
    ("file", "readable"),
    [
        ("toy_package/__init__.py", ["toy_package", "toy_package.libs"]),
        ("toy_package.py", ["toy_package.py"]),
    ],
)
def test_a_loaded_package_is_readable_and_its_neighbours_are_not(tmp_path, monkeypatch, folder, file, readable):
    installed = tmp_path / folder
    for name in ("toy_package", "toy_package.libs", "neighbour"):
        (installed / name).mkdir(parents=True)
    for name in ("toy_package/__init__.py", "toy_package.py"):
        (installed / name).touch()
    module = ModuleType("toy_package")
    module.__file__ = str(installed / file)
    monkeypatch.setitem(sys.modules, "toy_package", module)
    paths = [path for path in needed_paths() if path.startswith(str(tmp_path))]
    assert paths == [str(installed / name) for name in readable]
