"""The environment of programs that start a Ray of their own beside the one that tests share."""

import os

NICENESS = "RAY_worker_niceness"
"""Ray's own spelling. By default its workers let all other processes go first, and starve where tests run side by side."""
OF_A_RUNNING_RAY = ("RAY_", "GLOO_")


def without_ray() -> dict[str, str]:
    """The environment of this process without the variables of a running Ray, but with the niceness of its workers."""
    return {
        name: value for name, value in os.environ.items() if name == NICENESS or not name.startswith(OF_A_RUNNING_RAY)
    }
