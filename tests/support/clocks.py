"""A clock whose time passes when a test says so."""


class Clock:
    """A clock in seconds; it takes the place of `time.monotonic` or `time.time`."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
