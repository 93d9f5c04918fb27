"""The spec of an algorithm of one's own: what is wrong with it is one line that names the key."""

import pytest

from marl_ray.config import AlgorithmSpec, HyperParameters
from marl_ray.errors import MarlRayError


class NeedyHyper(HyperParameters):
    """Hyper-parameters with a key that has no default."""

    shift: float
    """A key of its own."""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"keys": ("bogus",)}, "'bogus' is no field of HyperParameters"),
        (
            {"critic": "local", "constraint": "trust_region", "critic_first": True},
            "critic_first: expected no trust region; with both the gradient steps would train nothing",
        ),
        ({"hyper": NeedyHyper}, "shift: every key needs a default"),
        ({"defaults": {"clip": -1.0}}, "defaults: clip: expected a number greater than 0, got -1.0"),
        ({"defaults": {"clip": 0.3, "clip_high": 0.2}}, "defaults: clip_high=0.2 must not be below clip=0.3"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_in_one_line_that_says_what_is_wrong(keys, message):
    with pytest.raises(MarlRayError) as caught:
        AlgorithmSpec("Mine", "-", **keys)
    assert str(caught.value) == f"AlgorithmSpec 'Mine': {message}"
