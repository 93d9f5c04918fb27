"""A marked line has words around its number, or mathematics of which the number is a part."""

import pytest

from marl_ray.rewards import math_reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5. Check: 2+3=5.", "5"),
        ("The answer is 5! Great", "5"),
        ("The answer is 5 (because 2+3=5).", "5"),
        ("the answer is 5, because I say so", "5"),
        ("The answer is 5 - that is it", "5"),
        ("Answer: 5 and I am sure", "5"),
        ("The answer is approx. 5", "5"),
        ("The answer is 3.5.", "7/2"),
        ("The answer is therefore 12 apples in all.", "12"),
        ("The answer is 18 dollars per day.", "18"),
        ("The answer is 7 days from now, i.e. 14 shifts", "7"),
        ("The answer is $\\frac{1}{2}$ of it", "1/2"),
        ("The answer is x = 2 + 3 = 5", "5"),
        ("The answer is f(2) = 7", "f(2) = 7"),
        ("#### 1,234", "1234"),
    ],
)
def test_words_around_a_number_do_not_change_it(text, answer):
    assert math_reward(text, answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is \\sqrt{4}", "4"),
        ("The answer is 2\\pi.", "2"),
        ("answer is 5 million", "5"),
        ("The answer is 5 or 6", "5"),
        ("The answer is 5, 6", "5"),
        ("The answer is between 3 and 5", "3"),
        ("The answer is (3, 4)", "3"),
        ("The answer is 2^3", "3"),
        ("The answer is 2^3", "2"),
        ("The answer is f(2) = 7", "2"),
        ("The answer is 4*5 = 20", "4"),
        ("The answer is 10 times 3", "10"),
        ("answer: 5 - 3", "5"),
        ("answer: 5! = 120", "5"),
    ],
)
def test_a_part_of_an_expression_is_no_answer(text, answer):
    assert math_reward(text, answer) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"), [("0.333333", "1/3"), ("0.142857", "1/7"), ("3.33333", "10/3"), ("0.666667", "2/3")]
)
def test_six_digits_are_within_the_tolerance(text, answer):
    assert math_reward(f"#### {text}", answer) == 1.0
    assert math_reward(f"#### {text[:-1]}", answer) == 0.0
