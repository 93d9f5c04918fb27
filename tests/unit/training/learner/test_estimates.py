"""Cost advantages are centred over all workers' decisions, and divided by the spread where that is asked for."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.algorithms.advantages.normalization import moments
from marl_ray.training.learner.preparation.estimates import center_costs


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 3), st.booleans())
def test_costs_are_centred_and_scaled_as_a_slow_reference_has_them(seed, signals, scale):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(6, 4, signals, generator=generator) * 3 + 1
    mask = torch.rand(6, 4, generator=generator) < 0.7
    mask[0, 0] = mask[3, 1] = True
    sums = torch.stack([moments(raw[..., signal], mask) for signal in range(signals)])
    centred, divisors = center_costs(raw, mask, sums, scale)
    for signal in range(signals):
        values = raw[..., signal].double().numpy()
        decided = values[mask.numpy()]
        divisor = decided.std() if scale else 1.0
        np.testing.assert_allclose(divisors[signal], divisor, rtol=1e-5)
        expected = np.where(mask.numpy(), (values - decided.mean()) / divisor, 0.0)
        np.testing.assert_allclose(centred[..., signal], expected, atol=1e-5)


def test_equal_costs_are_0_and_divided_by_nothing():
    raw, mask = torch.full((3, 2, 1), 5.0), torch.ones(3, 2, dtype=torch.bool)
    centred, divisors = center_costs(raw, mask, moments(raw[..., 0], mask)[None], scale=True)
    assert not centred.any() and divisors.tolist() == [1.0]


def test_without_signals_there_is_nothing_to_centre():
    centred, divisors = center_costs(torch.zeros(3, 2, 0), torch.ones(3, 2, dtype=torch.bool), torch.zeros(0, 3), True)
    assert centred.shape == (3, 2, 0) and divisors.shape == (0,)
