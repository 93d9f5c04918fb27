"""Checks of names: they say what a variable holds or a function does."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from sources import Finding, SourceFile, name_of, product

VAGUE = {"asked", "found", "gone", "heard", "mine", "of", "one", "ours", "theirs", "told", "who", "whole"}
"""Names that do not say what a variable holds or a function does."""
VAGUE_PARTS = VAGUE - {"of", "one", "whole"}
"""Words that say nothing in longer names either, unless a question begins with `is`."""
VAGUE_ALONE = {"given", "here", "kept", "left", "own", "said", "wanted"}
"""Words that say nothing alone, and something in a longer name, such as `kept_actions`; `left` beside `right` is a side."""
SUPERLATIVE = re.compile(r"_?(most|least|longest|shortest|largest|smallest|biggest|fewest)_", re.IGNORECASE)
"""Beginning of a name that is a limit's only in an ordinary sentence; limits begin with `max_` and `min_`."""
PARTICIPLE = re.compile(r"_?(?!cuped|embed|feed|need|seed|speed)[a-z]+ed")
"""A participle that stands alone reads like a value or an event where it is called; CUPED is a method of statistics."""
LIMIT = re.compile(r"(Maximum|Minimum) number of ")
"""Beginning of the docstring of a limit."""
PROBLEM = re.compile(r"(.*_)?problems?(_.*)?")
"""Names with the word that stands for a benchmark's exercise, or for what an optimiser solves, and for no failure."""
OF_PROBLEMS = re.compile(r"evaluat|benchmarks/code/|/benchmark\.py|test_tasks_data|sandbox/test_attacks|trust_region")
"""Part of the path of a file that has problems: it scores answers to a benchmark's, reads or runs them, or solves one."""
STORED = {
    ("src/marl_ray/serving/logs/acts.py", "asked"),
    ("src/marl_ray/runs/summary.py", "given"),
    ("src/marl_ray/config/run/sections.py", "problems"),
    ("src/marl_ray/cluster/kuberay/state/phases.py", "GONE"),
}
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


def misnamed_failures(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the names that call a failure, a mismatch or an error a problem; the name of a test is a sentence."""
    for file in files:
        if OF_PROBLEMS.search(file.name):
            continue
        for node in file.nodes:
            name = name_of(node)
            if name.startswith("test_") or (file.name, name) in STORED:
                continue
            if PROBLEM.fullmatch(name):
                yield file.finding(node, f"the name {name} is of a benchmark's exercise, expected a failure's own word")


def bare_participles(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the functions and methods of the product whose name is one participle.

    A property may have such a name.
    """
    for file in product(files).values():
        for node in file.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not PARTICIPLE.fullmatch(node.name):
                continue
            if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield file.finding(
                    node, f"the function {node.name} is named by a participle, expected a verb and its object"
                )


def unlike_limits(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the limits whose names do not begin with `max_` or `min_`.

    A parameter, a field or a constant that begins with a superlative is one, and so is a constant that is documented as a
    maximum or minimum number. What a function finds, as `largest_difference` does, is a superlative indeed.
    """
    for file in files:
        for node in file.nodes:
            match node:
                case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    pass
                case ast.Name(id=name, ctx=ast.Store()) if name.isupper():
                    pass
                case _:
                    continue
            if SUPERLATIVE.match(name):
                yield file.finding(node, f"the limit {name} does not begin with max_ or min_")
        for node, following in pairwise(file.tree.body):
            match node, following:
                case ast.Assign(targets=[target]), ast.Expr(value=ast.Constant(value=str() as text)) if LIMIT.match(
                    text
                ):
                    first = next(part for part in ast.walk(target) if isinstance(part, ast.Name))
                    if not first.id.lstrip("_").startswith(("MAX_", "MIN_")):
                        yield file.finding(node, f"the limit {first.id} does not begin with MAX_ or MIN_")


@cache
def is_vague(name: str) -> bool:
    """Return True if a name, or a word of it, says nothing."""
    words = name.strip("_").lower().split("_")
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
