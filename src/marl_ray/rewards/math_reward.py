"""Rewards for mathematics: extract the final answer from a model's text, and compare it with the right one.

The rule of extraction: the last complete `\\boxed{...}`; else the line after the last "answer is", "answer:" or "####";
else the last number, if the right answer is one; else the last line. Lines are read without Markdown's emphasis. If the
right answer is a number, the line's first sentence may have words around its first number, but no mathematics: `5 apples
in all` is 5, and `2\\pi`, `5 million` and `5 or 6` are not. Nothing that a model writes is evaluated.
"""

import re

from marl_ray.rewards.math_answers import NO_UNIT, NUMBER, TOLERANCE, answers_match, normalize, number, with_plain_signs

MAX_TEXT_LENGTH = 1 << 16
"""Characters of a text that are read, the last ones: the time to read an answer is bounded."""
_MARKER = re.compile(r"(?:answer is|answer *[:=]|####)[ :=]*", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox) ?\{")
_SENTENCE_END = re.compile(r"[.;?](?=\s|$)|!(?=\s*(?:[A-Z]|$))")
_MATHEMATICS = re.compile(r"[=\\^_(\[{<>|\u221a]|\d")
"""A sign before a number by which it is a part of a larger expression."""
_GOES_ON = re.compile(
    rf"\s*(?:[=\\^_}}\])<>|!\u00b1\u03c0\u221a]|[-+*/\u00d7\u00b7,] ?[\d\\(]|(?:or|and) [-\d\\(]|"
    rf"(?!(?:or|and)\b)(?:{NO_UNIT.pattern})\b)",
    re.IGNORECASE,
)
"""The beginning of what follows a number if that changes its value."""
_EMPHASIS = re.compile(r"(?<![\w)\]}*])(?:\*{1,3}|`)(?=[^\s*`])|(?<=[^\s*`])(?:\*{1,3}|`)(?=[\s.,:;!?)]|$)")
"""Markdown's marks around words, as in `**B**`; not the signs of `2*3` and `x**2`."""


def extract_answer(text: str, numeric: bool = True) -> str:
    """Return the final answer in a text, normalised; empty if there is none.

    `numeric` says that the right answer is a number.
    """
    answer, complete = _final(text, numeric)
    return normalize(answer) if complete else answer


def math_reward(text: str, answer: str, tolerance: float = TOLERANCE) -> float:
    """Return 1 if the final answer in the text is the right one, else 0."""
    return float(answers_match(_final(text, number(answer) is not None)[0], answer, tolerance))


def _final(text: str, numeric: bool) -> tuple[str, bool]:
    """Return the final answer as it was written; the flag is False if the answer is a number out of a longer text."""
    text = text[-MAX_TEXT_LENGTH:]
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed, True
    marked = list(_MARKER.finditer(text))
    if marked:
        text = _strip_markdown(text[marked[-1].end() :].strip().partition("\n")[0])
        if not numeric or number(text) is not None:
            return text, True
        return _number_among_words(text)
    if numeric:
        numbers = [match[0] for match in NUMBER.finditer(with_plain_signs(text))]
        return (numbers[-1].strip() if numbers else ""), False
    return _strip_markdown(text.strip().rpartition("\n")[2]), True


def _number_among_words(line: str) -> tuple[str, bool]:
    """Return the first number of a line's first sentence as `_final` does; the sentence, if that is mathematics."""
    line = with_plain_signs(line)
    sentence = _SENTENCE_END.split(line)[0]
    if NUMBER.search(sentence) is None:
        sentence = line
    first = NUMBER.search(sentence)
    if first is None or number(sentence) is not None:
        return sentence, True
    if _MATHEMATICS.search(sentence[: first.start()]) or _GOES_ON.match(sentence[first.end() :]):
        return sentence, True
    return first[0].strip(), False


def _strip_markdown(line: str) -> str:
    """Return a line without Markdown's marks.

    One of them may stand outside: `**Answer: B**` is read after the colon.
    """
    return _EMPHASIS.sub("", line).strip("*` ")


def _last_boxed(text: str) -> str | None:
    """Return the contents of the complete `\\boxed{}` or `\\fbox{}` that begins last; None without one. Braces nest."""
    inside = {match.end() for match in _BOX.finditer(text)}
    open_at: list[int] = []
    best = -1, 0
    for match in re.finditer(r"\\[{}]|[{}]", text):
        if match[0] == "{":
            open_at.append(match.end())
        elif match[0] == "}" and open_at and (begin := open_at.pop()) in inside:
            best = max(best, (begin, match.start()))
    return text[slice(*best)] if best[0] >= 0 else None
