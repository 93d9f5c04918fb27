"""The types that both families of policies return: the outputs of a pass, and a learner's models."""

from typing import Any, NamedTuple

from torch import Tensor


class Outputs(NamedTuple):
    """The outputs of the current weights for R rows at T steps."""

    log_probs: Tensor
    """(R, T)."""
    entropy: Tensor
    """(R, T)."""
    values: Tensor | None
    """(R, T); None without a critic."""
    cost_values: Tensor | None
    """(R, T, K); None without a cost critic."""


class PolicyModels(NamedTuple):
    """The models of one policy that a learner holds: equal weights for different uses."""

    trained: Any
    """Sharded over the workers."""
    rollout: Any
    """Plain, for inference."""
    reference: Any
    """The frozen reference policy that the divergence is measured from; None if it is not measured."""
