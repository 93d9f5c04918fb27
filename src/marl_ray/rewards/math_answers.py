r"""Comparison of two answers to a mathematical problem, however they are written. Nothing is evaluated.

Numbers are exact fractions: `1,234.5`, `3/4`, `\frac12`, `2\frac{1}{2}`, `2 1/2`, `50\%`, `1.2\times10^3`, with a unit or
without; units that differ make numbers differ, one that is missing does not. `x=5` is 5 and x=5, not y=5. A letter of a
choice may stand in parentheses and before its text. Tuples and intervals are ordered and keep their brackets; sets, lists
without brackets (`1, 2`, `1 or 2`, `\pm 1`) and unions of intervals are not ordered. All else is text: without case,
spaces, math delimiters and `\text{}`.
"""

import re
from fractions import Fraction

TOLERANCE = 1e-6
"""Largest relative difference of equal numbers that are not whole: it allows 0.333333 for 1/3."""
MAX_ANSWER_LENGTH = 2000
"""Characters of the longest answer that is read as mathematics; longer ones are compared as text alone."""
MAX_ITEMS, MAX_DEPTH = 64, 8
"""Maximum number of items of a collection, and of collections and names (`x =`) around an item: comparing sets takes
quadratic time. What has more of them is compared as text alone."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_PLAIN_NUMBER = rf"(?:{_DECIMAL})(?:e[-+]?\d{{1,3}})?"
NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]}}])[-+] ?)?\$?"
    rf"(?:(?:(?<![\w.])(?P<whole>\d{{1,12}}) ?)?\\[dtc]?frac"
    rf"(?:\{{(?P<over>[-+]?(?:{_PLAIN_NUMBER}))\}}| ?(?P<one>\d))(?:\{{(?P<under>{_PLAIN_NUMBER})\}}| ?(?P<other>\d))"
    rf"|(?<![\w.])(?P<ones>\d{{1,12}}) (?P<part>\d{{1,12}})/(?P<parts>\d{{1,12}})"
    rf"|(?<![\w.])(?P<plain>{_PLAIN_NUMBER})(?:/(?P<divisor>{_PLAIN_NUMBER}))?"
    rf"(?: ?(?:\*|\\times|\\cdot) ?10\^(?:\{{(?P<power>-?\d{{1,3}})\}}|(?P<digit>\d)))?)"
    rf"(?![\w^])(?P<percent> ?%)?",
    re.IGNORECASE,
)
"""A number in a text; the characters around it are no part of a word or of another number."""

_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|rm)\{([^{}]*)\}")
_EMPTY_COMMANDS = re.compile(r"\\(?:left|right|[bB]ig[lr]?|displaystyle|textstyle)(?![a-zA-Z])|\\[()\[\]]|\$")
_BLANK = re.compile(r"(?<!\\)\\(?:[;: ]|q?quad(?![a-zA-Z]))|~|\s+")
_DEGREES = re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degree(?![a-zA-Z])|°)")
_SIGNS = (
    (re.compile(r"\\infty(?![a-zA-Z])|\u221e"), "infinity"),
    (re.compile(r"\\cup(?![a-zA-Z])"), "\u222a"),
    (re.compile(r"\\in(?![a-zA-Z])"), "\u2208"),
    (re.compile(r"\\pm(?![a-zA-Z])"), "\u00b1"),
    (re.compile(r"\\pi(?![a-zA-Z])"), "\u03c0"),
    (re.compile(r"([\^_]) ?\{ ?(\w) ?\}"), r"\1\2"),
    (re.compile(r"\\(?=[{}])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac ?(\d) ?(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac ?(\d) ?(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*\}) ?(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt ?(\w)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=\d) percent(?!\w)", re.IGNORECASE), "%"),
)
_NAME_BEFORE_VALUE = re.compile(
    r"([a-z](?:_?\w|_\{\w+\})?(?: ?\([a-z]\))?|\( ?[a-z](?: ?, ?[a-z]){1,9} ?\)) ?(?:=|\u2208) ?", re.IGNORECASE
)
_CHOICE = re.compile(r"\(([A-Ja-j])\)\.?|([A-J])[.)]?")
_CHOICE_AND_REST = re.compile(r"(?:\(([A-Ja-j])\)|([A-J])(?=[.):]))[.:)]? ?(?P<rest>.*)", re.DOTALL)
_OTHER_CHOICE = re.compile(r"\([A-J]\)|(?:\bor|\band|,|/) ?\(?[A-J]\b")
_UNIT = re.compile(
    r"(?:(square|cubic|sq\.?|cu\.?) )?([a-z]+)\.?(?: ?(?:per|/) ?([a-z]+)\.?)?(?: ?\^ ?\{?([23])\}?)?", re.IGNORECASE
)
_UNIT_ABBREVIATIONS = {
    "mm": "millimeter", "cm": "centimeter", "dm": "decimeter", "m": "meter", "km": "kilometer", "in": "inch",
    "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram",
    "lb": "pound", "lbs": "pound", "oz": "ounce", "ml": "milliliter", "l": "liter", "s": "second", "sec": "second",
    "min": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "n": "newton", "j": "joule", "w": "watt", "v": "volt",
    "k": "kelvin", "c": "celsius", "f": "fahrenheit", "hz": "hertz", "mph": "mile/hour",
    "metre": "meter", "centimetre": "centimeter", "kilometre": "kilometer", "deg": "degree", "usd": "dollar",
    "am": "am", "pm": "pm",
}  # fmt: skip
_PLURAL_IN_ES = re.compile(r"(?:(?<=ch|sh|ss)|(?<=[xz]))(?:es?)?$")
"""The end of a name that takes -es in the plural, and of such a plural."""
_PLURAL_IN_IES = re.compile(r"(?<=[^aeiou])(?:y|ies?)$")
"""The end of a name that takes -ies in the plural, and of such a plural; -ie may be the end of a singular (calorie)."""
_SINGULARS_IN_S = {"atlas", "bias", "bonus", "bus", "campus", "canvas", "circus", "gas", "iris", "lens", "virus"}
"""Names that end in -s and take -es in the plural. No ending tells them: gases are of a gas, but phrases of a phrase."""
NO_UNIT = re.compile(
    r"hundreds?|thousands?|[mb]illions?|trillions?|dozens?|score|pairs?|squared|cubed|factorial|percent|pi|sin|cos|tan|log|"
    r"ln|exp|sqrt|root|times|plus|minus|over|mod|infinity|hal(?:f|ves)|quarters?|\w*(?:thirds?|fourths?|ths?)|or|and|not",
    re.IGNORECASE,
)
"""Words after a number that change its value, or are no unit."""


def with_plain_signs(text: str) -> str:
    """Return a text with one spelling for signs that have several, and without backslashes that only LaTeX needs."""
    text = text.replace("\u2212", "-").replace("\\%", "%").replace("\\$", "$")
    return text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")


def normalize(answer: str) -> str:
    r"""Return an answer without parts that do not change it.

    The removed parts are case, spaces, math delimiters, `\text{}` and a final full stop.
    """
    answer = _TEXT.sub(r"\1", with_plain_signs(answer))
    answer = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]]|[\s$]|[.]+\s*$", "", answer)
    return answer.casefold()


def number(answer: str) -> Fraction | None:
    """Return the exact value of an answer that is a number, perhaps with a unit; None for any other answer.

    Such answers are `-1,234.5`, `\\frac{3}{4}` and `5 cm`. A percentage is a hundredth of its number.
    """
    quantity = _read_quantity(_unify_spelling(answer)) if len(answer) <= MAX_ANSWER_LENGTH else None
    return quantity[0] if quantity else None


def answers_match(answer: str, expected: str, tolerance: float = TOLERANCE) -> bool:
    """Return True if two answers are the same, by the rules above.

    A whole number must match exactly, any other number within `tolerance`, relative to the expected value.
    """
    if max(len(answer), len(expected)) > MAX_ANSWER_LENGTH:
        return bool(normalize(answer)) and normalize(answer) == normalize(expected)
    answer, expected = _unify_spelling(answer), _unify_spelling(expected)
    choice = _CHOICE.fullmatch(expected)
    if choice and (letter := choice[1] or choice[2]):
        return _read_choice(answer) == letter.upper()
    return _are_same(answer, expected, tolerance, 0)


def _unify_spelling(answer: str) -> str:
    """Return an answer in the one spelling that this file reads; single spaces stay, since `2 1/2` is not `21/2`."""
    answer = _EMPTY_COMMANDS.sub("", with_plain_signs(answer))
    answer = _DEGREES.sub(" degree ", answer)
    answer = _BLANK.sub(" ", _TEXT.sub(r" \1 ", answer))
    for sign, replacement in _SIGNS:
        answer = sign.sub(replacement, answer)
    return re.sub(r"(?<=\d) (?=\d{3}(?: \d{3})*(?!\d|/| ?/))", "", answer).strip().rstrip(".").strip()


def _are_same(answer: str, expected: str, tolerance: float, depth: int) -> bool:
    if not answer or not expected or depth > MAX_DEPTH:
        return False
    if _squeeze_spaces(answer) == _squeeze_spaces(expected):
        return True
    left, right = _read_quantity(answer), _read_quantity(expected)
    if left and right:
        return _is_near(left[0], right[0], tolerance) and (not left[1] or not right[1] or left[1] == right[1])
    answer_group = _read_items(answer)
    expected_group = _read_items(expected)
    name, value = _name_and_value(answer) if answer_group is None else ("", answer)
    expected_name, expected_value = _name_and_value(expected) if expected_group is None else ("", expected)
    if name or expected_name:
        return name in ("", expected_name or name) and _are_same(value, expected_value, tolerance, depth + 1)
    if answer_group is None or expected_group is None or answer_group[0] != expected_group[0]:
        return False

    def same(left: str, right: str) -> bool:
        return _are_same(left, right, tolerance, depth + 1)

    bracket, answer_items = answer_group
    expected_items = expected_group[1]
    if bracket in ("(", "[", "()", "[]", "(]", "[)"):
        return len(answer_items) == len(expected_items) and all(map(same, answer_items, expected_items))
    unmatched = list(expected_items)
    for item in answer_items:
        place = next((index for index, other in enumerate(unmatched) if same(item, other)), None)
        if place is None:
            return False
        del unmatched[place]
    return not unmatched


def _squeeze_spaces(text: str) -> str:
    return re.sub(r"(?<!\d) | (?!\d)", "", text).casefold()


def _is_near(value: Fraction, expected: Fraction, tolerance: float) -> bool:
    if expected.denominator == 1:
        return value == expected
    return abs(value - expected) <= Fraction(str(tolerance)) * abs(expected)  # the nearest double of 1e-6 is smaller


def _read_quantity(text: str) -> tuple[Fraction, str] | None:
    """Return the value and unit ("" without one) of a text that is one number; None for any other text."""
    match = NUMBER.match(text)
    value = None if match is None else _compute_value(match)
    if match is None or value is None:
        return None
    suffix = text[match.end() :].strip()
    unit = _read_unit(suffix) if suffix else ""
    return None if unit is None else (value, unit)


def _compute_value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a number; None if it divides by zero, or if a mixed number's part is no fraction below 1."""
    integer = match["whole"] or match["ones"]
    over = match["over"] or match["one"] or match["part"] or match["plain"]
    under = match["under"] or match["other"] or match["parts"] or match["divisor"] or "1"
    divisor = _read_fraction(under)
    if not divisor:
        return None
    value = _read_fraction(over) / divisor
    if integer:
        if not 0 < value < 1:
            return None
        value += int(integer)
    power = match["power"] or match["digit"]
    value *= Fraction(10) ** int(power) if power else 1
    return (-value if (match["sign"] or "").startswith("-") else value) / (100 if match["percent"] else 1)


def _read_fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _read_unit(text: str) -> str | None:
    """Return the canonical name of a unit; None if the text is no unit.

    Single letters are units only if they are known ones.
    """
    match = _UNIT.fullmatch(text)
    if match is None or any(word and NO_UNIT.fullmatch(word) for word in (match[2], match[3])):
        return None
    names = [_UNIT_ABBREVIATIONS.get(word.lower(), word.lower()) for word in (match[2], match[3]) if word]
    if any(len(name) < 3 and name not in _UNIT_ABBREVIATIONS for name in names):
        return None
    power = match[4] or {"s": "2", "c": "3"}.get((match[1] or "")[:1].lower(), "")
    return "/".join(map(_stem, names)) + power


def _stem(name: str) -> str:
    """Return what the singular and the regular plural of a unit's name have in common.

    Before -es a singular may end in -e (caches of a cache) or not (batches of a batch), so the -e goes from all of them.
    Plurals that change the word (leaves of a leaf, potatoes of a potato, axes of an axis) are names of their own.
    """
    singular = re.sub("es?$", "", name)
    if singular in _SINGULARS_IN_S:
        return singular
    for ending, replacement in ((_PLURAL_IN_ES, ""), (_PLURAL_IN_IES, "y")):
        stem, endings = ending.subn(replacement, name)
        if endings:
            return stem
    return name.removesuffix("s")


def _name_and_value(text: str) -> tuple[str, str]:
    """Return the name and value of `x = 5`, `f(x) = 5` and `x \\in S`.

    The value of a chain such as `x = 2 + 3 = 5` is the last one. Any other text is a value with an empty name.
    """
    match = _NAME_BEFORE_VALUE.match(text)
    if match is None:
        return "", text
    return match[1].replace(" ", "").casefold(), text[match.end() :].rpartition("=")[2].strip()


def _read_items(text: str) -> tuple[str, list[str]] | None:
    """Return the kind and items of a collection of at most `MAX_ITEMS` items; None for any other text.

    The kind is `{` for a set or list, the brackets for a tuple or interval, and `\u222a` for a union.
    """
    for mark in ("\u222a", ","):
        parts = _split_outside_brackets(text, mark)
        if parts is None:
            return None
        if len(parts) > 1:
            return ("{" if mark == "," else mark), parts
    words = re.split(r" (?:or|and) ", text)
    if len(words) > MAX_ITEMS:
        return None
    if len(words) > 1:
        return "{", words
    if text.startswith("\u00b1") and len(text) > 1:
        return "{", [text[1:].strip(), f"-{text[1:].strip()}"]
    if len(text) < 3 or text[0] not in "([{" or text[-1] not in ")]}":
        return None
    inside = _split_outside_brackets(text[1:-1].strip(), ",")
    if inside is None or (text[0] == "{") != (text[-1] == "}") or (len(inside) < 2 and text[0] != "{"):
        return None
    return ("{" if text[0] == "{" else text[0] + text[-1]), inside


def _split_outside_brackets(text: str, mark: str) -> list[str] | None:
    """Return the parts between marks that are in no bracket.

    Returns None if there are more than `MAX_ITEMS`, or if brackets do not close.
    """
    depth = begin = 0
    parts: list[str] = []
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == mark and depth == 0:
            if len(parts) == MAX_ITEMS - 1:
                return None  # the mark has an item before it and one behind it
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].removeprefix(" and ").removeprefix(" or ").strip()] if depth == 0 else None


def _read_choice(answer: str) -> str:
    """Return the letter of the choice that an answer begins with; empty if there is none, or a second one."""
    alone = _CHOICE.fullmatch(answer) or re.fullmatch(r"(?:(?:option|choice) )?\(?([A-J])\)?()", answer, re.IGNORECASE)
    if alone:
        return (alone[1] or alone[2]).upper()
    match = _CHOICE_AND_REST.fullmatch(answer)
    if match is None or _OTHER_CHOICE.search(match["rest"]):
        return ""
    return (match[1] or match[2]).upper()
