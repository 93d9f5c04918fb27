"""The page about algorithms of your own names every field of a spec, and functions with their arguments."""

import ast
import importlib
import inspect
import re
from dataclasses import MISSING, Field, fields
from itertools import pairwise

from docs.pages import ROOT

from marl_ray.config import AlgorithmSpec

PAGE = (ROOT / "docs/extending/algorithms.md").read_text()
FIELD = re.compile(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\| ", re.MULTILINE)
FUNCTION = re.compile(r"^\| `(\w+)\.(\w+)\((.*?)\)` \| ", re.MULTILINE)


def default(field: Field) -> str:
    """The default of a field as the page writes it."""
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    if isinstance(field.default, type):
        return field.default.__name__
    return "" if field.default is MISSING else repr(field.default).replace("'", '"')


def test_every_field_of_a_spec_is_in_the_table():
    section = PAGE.partition("\n## The spec\n")[2].partition("\n## ")[0]
    assert FIELD.findall(section) == [(field.name, default(field)) for field in fields(AlgorithmSpec)]


def test_every_field_of_a_spec_is_documented():
    body = ast.parse(inspect.getsource(AlgorithmSpec)).body[0].body  # type: ignore[attr-defined]
    following = pairwise(body)
    documented = [
        node.target.id  # type: ignore[union-attr]
        for node, after in following
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr)
    ]
    assert documented == [field.name for field in fields(AlgorithmSpec)]


def test_functions_that_compute_advantages_are_shown_with_their_arguments():
    rows = FUNCTION.findall(PAGE)
    assert {module for module, _, _ in rows} == {"batch_gae", "gae", "returns"}
    for module, name, arguments in rows:
        function = getattr(importlib.import_module(f"marl_ray.algorithms.advantages.{module}"), name)
        assert arguments == ", ".join(inspect.signature(function).parameters)
