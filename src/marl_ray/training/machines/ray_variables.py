"""The environment variables by which Ray Train takes intervals and deadlines, for which it has no arguments.

What the user has set stays.
"""

import math
import os

from marl_ray.config import RunConfig, engine_spec
from marl_ray.errors import MarlRayError

INTERVAL_VARIABLE = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
"""Variable for the seconds between two looks of Ray Train after its workers."""
SILENCE_VARIABLE = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
"""Variable for the seconds without an answer after which a worker counts as lost; ten minutes where it is not set."""
START_VARIABLE = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
"""Variable for the seconds of one try to get the resources of workers; Ray Train then tries again."""
EXCHANGE_VARIABLE = "RAY_TRAIN_COLLECTIVE_TIMEOUT_S"
"""Variable for the deadline of what workers do together."""

MIN_POLL_S, MAX_POLL_S = 0.25, 2.0
"""Minimum and maximum seconds between two looks of Ray Train after its workers, by which it sees that they ended or died.
The maximum is Ray's own value."""
POLL_WORKER_S = 0.002
"""Seconds for each worker between two looks. A look calls each worker's actor, so looks take a bounded share of a CPU."""
LOST_S = 60.0
"""Seconds without an answer after which a worker counts as lost. A separate thread answers during updates too."""

interval_set_here: str | None = None
"""The interval between looks that this process has set, and may change for its next group; None before."""


def check_variables() -> None:
    """Raise MarlRayError naming the first of the variables that holds no positive number."""
    for variable in (INTERVAL_VARIABLE, SILENCE_VARIABLE, START_VARIABLE, EXCHANGE_VARIABLE):
        _seconds_of(variable)


def poll_often(workers: int) -> None:
    """Let the next TorchTrainer of this process look after its workers every `poll_interval`."""
    global interval_set_here  # noqa: PLW0603  a process has one environment
    if os.environ.get(INTERVAL_VARIABLE) in (None, interval_set_here):
        os.environ[INTERVAL_VARIABLE] = interval_set_here = str(poll_interval(workers))


def poll_interval(workers: int) -> float:
    """Return the seconds between two looks after this many workers."""
    return min(max(MIN_POLL_S, POLL_WORKER_S * workers), MAX_POLL_S)


def give_up_silent_workers() -> None:
    """Let the workers of this process's next TorchTrainer count as lost LOST_S seconds after their last answer."""
    os.environ.setdefault(SILENCE_VARIABLE, str(LOST_S))


def lost_after_s() -> float:
    """Return the seconds without an answer after which a worker of this process's trainers counts as lost."""
    seconds = _seconds_of(SILENCE_VARIABLE)
    return LOST_S if seconds is None else seconds


def exchange_s(config: RunConfig) -> float:
    """Return the most seconds that a worker waits for the others in an exchange.

    The limit is what the user's environment says in EXCHANGE_VARIABLE, or else what is safe where workers' rollouts
    differ in length, and where all wait for engines to start. Raises MarlRayError if the variable holds no number.
    """
    seconds = _seconds_of(EXCHANGE_VARIABLE)
    if seconds is not None:
        return seconds
    models = [policy for policy in config.team.values() if policy.model is not None]
    return 600.0 + max(engine_spec(policy.generation.engine).start_s for policy in models) if models else 300.0


def _seconds_of(variable: str) -> float | None:
    """Return the seconds that a variable holds; None where it is not set. Raises MarlRayError for anything else."""
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise MarlRayError(f"the environment variable {variable}={text!r}: expected a number of seconds above 0")
    return seconds
