"""Detection of tests that look at the changes a function makes to its arguments."""

import ast
import re
import warnings
from functools import lru_cache


@lru_cache(maxsize=1024)
def looks_at_arguments(tests: str, entry_point: str) -> bool:
    """Return True if a statement of the tests is nothing but a call of the function.

    Then only its arguments can tell. The function's names are the entry point's and HumanEval's `candidate`.
    """
    names = {entry_point, "candidate"}
    if not re.search(rf"(?m)(?:^|[;:])[ \t]*(?:{'|'.join(map(re.escape, names))})[ \t]*\(", tests):
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    called_functions = (
        node.value.func for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    return any(isinstance(function, ast.Name) and function.id in names for function in called_functions)
