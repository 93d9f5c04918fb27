"""Comparison of a program's output with the expected output, by the rules of CodeContests.

`OutputsMatch` and `ValuesMatch` of google-deepmind/code_contests, execution/tester_sandboxer.cc.
"""

import re

PRECISION = 1e-5
"""Absolute difference below which two numbers are equal: `kDoublePrecision` of CodeContests' tester."""
_MAX_DIGITS = 4096
"""Characters of a token that may be a number: reading millions of digits takes minutes, and no expected output has them."""
_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?inf(?:inity)?")
_NAN = re.compile(rb"[+-]?nan(?:\([a-z0-9_]*\))?")


def outputs_match(output: bytes, expected: bytes) -> bool:
    """Return True if both outputs have as many tokens and these are pairwise equal, as words or as numbers.

    Words are equal case aside; numbers if they differ by less than 1e-5, absolutely. Tokens are parted by space, line
    feed, tab, carriage return and vertical tab. Numbers are compared as doubles, so whole numbers beyond 2**53 may be
    equal to their neighbours. `inf` and `nan` are numbers, and equal to none.
    """
    tokens, expected_tokens = _split_tokens(output), _split_tokens(expected)
    return tokens == expected_tokens or (
        len(tokens) == len(expected_tokens) and all(map(_values_match, tokens, expected_tokens))
    )


def _split_tokens(text: bytes) -> list[bytes]:
    return [token for token in re.split(rb"[ \n\t\r\v]+", text.lower()) if token]


def _values_match(a: bytes, b: bytes) -> bool:
    first, second = _read_number(a), _read_number(b)
    if first is None or second is None:
        return a == b
    return abs(first - second) < PRECISION


def _read_number(token: bytes) -> float | None:
    """Return the number that absl::SimpleAtod reads, or None for other tokens.

    Python's own float() reads more, such as `1_0`.
    """
    if len(token) > _MAX_DIGITS:
        return None
    if _NAN.fullmatch(token):
        return float("nan")
    return float(token) if _NUMBER.fullmatch(token) else None
