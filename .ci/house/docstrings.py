"""Checks of docstrings: their first words, the numbers that need one, and when None is returned.

Ruff checks that classes, functions and methods have one, and finds most verbs (D101 to D103, D401).
"""

import ast
import re
from collections.abc import Iterator
from itertools import zip_longest

from sources import Finding, SourceFile

FRAGMENT = re.compile(r"(What|Of|How|Whether|If|Where|When|Which|Who|Whose|Why|As|And|But|\.\.\.)\b")
"""First words of a docstring that is a fragment and no sentence, or that hides its subject."""
NO_VERB = re.compile(
    r"[^A-Z]|(All|Any|Both|Each|Every|One|None|In|At|Within|For|From|With|Without)\b|[A-Z][\w-]*('s|[^\Ws]s|Error)\b"
)
"""First words of a function's docstring that are no verb in the imperative, and that D401 does not know: also plurals."""


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
                case (
                    ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
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
    """Yield the product's functions that may return None, and whose docstrings do not say when."""
    for file in files:
        for node in file.nodes if file.module else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            match node.returns:
                case ast.BinOp(op=ast.BitOr(), right=ast.Constant(value=None)):
                    text = ast.get_docstring(node)
                    if text and "None" not in text and "See " not in text:
                        yield file.finding(node, f"expected a docstring that says when {node.name} returns None")


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
