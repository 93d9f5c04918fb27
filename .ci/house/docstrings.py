"""Checks of the first words of docstrings; ruff checks that there is one, and finds most verbs (D101 to D103, D401)."""

import ast
import re
from collections.abc import Iterator

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


def start(text: str) -> str:
    """Return the first words of a docstring."""
    return " ".join(text.split())[:50]
