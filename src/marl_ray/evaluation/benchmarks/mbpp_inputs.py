"""Conversion of MBPP+ inputs: JSON lacks tuples, sets and complex numbers, so this file restores them.

Conversions are by task number, as in `mbpp_deserialize_inputs` of evalplus 0.3.1 (data/mbpp.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

Inputs = list[Any]


def _tuples(items: Sequence[Any]) -> list[Any]:
    return [tuple(item) for item in items]


def _deep(value: Any) -> Any:
    return tuple(map(_deep, value)) if isinstance(value, list) else value


_EACH: tuple[tuple[Callable[[Inputs], Sequence[Any]], tuple[int, ...]], ...] = (
    (  # every argument is a tuple
        _tuples,
        (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809),
    ),
    (  # every argument is a list of tuples
        lambda given: [_tuples(argument) for argument in given],
        (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780),
    ),
    (lambda given: [_tuples(given[0]), given[1]], (75, 413, 444, 753)),
    (lambda given: [given[0], tuple(given[1])], (106, 750)),
    (lambda given: [[set(item) if isinstance(item, list) and item else {} for item in given[0]]], (115,)),
    (lambda given: (float(given[0]), complex(given[1])), (124,)),
    (lambda given: [tuple(given[0]), given[1]], (250, 405, 446, 617, 720, 763, 808)),
    (lambda given: [complex(given[0])], (252,)),
    (lambda given: [tuple(_tuples(argument)) for argument in given], (259, 401, 445)),  # every one a tuple of tuples
    (lambda given: [tuple(tuple(item) if isinstance(item, list) else item for item in given[0])], (278,)),
    (lambda given: [tuple(given[0]), given[1], given[2]], (307,)),
    (_deep, (580, 615, 791)),
    (lambda given: [{key: tuple(value) for key, value in given[0].items()}, *given[1:]], (722,)),
)
_BY_NUMBER = {number: change for change, numbers in _EACH for number in numbers}


def mbpp_inputs(number: int, inputs: Inputs) -> Inputs:
    """The inputs of a task, converted. Raises TypeError, ValueError, IndexError or AttributeError for inputs of another
    form."""
    change = _BY_NUMBER.get(number)
    return inputs if change is None else [change(given) for given in inputs]
