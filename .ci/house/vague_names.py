"""Checks of names: they say what a variable holds or a function does."""

import ast
from collections.abc import Iterator
from functools import cache

from sources import Finding, SourceFile, name_of

VAGUE = {"asked", "found", "gone", "heard", "mine", "of", "one", "ours", "theirs", "told", "who", "whole"}
"""Names that do not say what a variable holds or a function does."""
VAGUE_PARTS = VAGUE - {"of", "one", "whole"}
"""Words that say nothing in longer names either, unless a question begins with `is`."""
VAGUE_ALONE = {"given", "here", "kept", "left", "own", "said", "wanted"}
"""Words that say nothing alone, and something in a longer name, such as `kept_actions`; `left` beside `right` is a side."""
STORED = {("src/marl_ray/serving/logs/act_log.py", "asked"), ("src/marl_ray/runs/summary.py", "given")}
"""Fields of records on disk and of documents, whose names are those of the files."""


def vague_names(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the names that say nothing; the name of a test is a sentence, whose words are free."""
    for file in files:
        free: set[ast.AST] | None = None
        for node in file.nodes:
            name = name_of(node)
            if not name or name.startswith("test_") or (file.name, name) in STORED:
                continue
            if name.strip("_") in VAGUE_ALONE:
                free = free_nodes(file) if free is None else free
                if node not in free:
                    yield file.finding(node, f"the name {name} says nothing alone")
            elif is_vague(name):
                yield file.finding(node, f"the name {name} does not say what it stands for")


@cache
def is_vague(name: str) -> bool:
    """Return True if a name, or a word of it, says nothing."""
    words = name.strip("_").split("_")
    return "_".join(words) in VAGUE or (words[0] != "is" and not VAGUE_PARTS.isdisjoint(words))


def free_nodes(file: SourceFile) -> set[ast.AST]:
    """Return the nodes whose name says enough where they stand.

    `left` does in the functions and classes that have a `right` too, and a function that a decorator calls, such as
    hypothesis's `given`.
    """
    free: set[ast.AST] = set()
    for scope in file.nodes:
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts = [(part, name_of(part)) for part in ast.walk(scope)]
            if any(name == "right" for _, name in parts):
                free |= {part for part, name in parts if name == "left"}
            free |= {decorator.func for decorator in scope.decorator_list if isinstance(decorator, ast.Call)}
    return free
