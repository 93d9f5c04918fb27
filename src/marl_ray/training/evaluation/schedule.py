"""The waits between a run's evaluations where `evaluation.every` does not give them, in environment steps."""

EVALUATIONS = 10
"""Number of evaluations between a run's first and its last. `evaluation.every` overrides it, and TRAINED_PER_EVALUATED
allows fewer."""
MIN_TRAINED_PER_EVALUATED = 10
"""Minimum number of training steps for each step of an evaluation. Playing takes a third to a half of an iteration, so
evaluations take a few percent of a long run's time."""


def first_wait_steps(remaining: int, cost: int) -> float:
    """Return the wait after the evaluation before training, in steps.

    The evaluation played `cost` steps; `remaining` steps are to be trained. Episodes may become shorter as the team
    learns, and evaluations cheaper, so the wait is at most half of the run.
    """
    return max(remaining / EVALUATIONS, min(MIN_TRAINED_PER_EVALUATED * cost, remaining / 2))


def next_wait_steps(total: int, cost: int) -> float:
    """Return the wait after a later evaluation, which played `cost` steps, of a run of `total` steps."""
    return max(MIN_TRAINED_PER_EVALUATED * cost, total / EVALUATIONS)
