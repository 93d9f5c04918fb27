"""Turn the token ids of several prompts and responses into the tensors that `TokenPolicy.evaluate` takes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Ids = Sequence[int] | np.ndarray


def pad_sequences(prompts: Sequence[Ids], responses: Sequence[Ids]) -> tuple[Tensor, Tensor, Tensor]:
    """Return prompts (R, P) on the right with -1 before them, responses (R, T), and the responses' mask (R, T) bool.

    P and T are those of the longest prompt and response, and at least 1.
    """
    width = max([1, *map(len, prompts)])
    steps = max([1, *map(len, responses)])
    before = torch.full((len(prompts), width), -1)
    after = torch.zeros(len(responses), steps, dtype=torch.int64)
    mask = torch.zeros(len(responses), steps, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        before[row, width - len(prompt) :] = torch.as_tensor(prompt)
        after[row, : len(response)] = torch.as_tensor(response)
        mask[row, : len(response)] = True
    return before, after, mask
