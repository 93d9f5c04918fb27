from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.rewards import answers_match, extract_answer, math_reward, number

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
def test_the_answer_in_a_text(text, expected):
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
    ("given", "wanted", "same"),
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
        ("", "", False),
        ("19", "x", False),
    ],
)
def test_when_answers_are_the_same(given, wanted, same):
    assert answers_match(given, wanted) is same


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
    wanted = f"{value:.6f}"
    right = number(wanted)
    if right.denominator == 1:
        return
    assert answers_match(f"{float(right) * (1 + near):.15f}", wanted)
    assert not answers_match(f"{float(right) * (1 + far):.15f}", wanted)


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
