"""The number of torch's threads while a check runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread within the block, and with as many as before after it.

    The networks of the checks are so small that more threads only wait for each other, and with one the order of sums, and
    so their rounding, is always the same.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
