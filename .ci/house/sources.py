"""The files that are checked, and what a check says about them."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("src", "tests", "benchmarks", "cluster", "jobs", "serve", "docs", ".ci")
PACKAGE = "marl_ray"


class Finding(NamedTuple):
    """A line that breaks a rule."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(frozen=True)
class SourceFile:
    """A Python file with its syntax tree."""

    path: Path
    name: str
    """Path below the root of the repository, as findings show it."""
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, which most checks look at."""
        return list(ast.walk(self.tree))

    @cached_property
    def module(self) -> str | None:
        """Dotted name of a module of the product; None for tests, benchmarks and all other files."""
        parts = Path(self.name).with_suffix("").parts
        if parts[:2] != ("src", PACKAGE):
            return None
        return ".".join(parts[1:-1] if parts[-1] == "__init__" else parts[1:])

    @property
    def is_test(self) -> bool:
        """True for the files of `tests/`: what these need as well as the tests."""
        return self.name.startswith("tests/")

    def finding(self, node: ast.AST | None, message: str) -> Finding:
        """Return a finding at a node of this file; without a node it is about the whole file."""
        return Finding(self.name, getattr(node, "lineno", 1), message)


def read(root: Path) -> list[SourceFile]:
    """Return the Python files of a repository, sorted by name. Raises SyntaxError, with file and line."""
    files = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files.append(SourceFile(path, path.relative_to(root).as_posix(), text, ast.parse(text, str(path))))
    return files


def product(files: list[SourceFile]) -> dict[str, SourceFile]:
    """Return the modules of the product, by their dotted names."""
    return {file.module: file for file in files if file.module is not None}


def name_of(node: ast.AST) -> str:
    """Return the name that a node gives or reads; empty for every other node."""
    match node:
        case ast.arg(arg=name) | ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            return name
    return ""


def top_names(tree: ast.Module) -> dict[str, ast.AST]:
    """Return the names that a module gives at its top, each with its node.

    Without decorated functions, because a decorator may register them; what is made of a class does not register it.
    """
    names: dict[str, ast.AST] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) | ast.ClassDef():
                names[node.name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = node
    return names
