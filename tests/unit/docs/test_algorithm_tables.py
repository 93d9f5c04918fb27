"""The pages about algorithms name every own key and every field of a spec, and functions with their arguments."""

import ast
import importlib
import inspect
import re
from dataclasses import MISSING, Field, fields
from itertools import pairwise

from docs.pages import ROOT

from marl_ray.config import SPECS, AlgorithmSpec

KEYS_PAGE = (ROOT / "docs/algorithms.md").read_text()
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


def readers(words: str) -> set[str]:
    """Return the algorithms that a cell of the table of keys names."""
    named = set(re.findall(r"`(\w+)`", words))
    if words.startswith("all but "):
        return SPECS.keys() - named
    return named | (
        {name for name, spec in SPECS.items() if spec.needs_costs} if "all constrained ones" in words else set()
    )


def test_the_table_of_keys_says_which_algorithms_read_each():
    section = KEYS_PAGE.partition("\n## Keys and tests of each algorithm\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", section.partition("| name | tests |")[0], re.MULTILINE)
    written = {key: readers(words) for keys, words in rows for key in re.findall(r"\w+", keys)}
    own_keys = {key for spec in SPECS.values() for key in spec.keys}
    assert written == {key: {name for name, spec in SPECS.items() if key in spec.keys} for key in own_keys}


def test_every_algorithm_is_in_the_table_of_tests_whose_files_exist():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", KEYS_PAGE.partition("| name | tests |")[2], re.MULTILINE)
    tests = {name: re.findall(r"`(test_\w+)`", words) for name, words in rows[: len(SPECS)]}
    assert tests.keys() == SPECS.keys()
    assert all(list(ROOT.glob(f"tests/*/**/{file}.py")) for files in tests.values() for file in files)


def test_the_readme_counts_the_algorithms():
    assert re.findall(r"\b(\d+) of them\b", (ROOT / "README.md").read_text()) == [str(len(SPECS))]


def test_every_field_of_a_spec_is_in_the_table():
    section = PAGE.partition("\n## The spec\n")[2].partition("\n## ")[0]
    assert FIELD.findall(section) == [(field.name, default(field)) for field in fields(AlgorithmSpec)]


def test_every_field_of_a_spec_is_documented():
    body = ast.parse(inspect.getsource(AlgorithmSpec)).body[0].body  # type: ignore[attr-defined]
    following = pairwise(body)
    documented = [
        node.target.id for node, after in following if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr)
    ]
    assert documented == [field.name for field in fields(AlgorithmSpec)]


def test_functions_that_compute_advantages_are_shown_with_their_arguments():
    rows = FUNCTION.findall(PAGE)
    assert {module for module, _, _ in rows} == {"batch_gae", "gae", "returns"}
    for module, name, arguments in rows:
        function = getattr(importlib.import_module(f"marl_ray.algorithms.advantages.{module}"), name)
        assert arguments == ", ".join(inspect.signature(function).parameters)
