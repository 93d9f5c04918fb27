"""Checks of imports: no circles, and no private parts of the product or of Ray."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from sources import PACKAGE, Finding, SourceFile, name_of, product, top_names

RAY_SEAMS = f"{PACKAGE}.ray_seams"
"""The one module that uses private parts of Ray."""
PRIVATE_OF_RAY = re.compile(r"\bray(\.\w+)*\._\w+")
"""A private part of Ray in a text, such as the module that a text names for an import."""


def cycles(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield a circle of files that import each other, if there is one.

    Imports for types alone and in functions count.
    """
    modules = product(files)
    lines = {module: imported(file, modules) for module, file in modules.items()}
    try:
        TopologicalSorter(lines).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]
        node = lines[circle[0]][circle[1]]
        yield modules[circle[0]].finding(node, f"these files import each other: {' -> '.join(circle)}")


def imported(file: SourceFile, modules: dict[str, SourceFile]) -> dict[str, ast.AST]:
    """Return the modules of the product that a file imports, each with the statement that does."""
    statements: dict[str, ast.AST] = {}
    for node in file.nodes:
        match node:
            case ast.Import(names=names):
                statements |= {alias.name: node for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                members = {f"{module}.{alias.name}" for alias in names} & modules.keys()
                statements |= dict.fromkeys(members or {module}, node)
    return {name: node for name, node in statements.items() if name in modules and name != file.module}


def from_imports(file: SourceFile, package: str) -> Iterator[tuple[ast.ImportFrom, list[str]]]:
    """Yield what a file imports from a package: the statement, and the parts of each full name."""
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for alias in node.names:
                yield node, [*(node.module or "").split("."), alias.name]


def private_imports(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the private names that tests import from the product, and all but `ray_seams.py` from Ray."""
    for file in files:
        if file.is_test:
            for node, parts in from_imports(file, PACKAGE):
                if any(part.startswith("_") for part in parts) and parts[-1] != "__version__":
                    yield file.finding(node, f"a test imports {'.'.join(parts)}, which is private")
        if file.module and file.module != RAY_SEAMS:
            for node, parts in from_imports(file, "ray"):
                if any(part.startswith("_") for part in parts):
                    yield file.finding(
                        node, f"only ray_seams.py imports private parts of Ray, such as {'.'.join(parts)}"
                    )


def overridden_methods(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the private methods of classes that inherit from Ray's: they replace or use a private part of Ray."""
    for file in files:
        if file.module is None or file.module == RAY_SEAMS:
            continue
        rays = names_of_ray(file)
        for node in file.nodes if rays else ():
            if isinstance(node, ast.ClassDef) and rays & {
                getattr(n, "id", "") for b in node.bases for n in ast.walk(b)
            }:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and is_private(method.name):
                        name = f"{node.name}.{method.name}"
                        yield file.finding(
                            method, f"only ray_seams.py overrides private methods of Ray, such as {name}"
                        )


def private_reaches(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield where a module reaches a private part of Ray by an attribute, a keyword, `getattr` or a text."""
    for file in files:
        if file.module is None or file.module == RAY_SEAMS:
            continue
        rays = names_of_ray(file)
        for node in file.nodes:
            for reached in private_parts(node, rays):
                yield file.finding(node, f"only ray_seams.py reaches private parts of Ray, such as {reached}")


def names_of_ray(file: SourceFile) -> set[str]:
    """Return the names that a file's imports give to Ray and to parts of it."""
    names: set[str] = set()
    for node in file.nodes:
        match node:
            case ast.Import(names=aliases):
                names |= {a.asname or "ray" for a in aliases if a.name.split(".")[0] == "ray"}
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] == "ray":
                names |= {alias.asname or alias.name for alias in aliases}
    return names


def private_parts(node: ast.AST, rays: set[str]) -> list[str]:
    """Return the private parts of Ray, whose names in the file are `rays`, that a node reaches."""
    match node:
        case ast.Constant(value=str(text)):
            return [match[0] for match in PRIVATE_OF_RAY.finditer(text)]
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases if PRIVATE_OF_RAY.match(alias.name)]
        case ast.Attribute(attr=name) if is_private(name) and root_of(node) in rays:
            return [ast.unparse(node)]
        case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return [name] if rays and is_private(name) else []
        case ast.Call(func=function, keywords=keywords) if root_of(function) in rays:
            return [f"{ast.unparse(function)}({k.arg}=)" for k in keywords if is_private(k.arg or "")]
    return []


def root_of(node: ast.AST) -> str:
    """Return the name with which a chain of attributes begins; empty for any other expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """Return True for private names, but not for Python's own `__name__`."""
    return name.startswith("_") and not name.endswith("_")


def replaced_privates(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the private names of the product that tests replace by `setattr`.

    Ruff's SLF001 sees those that are read.
    """
    private = {
        name
        for file in product(files).values()
        for name in [*map(name_of, file.nodes), *top_names(file.tree)]
        if is_private(name)
    }
    for file in files:
        for node in file.nodes if file.is_test else ():
            match node:
                case ast.Call(func=ast.Attribute(attr="setattr"), args=arguments):
                    texts = [str(part.value) for part in arguments if isinstance(part, ast.Constant)]
                    for name in {text.split(".")[-1] for text in texts} & private:
                        yield file.finding(node, f"a test replaces {name}, a private name of the product")
