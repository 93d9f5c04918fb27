"""The waits between evaluations, by what the last one cost."""

from marl_ray.training.evaluation.schedule import first_wait_steps, next_wait_steps


def test_a_cheap_evaluation_comes_ten_times_in_a_run():
    assert first_wait_steps(1000, 5) == next_wait_steps(1000, 5) == 100


def test_a_dear_one_comes_after_ten_times_the_steps_that_it_played():
    assert first_wait_steps(1000, 30) == next_wait_steps(1000, 30) == 300


def test_the_second_comes_in_the_middle_of_a_run_at_the_latest():
    """A later one may cost less than the first, so it is not left out because of that."""
    assert first_wait_steps(1000, 400) == 500
    assert next_wait_steps(1000, 400) == 4000
