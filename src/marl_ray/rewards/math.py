"""Rewards for mathematics: the answer in what a model wrote, and when it is the right one.

The rule of extraction: the last complete `\\boxed{...}`; else the line after the last "answer is", "answer:" or "####";
else the last number, where the right answer is one; else the last line. Nothing that a model writes is evaluated.
"""

import re
from fractions import Fraction

LONGEST = 1 << 16
"""Characters of a text that are looked at, from its end."""
TOLERANCE = 1e-6
_MARKER = re.compile(r"(?:answer is|answer *[:=]|####)[ :=]*", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_PLAIN = rf"(?:{_DECIMAL})(?:e[-+]?\d{{1,3}})?"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]}}])[-+])?\$?"
    rf"(?:\\[dt]?frac\{{(?P<over>[-+]?(?:{_PLAIN}))\}}\{{(?P<under>{_PLAIN})\}}"
    rf"|(?<![\w.])(?P<plain>{_PLAIN})(?:/(?P<divisor>{_PLAIN}))?)"
    rf"(?![\w])(?P<percent> ?%)?",
    re.IGNORECASE,
)


def extract_answer(text: str, numeric: bool = True) -> str:
    """The final answer in a text, normalised. `numeric`: the right answer is a number. Empty where there is none."""
    text = text[-LONGEST:]
    boxed = _boxed(text)
    if boxed is not None:
        return normalized(boxed)
    marked = list(_MARKER.finditer(text))
    if marked:
        text = text[marked[-1].end() :].strip().partition("\n")[0]
        if not numeric:
            return normalized(text)
        first = _NUMBER.search(_plain(text))
        return first[0].strip() if first else normalized(text)
    if numeric:
        numbers = [found[0] for found in _NUMBER.finditer(_plain(text))]
        return numbers[-1].strip() if numbers else ""
    return normalized(text.strip().rpartition("\n")[2])


def normalized(answer: str) -> str:
    """An answer without what does not change it: case, spaces, math delimiters, `\\text{}`, a final full stop."""
    answer = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1", _plain(answer))
    answer = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]]|[\s$]|[.]+\s*$", "", answer)
    return answer.casefold()


def number(answer: str) -> Fraction | None:
    """The exact value of an answer that is nothing but a number: `-1,234.5`, `3/4`, `\\frac{3}{4}`, `50%`, `$7`, `1e-3`.

    A percentage is a hundredth of its number. None for everything else.
    """
    found = _NUMBER.fullmatch(normalized(answer)[:1000])
    if found is None:
        return None
    over, under = (found["over"], found["under"]) if found["over"] else (found["plain"], found["divisor"] or "1")
    divisor = _fraction(under)
    if not divisor:
        return None
    value = _fraction(over) / divisor
    return (-value if found["sign"] == "-" else value) / (100 if found["percent"] else 1)


def answers_match(given: str, wanted: str, tolerance: float = TOLERANCE) -> bool:
    """Whether two answers are the same: as numbers, or else as normalised texts.

    A whole number has to be met exactly, any other within `tolerance`, relative to the wanted value.
    """
    value, right = number(given), number(wanted)
    if value is None or right is None:
        return bool(normalized(given)) and normalized(given) == normalized(wanted)
    if right.denominator == 1:
        return value == right
    return abs(value - right) <= Fraction(tolerance) * abs(right)


def math_reward(text: str, answer: str, tolerance: float = TOLERANCE) -> float:
    """1 where the final answer in the text is the right one, else 0."""
    return float(answers_match(extract_answer(text, number(answer) is not None), answer, tolerance))


def _plain(text: str) -> str:
    """One way to write signs that have several; no spaces and no backslashes where LaTeX wants them and a number none."""
    text = text.replace("\u2212", "-").replace("\\%", "%").replace("\\$", "$")
    return text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _boxed(text: str) -> str | None:
    """What is in the complete `\\boxed{}` or `\\fbox{}` that begins last; braces nest."""
    inside = {found.end() for found in _BOX.finditer(text)}
    open_at: list[int] = []
    best = -1, 0
    for found in re.finditer(r"[{}]", text):
        if found[0] == "{":
            open_at.append(found.end())
        elif open_at and (begin := open_at.pop()) in inside:
            best = max(best, (begin, found.start()))
    return text[slice(*best)] if best[0] >= 0 else None
