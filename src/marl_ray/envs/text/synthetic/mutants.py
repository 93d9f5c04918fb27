"""Mutants of a program: the same program with one token changed."""

import io
import tokenize
from typing import NamedTuple

from marl_ray.envs.text.synthetic.functions import LETTERS


class Mutant(NamedTuple):
    """A program in which one token is another."""

    code: str
    wrong: str
    """The token that it has."""
    right: str
    """The token in its place in the program."""


_SWAPPED_OPERATORS = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "%",
    "%": "//",
    "<": ">",
    ">": "<",
    "<=": ">=",
    ">=": "<=",
    "==": "!=",
    "!=": "==",
}


def mutants(code: str) -> list[Mutant]:
    """Return the programs with one whole number, one operator or one string of a letter changed.

    Code that is not Python has no mutants.
    """
    starts = [0]
    for line in io.StringIO(code):  # splitlines would end a line at \f and \u2028 too, where tokenize does not
        starts.append(starts[-1] + len(line))
    result = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            begin, end = starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
            for wrong in _replacements(token):
                result.append(Mutant(code[:begin] + wrong + code[end:], wrong, token.string))
    except (tokenize.TokenError, SyntaxError):
        return []
    return result


def _replacements(token: tokenize.TokenInfo) -> list[str]:
    """Return the tokens that take the place of a token, one in each mutant."""
    text = token.string
    if token.type == tokenize.OP:
        return [_SWAPPED_OPERATORS[text]] if text in _SWAPPED_OPERATORS else []
    if token.type == tokenize.NUMBER and text.isdecimal():
        return [str(int(text) + step) for step in (1, -1, 2) if int(text) + step >= 0]
    if token.type == tokenize.STRING and len(text) == 3 and text[1].isalpha():
        return [f"{text[0]}{letter}{text[2]}" for letter in LETTERS if letter != text[1]][:2]
    return []
