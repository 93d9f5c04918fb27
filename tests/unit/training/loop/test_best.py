"""A run keeps the weights of its best score, and of equal scores the earlier ones."""

from hypothesis import given
from hypothesis import strategies as st

from marl_ray.training.loop.run_evaluation import UNKNOWN_SCORE, is_better

SCORES = st.lists(st.integers(-3, 3).map(float) | st.just(UNKNOWN_SCORE), min_size=1)


@given(SCORES)
def test_the_first_of_the_best_scores_wins_and_the_newest_where_nothing_is_scored(scores):
    best = 0
    for number, score in enumerate(scores):
        if number and is_better(score, scores[best]):
            best = number
    highest = max(scores)
    expected = len(scores) - 1 if highest == UNKNOWN_SCORE else scores.index(highest)
    assert best == expected
