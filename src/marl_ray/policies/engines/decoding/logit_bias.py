"""Biases of tokens, and penalties for tokens that a response already contains, as OpenAI's API defines them.

Token j of V gets the logit `mu_j + bias_j - frequency * c_j - presence * (c_j > 0)`, where `c_j` is the count of j in
the response so far, without the prompt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """The numbers that a request adds to the logits."""

    tokens: tuple[tuple[int, float], ...] = ()
    """Token ids and their biases."""
    presence: float = 0.0
    """Penalty for a token that the response contains."""
    frequency: float = 0.0
    """Penalty for each time that the response contains a token."""

    def initial(self, vocabulary: int, device: torch.device) -> Tensor:
        """Return the numbers (V,) float32 to add before the first token is drawn.

        Raises IndexError for a token outside of the vocabulary.
        """
        added = torch.zeros(vocabulary, device=device)
        if self.tokens:
            ids, values = zip(*self.tokens, strict=True)
            added[list(ids)] = torch.tensor(values, device=device)
        return added

    def penalize(self, added: Tensor, token: int, is_new: bool) -> None:
        """Subtract the penalty for one more `token` from the added numbers, in place."""
        added[token] -= self.frequency + (self.presence if is_new else 0.0)
