"""Closing of several parts: all are closed in order, whatever some of them raise."""

import pytest

from marl_ray.closing import close_all


def test_parts_are_closed_in_order_and_the_error_of_one_comes_after_all():
    closed: list[str] = []

    def fail() -> None:
        closed.append("b")
        raise OSError("b cannot be closed")

    with pytest.raises(OSError, match="b cannot be closed"):
        close_all(iter((lambda: closed.append("a"), fail, lambda: closed.append("c"))))
    assert closed == ["a", "b", "c"]


def test_of_several_errors_the_last_is_raised():
    def fail(message: str) -> None:
        raise OSError(message)

    with pytest.raises(OSError, match="second"):
        close_all([lambda: fail("first"), lambda: fail("second")])


def test_nothing_to_close_is_no_error():
    close_all([])
