"""Checks of docstrings: their first words, the numbers that need one, when None is returned, and what is raised.

Ruff checks that classes, functions and methods have one, and finds most verbs (D101 to D103, D401).
"""

import ast
import re
from collections.abc import Iterator
from itertools import zip_longest

from sources import Finding, SourceFile, product

FRAGMENT = re.compile(r"(What|Of|How|Whether|If|Where|When|Which|Who|Whose|Why|As|And|But|\.\.\.)\b")
"""First words of a docstring that is a fragment and no sentence, or that hides its subject."""
NO_VERB = re.compile(
    r"[^A-Z]|(All|Any|Both|Each|Every|One|None|In|At|Within|For|From|With|Without)\b|[A-Z][\w-]*('s|[^\Ws]s|Error)\b"
)
"""First words of a function's docstring that are no verb in the imperative, and that D401 does not know: also plurals."""
OF_ANOTHER = re.compile(r"See `|[Rr]aises? (as|what|the errors of) ")
"""Part of a docstring that refers to another one, which says when None is returned, or what is raised."""
UNREACHED = {"AssertionError", "NotImplementedError"}
"""Errors of lines that no correct program reaches."""
COMMANDS = "src/marl_ray/cli/"
"""Folder whose docstrings are the help of commands, which all end an error by its one line."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def fragments(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the docstrings that begin like a fragment, also those of attributes."""
    for file in files:
        for node in file.nodes:
            match node:
                case ast.Expr(value=ast.Constant(value=str() as text)) if FRAGMENT.match(text.strip()):
                    yield file.finding(node, f"expected a docstring that begins like a sentence, got {start(text)!r}")


def without_verb(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the docstrings of the product's functions that do not begin with a verb in the imperative.

    A property's docstring says what it is, as an attribute's does; that of an `__init__` may list its arguments.
    """
    for file in files:
        for node in file.nodes if file.module else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            text = ast.get_docstring(node)
            if text and NO_VERB.match(text) and not (node.name == "__init__" and re.match("[`a-z]", text)):
                message = f"expected a docstring that begins with a verb in the imperative, got {start(text)!r}"
                yield file.finding(node.body[0], message)


def unexplained_numbers(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the constants of the product that are numbers, without unit, source or reason.

    A docstring below the constant says it, or a comment behind it or above it. A comment above a block of constants, which
    no other line interrupts, is about all of them.
    """
    for file in files:
        if not file.module:
            continue
        lines = file.text.splitlines()
        block_end = 0  # last line of a block of constants below a comment
        for node, after in zip_longest(file.tree.body, file.tree.body[1:]):
            in_block = node.lineno == block_end + 1 or lines[node.lineno - 2].startswith("#")
            if in_block and isinstance(node, ast.Assign | ast.AnnAssign):
                block_end = node.end_lineno or node.lineno
            match node:
                case ast.Assign(targets=targets, value=value):
                    name = " = ".join(map(ast.unparse, targets))
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    name = ast.unparse(target)
                case _:
                    continue
            match after:
                case ast.Expr(value=ast.Constant(value=str())):
                    continue
            behind = lines[(node.end_lineno or node.lineno) - 1]
            if name.isupper() and is_number(value) and "#" not in behind and not in_block:
                yield file.finding(node, f"the number {name} has neither unit nor source nor reason")


def unsaid_none(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the product's functions that may return None, and whose docstrings do not say when.

    A type alias whose own docstring says what None means says it for the functions that return it.
    """
    modules = product(files).values()
    aliases = {name for file in modules for name in unsaid_aliases(file.tree)}
    for file in modules:
        for node in file.nodes:
            if isinstance(node, Function) and may_be_none(node.returns, aliases):
                text = ast.get_docstring(node)
                if text and "None" not in text and not OF_ANOTHER.search(text):
                    yield file.finding(node, f"expected a docstring that says when {node.name} returns None")


def unsaid_aliases(tree: ast.Module) -> Iterator[str]:
    """Yield the type aliases that include None, and whose docstrings, if there are any, do not say what None means."""
    for node, after in zip_longest(tree.body, tree.body[1:]):
        match node, after:
            case _, ast.Expr(value=ast.Constant(value=str() as text)) if "None" in text:
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() as value), _:
                pass
            case ast.AnnAssign(annotation=ast.Name("TypeAlias"), target=ast.Name(id=name), value=value), _:
                pass
            case _:
                continue
        if may_be_none(value, set()):
            yield name


def may_be_none(annotation: ast.expr | None, aliases: set[str]) -> bool:
    """Return True for a union with None, a quoted one, and one of these aliases; None alone is no union."""
    match annotation:
        case ast.Constant(value=str() as text):
            return may_be_none(ast.parse(text, mode="eval").body, aliases)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            sides = (left, right)
            return any(ast.unparse(side) == "None" or may_be_none(side, aliases) for side in sides)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in aliases
    return False


def unsaid_errors(files: list[SourceFile]) -> Iterator[Finding]:
    """Yield the product's public functions that raise an error which their docstrings do not name.

    The docstring of an `__init__` without one is that of its class. A function without a docstring has that of a base class.
    """
    for file in product(files).values():
        if not file.name.startswith(COMMANDS):
            for node, text in public_functions(file.tree):
                unsaid = sorted(name for name in set(raised_errors(node.body)) if name not in text)
                if unsaid and not OF_ANOTHER.search(text):
                    yield file.finding(
                        node, f"expected a docstring that says when {node.name} raises {' and '.join(unsaid)}"
                    )


def public_functions(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[Function, str]]:
    """Yield the public functions of a module or a class, and of its public classes, that have a docstring, with it."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)
        elif isinstance(node, Function) and (node.name.endswith("__") or not node.name.startswith("_")):
            text = ast.get_docstring(node)
            if text is None and node.name == "__init__":
                text = ast.get_docstring(tree)
            if text is not None:
                yield node, text


def raised_errors(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names of the errors that statements raise by name, and that no handler around them may catch."""
    for node in body:
        match node:
            case ast.Raise(exc=ast.expr() as error):
                name = ast.unparse(error.func if isinstance(error, ast.Call) else error).split(".")[-1]
                if name[0].isupper() and name not in UNREACHED:
                    yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.Try(body=tried, handlers=handlers, orelse=otherwise, finalbody=last):
                for part in ([] if handlers else tried, *(handler.body for handler in handlers), otherwise, last):
                    yield from raised_errors(part)
            case ast.Match(cases=cases):
                for case in cases:
                    yield from raised_errors(case.body)
            case _:
                yield from raised_errors([*getattr(node, "body", []), *getattr(node, "orelse", [])])


def is_number(value: ast.expr) -> bool:
    """Return True for an expression of numbers alone, and for several of them."""
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.Tuple(elts=elements):
            return all(map(is_number, elements))
    return False


def start(text: str) -> str:
    """Return the first words of a docstring."""
    return " ".join(text.split())[:50]
