"""The answer in a text, and when two ways to write a number are the same."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.rewards import answers_match, extract_answer, math_reward, number
from marl_ray.rewards.math_answers import MAX_DEPTH, MAX_ITEMS

DIGITS = st.integers(-(10**12), 10**12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("19", "19"),
        ("It is 7 + 12 = 19.", "19"),
        ("First 3, then 4.", "4"),
        ("The answer is 5. Check: 2 + 3 = 5, 9 - 4 = 5, 6", "5"),
        ("Answer: 12\nI am sure, 100%", "12"),
        ("a lot of text\n#### 1,234", "1,234"),
        ("so \\boxed{\\frac{1}{2}} and not 3", "\\frac{1}{2}"),
        ("\\boxed{1} or rather \\boxed{2}", "2"),
        ("\\boxed{1} and then \\boxed{2", "1"),
        ("answer is 4, no: \\fbox{5}", "5"),
        ("5-3", "3"),
        ("x = -3", "-3"),
        ("$-1,234.50", "-$1,234.50"),
        ("about 50% of them", "50%"),
        ("3/4 of it", "3/4"),
        ("no number", ""),
        ("", ""),
        ("x1 and 2y", ""),
    ],
)
def test_the_answer_is_extracted_from_a_text(text, expected):
    assert number(extract_answer(text)) == number(expected)
    assert bool(extract_answer(text)) == bool(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Some words.\nThe answer is $x + 1$.", "x+1"),
        ("Some words.\n\\text{Monday}", "monday"),
        ("\\boxed{\\left( 3, 4 \\right)}", "(3,4)"),
        ("Answer: B", "b"),
    ],
)
def test_an_answer_that_is_no_number(text, expected):
    assert extract_answer(text, numeric=False) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", Fraction(12345, 10)),
        ("-3/4", Fraction(-3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\dfrac{-3}{4}", Fraction(3, 4)),
        ("12.5%", Fraction(1, 8)),
        ("50\\%", Fraction(1, 2)),
        ("$7", 7),
        ("$-7$", -7),
        ("1{,}000", 1000),
        ("\u22125", -5),
        ("2e3", 2000),
        (".5", Fraction(1, 2)),
        (" 4 . ", 4),
        ("+4", 4),
        ("1/0", None),
        ("1,23", None),
        ("1_000", None),
        ("12a", None),
        ("nan", None),
        ("1e999999999", None),
        ("9" * 401, None),
        ("", None),
    ],
)
def test_what_a_number_is(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("0.5", "1/2", True),
        ("50%", "0.5", True),
        ("50%", "50", False),
        ("1000000001", "1000000000", False),
        ("0.3333333", "1/3", True),
        ("0.333", "1/3", False),
        ("19.0", "19", True),
        ("X + 1", "x+1", True),
        ("x+1", "1+x", False),
        ("4 batches", "4 batch", True),
        ("2 classes", "2 class", True),
        ("3 boxes", "3 box", True),
        ("3 caches", "3 cache", True),
        ("2 sq inches", "2 in^2", True),
        ("5 slices", "5 slice", True),
        ("5 dollars", "5 dollar", True),
        ("3 gases", "3 gas", True),
        ("2 lenses", "2 lens", True),
        ("3 phrases", "3 phrase", True),
        ("2 cities", "2 city", True),
        ("100 calories", "100 calorie", True),
        ("4 days", "4 day", True),
        ("3 lapses", "3 laps", False),
        ("2 skies", "2 skis", False),
        ("4 len", "4 lens", False),
        ("4 batches", "4 bats", False),
        ("4 dishes", "4 disc", False),
        ("2 classes", "2 classics", False),
        ("", "", False),
        ("19", "x", False),
    ],
)
def test_when_answers_are_the_same(answer, expected, same):
    assert answers_match(answer, expected) is same


def numbers(count: int, mark: str) -> str:
    return mark.join(map(str, range(count)))


@pytest.mark.parametrize(
    ("form", "mark"),
    [("({})", ", "), ("[{})", ", "), ("\\{{{}\\}}", ", "), ("{}", ", "), ("{}", " or "), ("{}", "\\cup ")],
)
def test_collections_have_64_items_at_most(form, mark):
    def same(count: int) -> bool:
        written = form.format(numbers(count, mark))
        return answers_match(written.replace("1", "1.0", 1), written)

    assert MAX_ITEMS == 64 and same(64) and not same(65)


@pytest.mark.parametrize(("prefix", "depth"), [("", MAX_DEPTH), ("x = ", MAX_DEPTH - 1)])
def test_8_collections_and_names_may_be_around_an_item(prefix, depth):
    def same(count: int) -> bool:
        return answers_match(f"{prefix}{'(1, ' * count}2{')' * count}", f"{prefix}{'(1, ' * count}2.0{')' * count}")

    assert MAX_DEPTH == 8 and same(depth) and not same(depth + 1)


@given(DIGITS)
def test_a_whole_number_is_read_however_it_is_written(value):
    ways = [
        f"{value}",
        f"{value:,}",
        f"${value}$",
        f"{value}.0",
        f"{value * 100}%",
        f"{value * 3}/3",
        f"\\text{{{value}}}",
    ]
    assert {number(way) for way in ways} == {Fraction(value)}
    for way in ways:
        sentences = [f"We find {way}", f"The answer is {way}.\nIs it 3?", f"4 so \\boxed{{{way}}}", f"#### {way}"]
        assert [math_reward(text, str(value)) for text in sentences] == [1.0] * 4
        assert math_reward(f"We find {way}", str(value + 1)) == 0.0


@given(st.floats(-1e9, 1e9).filter(lambda x: abs(x) > 1e-3), st.floats(0, 9e-7), st.floats(2e-6, 1))
def test_other_numbers_are_met_within_the_tolerance(value, near, far):
    expected = f"{value:.6f}"
    right = number(expected)
    if right.denominator == 1:
        return
    assert answers_match(f"{float(right) * (1 + near):.15f}", expected)
    assert not answers_match(f"{float(right) * (1 + far):.15f}", expected)


@given(st.fractions(), st.fractions())
def test_fractions_are_compared_exactly_where_both_are_whole_else_nearly(a, b):
    same = answers_match(str(a), str(b))
    assert same == (a == b if b.denominator == 1 else abs(a - b) <= Fraction(1e-6) * abs(b))


@given(st.text(alphabet="0123456789.,/%$-+e{}\\boxedfrac answris#:\n", max_size=200), st.text(max_size=20))
def test_any_text_has_a_reward(text, answer):
    assert math_reward(text, answer) in (0.0, 1.0)


@pytest.mark.parametrize(
    "text", ["1," * 100_000, "9" * 1_000_000, "\\boxed{" * 30_000, "1/" * 100_000, "-" * 1_000_000]
)
def test_hostile_texts_are_read_quickly(text):
    assert math_reward(text, "12345") == 0.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("x=5", "5"),
        ("x = 5", "x=5"),
        ("5", "x=5"),
        ("f(x) = 2x+1", "2x + 1"),
        ("x = 2 + 3 = 5", "5"),
        ("x \\in [1, 2)", "[1,2)"),
        ("\\frac12", "1/2"),
        ("\\dfrac12", "\\frac{1}{2}"),
        ("\\tfrac{1}2", "0.5"),
        ("\\frac1{2}", "\\frac 12"),
        ("-\\frac34", "-0.75"),
        ("\\frac{\\sqrt3}{2}", "\\dfrac{\\sqrt{3}}{2}"),
        ("90^\\circ", "90"),
        ("90", "90^{\\circ}"),
        ("90°", "90 degrees"),
        ("5 cm", "5"),
        ("5\\text{ cm}", "5 centimeters"),
        ("5\\,\\mathrm{cm}", "5"),
        ("12\\text{ cm}^2", "12 square centimeters"),
        ("12 cm^2", "12"),
        ("60 miles per hour", "60 mph"),
        ("3 apples", "3"),
        ("\\$5", "5 dollars"),
        ("\\text{(B)}", "B"),
        ("(B)", "B"),
        ("B", "(B)"),
        ("B.", "\\text{B}"),
        ("(B) 12", "B"),
        ("B: the second", "(b)"),
        ("\\textbf{(C)}\\ 7", "C"),
        ("50\\%", "1/2"),
        ("50 percent", "0.5"),
        ("12,345", "12345"),
        ("12\\,345", "12345"),
        ("12 345", "12345"),
        ("2\\frac{1}{2}", "5/2"),
        ("2 1/2", "2.5"),
        ("-2\\frac12", "-2.5"),
        ("1.5\\times10^{3}", "1500"),
        ("2 \\cdot 10^3", "2000"),
        ("(1, 2)", "\\left(1,2\\right)"),
        ("(0.5, 2)", "(\\frac12, 2)"),
        ("\\{1, 2\\}", "{2,1}"),
        ("1, 2", "2,1"),
        ("1 and 2", "2, 1"),
        ("x = 1 or x = 2", "1,2"),
        ("x=1, y=2", "y=2, x=1"),
        ("1, 2, and 3", "\\{3,2,1\\}"),
        ("\\pm 2", "2,-2"),
        ("(-\\infty, 2) \\cup (3, \\infty)", "(3,\\infty)\\cup(-\\infty,2)"),
        ("[0.5, 1)", "[1/2,1)"),
        ("(1,(2,3))", "(1, (2, 3))"),
        ("(x, y) = (1, 2)", "(1,2)"),
        ("x^{2}+1", "x^2 + 1"),
        ("a_{n}", "a_n"),
        ("2\u03c0", "2\\pi"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ],
)
def test_ways_to_write_the_same_answer(answer, expected):
    assert answers_match(answer, expected)
    assert math_reward(f"5 is wrong. So \\boxed{{7}}, no: \\boxed{{{answer}}}", expected) == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("15", "5"),
        ("5", "15"),
        ("x=5", "y=5"),
        ("x=5", "x=15"),
        ("x=5", "x+5"),
        ("2x=5", "5"),
        ("5x", "5"),
        ("5i", "5"),
        ("5\\mathrm{i}", "5"),
        ("5 m", "5 cm"),
        ("5\\text{ cm}", "5\\text{ cm}^2"),
        ("5 million", "5"),
        ("5 thirds", "5"),
        ("5 halves", "5"),
        ("5 or 7", "5"),
        ("5, 7", "5"),
        ("5", "5, 7"),
        ("5!", "5"),
        ("5^2", "5"),
        ("\\sqrt{5}", "5"),
        ("2 1/2", "21/2"),
        ("21/2", "2\\frac12"),
        ("2 3/2", "7/2"),
        ("It is 2 1/2", "1/2"),
        ("3 4", "34"),
        ("1 23", "123"),
        ("1, 2", "(1, 2)"),
        ("(2, 1)", "(1, 2)"),
        ("(1, 2)", "[1, 2]"),
        ("(1, 2]", "(1, 2)"),
        ("(1, 2, 3)", "(1, 2)"),
        ("{1, 2, 3}", "{1, 2}"),
        ("{1}", "1"),
        ("x=1, y=2", "x=2, y=1"),
        ("(B) or (C)", "B"),
        ("(B), (C)", "B"),
        ("A, B", "B"),
        ("C", "B"),
        ("Both", "B"),
        ("90^\\circ", "9"),
        ("50\\%", "50"),
        ("1.5\\times10^{3}", "1.5"),
        ("1.5\\times10^{3}", "150"),
        ("\\pm 2", "2"),
        ("(-\\infty, 2) \\cup (3, \\infty)", "(-\\infty,2)\\cup(4,\\infty)"),
        ("\\frac{1}{23}", "\\frac123"),
        ("(x, y) = (1, 2)", "(y, x) = (1, 2)"),
        ("x^{12}", "x^12"),
        ("x**2", "x2"),
        ("", "5"),
        ("__import__('os')", "5"),
    ],
)
def test_answers_that_are_not_the_same(answer, expected):
    assert not answers_match(answer, expected)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("The answer is 2 1/2.", "5/2", 1.0),
        ("The answer is x = 5 cm.", "5", 1.0),
        ("The answer is (B).", "B", 1.0),
        ("It takes 2 1/2 hours", "5/2", 1.0),
        ("It takes 2 1/2 hours", "1/2", 0.0),
        ("\\boxed{\\{1,\\,2\\}}", "{1,2}", 1.0),
        ("\\boxed{\\text{(B)}} since \\boxed{", "B", 1.0),
        ("\\boxed{5} or \\boxed{\\frac{\\frac12}{2}}", "5", 0.0),
        ("\\boxed {5}", "5", 1.0),
        ("The answer is **B**.", "B", 1.0),
        ("**Answer: B**", "B", 1.0),
        ("**Answer:** yes", "Yes", 1.0),
        ("So the day is\n\n**Monday**", "Monday", 1.0),
        ("The answer is `x**2`.", "x**2", 1.0),
        ("The answer is **-7**", "-7", 1.0),
        ("The answer is **B** or **C**", "B", 0.0),
    ],
)
def test_the_final_answer_of_a_text_is_paid(text, answer, reward):
    assert math_reward(text, answer) == reward


LATEX = [
    "\\frac",
    "{",
    "}",
    "1",
    "2",
    ",",
    " ",
    "(",
    ")",
    "[",
    "]",
    "x",
    "=",
    "\\text{",
    "\\pm",
    "\\cup",
    "or",
    "B",
    "^",
    "%",
]


@given(
    st.lists(st.sampled_from(LATEX), max_size=14).map("".join),
    st.lists(st.sampled_from(LATEX), max_size=14).map("".join),
)
def test_any_two_answers_are_compared_and_each_is_itself(first, other):
    assert "B" in first + other or answers_match(first, other) is answers_match(other, first)
    assert answers_match(first, first) or not any(character.isdigit() for character in first)


@pytest.mark.parametrize(
    "piece", ["(", "1,", "\\frac1", "x=", " or ", "\\text{", "{1", "1 ", "\u00b1", "\\cup ", "(1,", "-", "1 1/"]
)
@pytest.mark.parametrize("length", [1990, 1 << 20])
def test_long_answers_are_compared_quickly(piece, length):
    text = piece * (length // len(piece))
    begin = time.process_time()
    answers_match(text, text + " 1")
    math_reward(f"\\boxed{{{text}}}", "1, 2")
    assert time.process_time() - begin < 20.0  # some hundredths, where a quadratic comparison takes minutes
