"""`import marl_ray`: quick, complete, and typed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import marl_ray


def test_the_import_loads_neither_torch_nor_ray():
    heavy = "{'torch', 'ray', 'numpy', 'mlflow', 'pydantic'}"
    code = f"import sys, marl_ray; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_every_name_is_there_and_typed():
    stub = ast.parse(Path(marl_ray.__file__).with_suffix(".pyi").read_text())
    imported = {name.asname for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported | {"__version__"} == set(marl_ray.__dict__["__all__"]) <= set(dir(marl_ray))
    assert all(getattr(marl_ray, name).__doc__ for name in imported if name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'marl_ray' has no attribute 'trian'"):
        marl_ray.trian  # type: ignore[attr-defined]  # noqa: B018
