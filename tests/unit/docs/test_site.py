"""The parts of the site: every page is listed, every name of the API is there, every shipped config is a recipe."""

import importlib
import json
import re
import tomllib

import pytest
from docs.pages import PAGES, ROOT, WALKED

API = (ROOT / "docs/python_names.md").read_text()
NAMES = re.findall(r"^- `(marl_ray\.[\w.]+)\.(\w+)(?:\(\))?`: ", API, re.MULTILINE)
CONSTANTS = re.findall(r"^- `(marl_ray\.[\w.]+)\.(\w+)` \(constant\): ", API, re.MULTILINE)
IMPORT = re.compile(r"^from (marl_ray[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(parts) for parts in NAMES])
def test_a_name_of_the_api_is_there_and_documented(module, name):
    assert getattr(importlib.import_module(module), name).__doc__


@pytest.mark.parametrize(("module", "name"), CONSTANTS, ids=[".".join(parts) for parts in CONSTANTS])
def test_a_constant_of_the_api_is_there(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_every_imported_name_is_in_the_reference():
    imported = {
        f"{module}.{name.split()[0]}"
        for page in WALKED
        for module, several, line in IMPORT.findall(page.read_text())
        for name in (several or line.partition("#")[0]).split(",")
        if name.strip()
    }
    listed = set(re.findall(r"`(marl_ray\.[\w.]+)(?:\(\))?`", API))
    assert len(imported) > 30
    assert sorted(imported - listed) == []


def test_every_page_is_listed():
    listed = (ROOT / "docs/README.md").read_text()
    folders = {ROOT / "docs/decisions", ROOT / "docs/extending"}  # their own README lists their pages
    pages = [
        path for path in ROOT.glob("docs/**/*.md") if path.parent not in folders and path != ROOT / "docs/README.md"
    ]
    assert len(NAMES) > 10 and len(pages) > 10
    assert [path for path in pages if f"]({path.relative_to(ROOT / 'docs')})" not in listed] == []


def test_every_shipped_config_is_a_recipe():
    text = (ROOT / "docs/recipes.md").read_text()
    assert [path.stem for path in (ROOT / "jobs/configs").glob("*.yaml") if f"`{path.stem}`" not in text] == []


def test_the_tables_of_the_recipes_are_those_of_the_stored_results():
    page = importlib.import_module("benchmarks.learning.recipe_page")
    text, stored = (ROOT / "docs/recipes.md").read_text(), (ROOT / "benchmarks/results/recipes.json").read_text()
    assert page.fill_tables(text, json.loads(stored)) == text, (
        "run: .venv/bin/python -m benchmarks.learning.recipes --write"
    )


def test_one_page_says_how_many_keys_a_run_has():
    run = (ROOT / "docs/config.md").read_text().partition("\n## Run\n")[2].partition("\n## ")[0]
    stated = re.findall(r"(\d+) keys\.", run)
    assert stated == [str(len(re.findall(r"^\| `", run, re.MULTILINE)))] and int(stated[0]) < 800
    assert [str(page) for page in PAGES if re.search(r"fewer than \d+ (documented )?keys", page.read_text())] == []


def test_the_keys_that_a_comparison_names_are_there():
    named = re.findall(
        r"`((?:hyper|train|resources|evaluation|generation|model)\.\w+)`", (ROOT / "docs/comparison.md").read_text()
    )
    keys = (ROOT / "docs/config.md").read_text()
    assert len(named) > 20
    assert [
        name for name in named if f".{name.split('.')[1]}`" not in keys and f"`{name.split('.')[1]}`" not in keys
    ] == []


def tree_of_the_sources() -> list[str]:
    """The folders and files that the page about development draws, as paths below `src/marl_ray`.

    Each line has its folder or files first, indented below its package.
    """
    tree = (ROOT / "docs/development.md").read_text().partition("\nsrc/marl_ray/\n")[2].partition("\njobs/")[0]
    package, paths = "", []
    for indent, names in re.findall(r"^( +)((?:[a-z_]+(?:/|\.py)  +)+)", tree, re.MULTILINE):
        if len(indent) == 2:
            package = names.split()[0]
        paths += [name if len(indent) == 2 else package + name for name in names.split()]
    return paths


def test_the_tree_of_the_sources_names_what_is_there():
    paths = tree_of_the_sources()
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / "src/marl_ray" / path).exists()] == []


def test_both_maps_of_the_sources_name_every_part():
    parts = {
        path.name + "/" * path.is_dir()
        for path in (ROOT / "src/marl_ray").iterdir()
        if not path.name.startswith("__") and path.name != "py.typed"
    }
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Where a line belongs\n")[2].partition("\n## ")[0]
    drawn = {*tree_of_the_sources(), "style.css"}  # in the sentence beside drawing.py
    assert sorted(parts - drawn) == [] == sorted(parts - set(re.findall(r"`([\w.]+/?)`", table)))


def test_imports_point_downwards_in_the_tree_of_the_sources():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    modules = ["marl_ray." + path.removesuffix(".py").strip("/").replace("/", ".") for path in tree_of_the_sources()]
    checked = 0
    for contract in contracts:
        if contract["type"] != "layers":
            continue
        [container] = contract["containers"]
        heights = {
            f"{container}.{name}": k for k, layer in enumerate(contract["layers"]) for name in re.findall(r"\w+", layer)
        }
        drawn = [module for module in modules if module in heights]
        assert drawn == sorted(drawn, key=heights.__getitem__)
        checked += len(drawn)
    assert checked > 50
