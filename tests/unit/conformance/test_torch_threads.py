"""A check leaves torch's threads as they were: it also runs inside a user's tests."""

from collections.abc import Generator

import pytest
import torch

from marl_ray.conformance.algorithm import check as algorithm_check
from marl_ray.conformance.algorithm.check import check_algorithm
from marl_ray.conformance.algorithm.properties import PROPERTIES
from marl_ray.conformance.extensions import engine


@pytest.fixture(autouse=True)
def _three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_suite_of_an_algorithm_gives_the_threads_back(monkeypatch):
    monkeypatch.setattr(algorithm_check, "PROPERTIES", PROPERTIES[:1])
    assert list(check_algorithm("grpo"))
    assert torch.get_num_threads() == 3


def test_a_check_of_an_engine_that_is_given_up_gives_the_threads_back():
    checked = engine.check("torch", {})
    assert isinstance(checked, Generator)
    assert next(checked).failure is None
    assert torch.get_num_threads() == 1
    checked.close()
    assert torch.get_num_threads() == 3
