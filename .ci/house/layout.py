"""Checks of folders and files: small, each with a purpose, tests where their sources are."""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

from sources import PACKAGE, Finding, SourceFile, name_of, product

MAX_FILES = 9
"""Maximum number of files of a folder, besides its `__init__.py` and `conftest.py`."""
MAX_LINES = 400
"""Maximum number of lines of a file."""
RECIPES = ("conformance/extensions", "experiments/database/migrations/versions")
"""Folders to which a recipe of CONTRIBUTING.md adds a file that is no built-in."""
BUILTIN = re.compile(rf"{PACKAGE}\.([\w.]+)\.\w+:\w+")
"""The import path of a built-in in `extensions.py`; the group is the package of its module."""


def growing_folders(files: list[SourceFile]) -> set[str]:
    """Return the folders to which the recipes of CONTRIBUTING.md add files: those of two built-ins or more, and `RECIPES`.

    Each file of them is one part, which is found by its name, so that their number of files has no limit.
    """
    nodes = [node for file in files if file.module == f"{PACKAGE}.extensions" for node in file.nodes]
    paths = [
        BUILTIN.fullmatch(node.value) for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str
    ]
    counts = Counter(path[1].replace(".", "/") for path in paths if path)
    return {f"src/{PACKAGE}/{folder}" for folder in (*RECIPES, *(name for name in counts if counts[name] > 1))}


def large_folders(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the first file too many of the folders of `src`, `tests` and `benchmarks`."""
    members = defaultdict(list)
    for file in files:
        folder = str(PurePosixPath(file.name).parent)
        if (file.module or file.is_test or is_benchmark(file)) and file.path.name not in ("__init__.py", "conftest.py"):
            members[folder].append(file)
    for folder, inside in members.items():
        if len(inside) > MAX_FILES and folder not in growing_folders(files):
            message = f"the folder has {len(inside)} files, expected {MAX_FILES} at most"
            yield inside[MAX_FILES].finding(None, message)


def long_files(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the files with too many lines."""
    for file in files:
        if (lines := file.text.count("\n")) > MAX_LINES:
            yield Finding(file.name, lines, f"the file has {lines} lines, expected {MAX_LINES} at most")


def folders_without_purpose(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the folders of `src` and `benchmarks` whose `__init__.py` is missing, or does not begin with a sentence.

    One of `benchmarks` is that sentence alone.
    """
    modules = {file.name: file for file in files if file.module or is_benchmark(file)}
    for folder in sorted({PurePosixPath(name).parent for name in modules}):
        init = modules.get(f"{folder}/__init__.py")
        purpose = ast.get_docstring(init.tree) if init else None
        first, *more = (purpose or "").splitlines() or [""]
        if not first.endswith(".") or (more and folder.parts[0] == "benchmarks"):
            yield Finding(
                f"{folder}/__init__.py", 1, "expected a docstring that says the folder's purpose in one sentence"
            )


def is_benchmark(file: SourceFile) -> bool:
    """Return True for the files in the folders of `benchmarks`."""
    return file.name.startswith("benchmarks/") and file.name.count("/") > 1


def repeated_folders(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the modules, benchmarks and tests whose names repeat the name of their folder.

    One such as `engines/torch_engine.py` does not count, because without the folder's name it has that of a package;
    nor one such as `runs/test_runs.py`, which would have no name.
    """
    for file in files:
        folder, words = file.path.parent.name, file.path.stem.removeprefix("test_").split("_")
        other_words = [word for word in words if word.removesuffix("s") != folder.removesuffix("s")]
        is_named_test = file.path.name.startswith("test_") and bool(other_words)
        is_checked = bool(file.module) or is_benchmark(file) or is_named_test
        if is_checked and other_words != words and "_".join(other_words) not in packages_beside(file):
            yield file.finding(None, f"expected a name that does not repeat the folder's, {folder}")


def packages_beside(file: SourceFile) -> set[str]:
    """Return the names of the packages of the standard library, and of those that a file imports."""
    imports = {node.module or "" for node in file.nodes if isinstance(node, ast.ImportFrom)}
    imports |= {alias.name for node in file.nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in imports} | sys.stdlib_module_names


def misnamed_interfaces(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the modules `protocol` without a Protocol, and the modules `base` without a class that others inherit."""
    modules = list(product(files).values())
    classes = {file: [node for node in file.tree.body if isinstance(node, ast.ClassDef)] for file in modules}
    for file in modules:
        if file.path.name not in ("base.py", "protocol.py"):
            continue
        interfaces = [node for node in classes[file] if "Protocol" in bases_of(node)]
        others = {base for other in modules if other is not file for node in classes[other] for base in bases_of(node)}
        is_inherited = any(node.name in others for node in classes[file] if node not in interfaces)
        if file.path.name == "protocol.py" and not interfaces:
            yield file.finding(None, "expected a Protocol in a module of this name")
        if file.path.name == "base.py" and not is_inherited:
            yield file.finding(None, "expected a class that others inherit in a module of this name")


def bases_of(node: ast.ClassDef) -> set[str]:
    """Return the names of the classes from which a class inherits, without their type arguments."""
    return {name_of(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases}


def misplaced_tests(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the first unit test of each folder that has no counterpart in the sources.

    The folder `docs` tests the documentation.
    """
    folders = {PurePosixPath(file.name).parent.relative_to(f"src/{PACKAGE}") for file in files if file.module}
    folders.add(PurePosixPath("docs"))
    for file in files:
        place = PurePosixPath(file.name)
        if place.is_relative_to("tests/unit") and place.name.startswith("test_"):
            folder = place.parent.relative_to("tests/unit")
            if folder not in folders:
                folders.add(folder)
                yield file.finding(None, f"expected unit tests in the folders of src/{PACKAGE}, which has no {folder}/")
