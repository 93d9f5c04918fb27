"""Compares a program's outputs with its reference's, as EvalPlus does.

This text also runs inside the sandbox. `outputs` runs beside the reference, `check` beside the judge (hardened mode) or
the program itself (official mode). Standard library only. The rules of comparison are those of evalplus 0.3.1,
eval/__init__.py and eval/_special_oracle.py.
"""

import contextlib
import copy
import io
import json
import math
import signal
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

COMPARED_AS_SETS = {
    "similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum", "intersection_array",
    "find_dissimilar", "Diff",
}  # fmt: skip
"""Functions of MBPP+ whose outputs are compared as sets."""
COMPARED_WITH_NONE = {"check_str", "text_match_three", "text_starta_endb"}
"""Functions of MBPP+ for which only the existence of an output counts."""
RTOL, FLOAT_ATOL = 1e-7, 1e-6
"""Relative tolerance of all numbers, and the absolute one of floats where the file has none, as in evalplus 0.3.1."""
_PLAIN_TYPES = {bool, str, float, type(None)}


class TimeLimitError(Exception):
    """A call took longer than it may."""


def outputs(program: str, name: str, inputs: str, not_none: bool) -> tuple[str, list[float]]:
    """Return the reference's output for each input, and the CPU seconds each took.

    Inputs and outputs are encoded by `dumps`.
    """
    names: dict[str, Any] = {}
    results, seconds = [], []
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program, "<reference>", "exec", dont_inherit=True), names)
        for arguments in loads(inputs):
            begin = time.process_time()
            results.append(names[name](*arguments))
            seconds.append(time.process_time() - begin)
    return dumps([output is not None for output in results] if not_none else results), seconds


def load(program: str, name: str) -> Any:
    """Return the function of a program in the interpreter that also checks it, for the official mode alone."""
    import builtins

    # EvalPlus takes this away beside what HumanEval's guard does.
    builtins.open = None  # type: ignore[assignment]
    names: dict[str, Any] = {}
    exec(program, names)
    return names[name]


def check(
    function: Callable[..., Any],
    name: str,
    part: str,
    inputs: str,
    expected: str,
    atol: float,
    seconds: Sequence[float],
    clock: int = signal.ITIMER_REAL,
) -> None:
    """Call the function with every input, each within its seconds.

    Raises AssertionError naming the first output that is wrong. Inputs and expected outputs are lists encoded by
    `dumps`. `clock` is the timer that measures the seconds. An output that is not exactly the expected one may be near:
    `atol` bounds the difference; it is 1e-6 where `atol` is 0 and floats are expected, and then for all later inputs
    too, as in evalplus.
    """
    for number, (arguments, expected_output, limit) in enumerate(
        zip(loads(inputs), loads(expected), seconds, strict=True), 1
    ):
        where = f"{part} input {number} of {len(seconds)}"
        original = copy.deepcopy(arguments)  # what the function does to its arguments changes no oracle
        try:
            with time_limit(limit, clock):  # an output may be an iterator, which computes when it is compared
                output = function(*arguments)
                if name == "find_zero":
                    right = abs(_polynomial(original[0], output)) <= atol
                else:
                    right = same(name, original, output, expected_output, atol)
        except TimeLimitError:
            raise AssertionError(f"{where}: took over {limit:g} s") from None
        if name != "find_zero":
            if atol == 0 and _is_of_floats(expected_output):
                atol = FLOAT_ATOL
            if not right and atol != 0:
                right = type(output) is type(expected_output) and is_near(output, expected_output, atol)
        if not right:
            raise AssertionError(where)


def same(name: str, arguments: Sequence[Any], output: Any, expected: Any, atol: float) -> bool:
    """Return True if an output is the expected one, or one that the function's oracle allows."""
    exact = output == expected
    if name == "are_equivalent":  # Mbpp/164: the task has no agreed answer
        return True
    if name == "sum_div":  # Mbpp/295: 0 is right too
        return bool(exact or output == 0)
    if name == "surface_Area":  # Mbpp/581: the height may be that of the pyramid
        return bool(exact or abs(output - _surface_area(*arguments)) <= atol)
    if name == "digit_distance_nums":  # Mbpp/558: numbers may be filled up with zeros
        return bool(exact or output == _digit_distance(*arguments))
    if name in COMPARED_AS_SETS:
        return set(output) == set(expected)
    if name in COMPARED_WITH_NONE:
        return bool(output == expected if isinstance(output, bool) else expected == (output is not None))
    return bool(exact)


def is_near(output: Any, want: Any, atol: float) -> bool:
    """Return True if numbers, or lists of them of the same shape, differ by at most atol + 1e-7 |want|.

    Nothing is broadcast.
    """
    if isinstance(want, (list, tuple)):
        return (
            isinstance(output, (list, tuple))
            and len(output) == len(want)
            and all(is_near(item, expected, atol) for item, expected in zip(output, want, strict=True))
        )
    numbers = (int, float, complex)
    if not (isinstance(output, numbers) and isinstance(want, numbers)):
        return False
    if output == want:
        return True
    bound = atol + RTOL * abs(want)  # without end where the wanted number is, and to that only itself is near
    return bool(math.isfinite(bound) and abs(output - want) <= bound)


@contextlib.contextmanager
def time_limit(seconds: float, clock: int = signal.ITIMER_REAL) -> Iterator[None]:
    """Raise TimeLimitError inside the block after `seconds` seconds.

    A timer that was running before continues afterwards.
    """

    def late(signum: int, frame: object) -> None:
        raise TimeLimitError

    number, now = (
        (signal.SIGALRM, time.monotonic) if clock == signal.ITIMER_REAL else (signal.SIGPROF, time.process_time)
    )
    outer_s, _ = signal.getitimer(clock)
    before = signal.signal(number, late)
    begin = now()
    signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        signal.setitimer(clock, 0)
        signal.signal(number, before)
        if outer_s:
            signal.setitimer(clock, max(outer_s - (now() - begin), 1e-3))


def dumps(value: Any) -> str:
    """Encode a value as JSON; an object with one key stands for a type that JSON lacks.

    Raises TypeError for types not built in.
    """
    return json.dumps(_tag_types(value), separators=(",", ":"))


def loads(text: str) -> Any:
    """Return the value that `dumps` has encoded.

    A Counter, OrderedDict or defaultdict becomes a plain dictionary, which is equal to it.
    """
    return json.loads(
        text, object_hook=lambda tagged: next(_VALUE_MAKERS[tag](inside) for tag, inside in tagged.items())
    )


_VALUE_MAKERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}


def _tag_types(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}  # long decimals are not read
    if kind in (list, tuple, set, frozenset):
        items = list(value) if _PLAIN_TYPES.issuperset(map(type, value)) else [_tag_types(item) for item in value]
        return items if kind is list else {kind.__name__: items}
    if kind in (dict, Counter, OrderedDict, defaultdict):
        return {"dict": [[_tag_types(key), _tag_types(item)] for key, item in value.items()]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    raise TypeError(f"an output of type {kind.__name__}")


def _is_of_floats(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _polynomial(coefficients: Sequence[float], x: float) -> float:
    return sum(coefficient * math.pow(x, power) for power, coefficient in enumerate(coefficients))


def _surface_area(edge: float, height: float) -> int:
    return round(edge**2 + 2 * edge * math.sqrt((edge / 2) ** 2 + height**2))


def _digit_distance(first: int, second: int) -> int:
    left, right = str(first), str(second)
    width = max(len(left), len(right))
    return sum(abs(int(a) - int(b)) for a, b in zip(left.zfill(width), right.zfill(width), strict=True))
