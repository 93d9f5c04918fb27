"""One-line functions: their source, and their results."""

from functools import lru_cache
from types import FunctionType

from marl_ray.json_types import JsonObject

ENTRY_POINT = "f"
"""Name of every function."""
LETTERS = "abcde"
"""Letters of all strings in functions and in their arguments."""
ARGUMENT_NUMBERS = range(-9, 50)
"""Numbers that functions are called with: most constants, which are below 20, are far from both ends."""


def write_function(kind: str, body: str) -> str:
    """Return the source of the function that returns `body`; `kind` as in `TaskFamily`."""
    return f"def {ENTRY_POINT}({'x,y' if kind == 'p' else 'x'}):return {body}"


def result_of(code: str, arguments: tuple[object, ...]) -> str | type[Exception]:
    """Return the function's result as Python source, or the type of the exception that it raises."""
    try:
        return repr(_compile_function(code)(*arguments))
    except Exception as error:
        return type(error)


@lru_cache(maxsize=64)
def _compile_function(code: str) -> FunctionType:
    namespace: JsonObject = {}
    exec(code, namespace)  # noqa: S102  code that this package has made
    made: FunctionType = namespace[ENTRY_POINT]
    return made
