"""Names that do not say what they stand for, in syntax trees; `tests/unit/test_house.py` looks for them everywhere."""

import ast
from collections.abc import Mapping
from functools import cache

VAGUE = {"asked", "found", "gone", "heard", "mine", "of", "one", "ours", "theirs", "told", "who", "whole"}
"""Names that do not say what a variable holds or a function does."""
VAGUE_PARTS = VAGUE - {"of", "one", "whole"}
"""Words that say nothing in longer names either, unless a question begins with `is`."""
VAGUE_ALONE = {"given", "here", "kept", "left", "own", "said", "wanted"}
"""Words that say nothing alone, and something in a longer name, such as `kept_actions`; `left` beside `right` is a side."""
STORED = {("marl_ray.serving.logs.act_log", "asked"), ("marl_ray.runs.summary", "given")}
"""Fields of records on disk and of documents, whose names are those of the files."""


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a module, which many tests look at."""
    return list(ast.walk(tree))


def name_of(node: ast.AST) -> str:
    """Return the name that a node gives or reads; empty for every other node."""
    match node:
        case ast.arg(arg=name) | ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            return name
    return ""


@cache
def is_vague(name: str) -> bool:
    """Return True if a name, or a word of it, says nothing."""
    words = name.strip("_").split("_")
    return "_".join(words) in VAGUE or (words[0] != "is" and not VAGUE_PARTS.isdisjoint(words))


def sides(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes named `left` of the functions and classes that have a `right` too."""
    beside: set[ast.AST] = set()
    for scope in nodes(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts = [(part, name_of(part)) for part in ast.walk(scope)]
            if any(name == "right" for _, name in parts):
                beside |= {part for part, name in parts if name == "left"}
    return beside


def called_in_decorators(tree: ast.Module) -> set[ast.AST]:
    """Return the functions that decorators call, such as hypothesis's `given`."""
    functions = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    decorators = [decorator for function in functions for decorator in function.decorator_list]
    return {decorator.func for decorator in decorators if isinstance(decorator, ast.Call)}


def vague_alone(trees_by_name: Mapping[str, ast.Module]) -> list[str]:
    """Return the names of one word that says nothing alone, each with its file and line."""
    return [
        f"{file}:{getattr(node, 'lineno', 0)}: {name}"
        for file, tree in trees_by_name.items()
        for node in nodes(tree)
        if (name := name_of(node)).strip("_") in VAGUE_ALONE and (file, name) not in STORED
        if node not in sides(tree) and node not in called_in_decorators(tree)
    ]


def vague_names(trees_by_name: Mapping[str, ast.Module]) -> list[str]:
    """Return vague names, each with its file and line; the name of a test is a sentence, whose words are free."""
    return [
        f"{file}:{getattr(node, 'lineno', 0)}: {name}"
        for file, tree in trees_by_name.items()
        for node in nodes(tree)
        if is_vague(name := name_of(node)) and not name.startswith("test_") and (file, name) not in STORED
    ]
