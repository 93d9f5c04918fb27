"""Algorithms as pure functions on tensors.

A named algorithm has a file of its own in the folder of its kind: `with_critic`, `without_critic`, `constrained` or
`from_preferences`. The mathematics that several share is in `advantages`, `losses` and `constraints`.
"""

from marl_ray.algorithms.definition import Algorithm, PolicyLoss, PolicyLossInputs
from marl_ray.algorithms.losses.critics import ValueLossInputs
from marl_ray.config import spec_of
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ALGORITHM


def algorithm_of(name: str) -> Algorithm:
    """Return the algorithm of a name.

    The name is a built-in's, that of an installed package, or `package.module:NAME`. Raises MarlRayError if there is
    none.
    """
    spec_of(name)
    algorithm = ALGORITHM.load(name)
    if not isinstance(algorithm, Algorithm):
        raise MarlRayError(f"{name}: expected an Algorithm of marl_ray.algorithms, got {type(algorithm).__name__}")
    return algorithm


__all__ = ["Algorithm", "PolicyLoss", "PolicyLossInputs", "ValueLossInputs", "algorithm_of"]
