"""Checks of what modules define.

Types have one meaning, few of them are Any, names are read, and tests have no annotations.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sources import Finding, SourceFile, name_of, product, top_names

READERS = ("benchmarks/", "jobs/", "serve/")
"""Folders beside the product that may be the only readers of a name; tests alone do not count."""
ENTERED = {"versions", "sandboxed"}
"""Folders with names that no code of ours reads: migrations, and programs that are sent into the sandbox."""
MAX_TEXT = 200
"""Characters of the texts that may name a part, or a type; longer ones are prose."""
MAX_ANY = {
    "config": 19,
    "conformance": 27,
    "envs": 144,
    "evaluation": 34,
    "experiments": 47,
    "policies": 102,
    "ray_seams": 27,
    "rollout": 26,
    "sandbox": 56,
    "serving": 84,
    "training": 75,
    "tuning": 30,
}
"""Package -> maximum number of times that it says Any. A number is lowered with them, and not raised."""
MAX_ANY_ELSEWHERE = 15
"""The same for each other package."""


def types_of_one_name(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the public classes and type aliases whose name another module has given already."""
    first: dict[str, SourceFile] = {}
    for file in product(files).values():
        for name, node in type_names(file.tree):
            if first.setdefault(name, file) is not file:
                yield file.finding(node, f"the type {name} has the name of another, in {first[name].name}")


def type_names(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the public names of a module's classes and type aliases, also of those in an `if`."""
    for node in (part for top in tree.body for part in (top.body if isinstance(top, ast.If) else [top])):
        match node:
            case ast.ClassDef(name=name):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if (
                not name.isupper()
            ):
                pass
            case _:
                continue
        if name[0].isupper():
            yield name, node


def any_types(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the file that says Any most often of each package that says it too often."""
    counts: dict[str, dict[str, int]] = {}
    for name, file in product(files).items():
        package = name.split(".")[1] if "." in name else name
        counts.setdefault(package, {})[name] = sum(name_of(node) == "Any" for node in file.nodes)
    for package, by_module in counts.items():
        count, limit = sum(by_module.values()), MAX_ANY.get(package, MAX_ANY_ELSEWHERE)
        if count > limit:
            instead = "name the type, JSON's of json_types.py, or object for what is passed on or checked"
            yield product(files)[max(by_module, key=by_module.__getitem__)].finding(
                None, f"{package} says Any {count} times, expected {limit} at most: {instead}"
            )


def unread_names(files: list[SourceFile], pages: list[Path]) -> Iterator[Finding]:
    """Yield what a module defines at its top and nothing reads.

    Readers are the product, and imports in the documentation.
    """
    modules = product(files).values()
    readers = [*modules, *(file for file in files if file.name.startswith(READERS))]
    words: set[str] = set().union(*map(words_read, readers))
    for page in pages:
        words |= set(re.findall(r"import (\w+)", page.read_text(encoding="utf-8")))
    for file in modules:
        if ENTERED.isdisjoint(file.path.parts):
            for name, node in top_names(file.tree).items():
                if name not in words and not (name.startswith("__") and name.endswith("__")):
                    yield file.finding(node, f"nothing in the product reads {name}")


def words_read(file: SourceFile) -> set[str]:
    """Return the names that a file reads, of whatever module, and the words of its short texts, which may name a part."""
    words: set[str] = set()
    for node in file.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                words.add(name)
            case ast.Constant(value=str() as text) if len(text) < MAX_TEXT:
                words |= set(re.findall(r"\w+", text))
    return words


def annotated_tests(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the tests with an annotation of a parameter or of what they return, which nothing reads."""
    for file in files:
        for node in file.nodes if not file.module else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                parameters = [part for part in ast.walk(node.args) if isinstance(part, ast.arg)]
                if node.returns or any(parameter.annotation for parameter in parameters):
                    yield file.finding(node, f"{node.name} has annotations, which tests do not have")
