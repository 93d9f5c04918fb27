"""Distinct rows of a batch of categorical observations.

A gridworld's batch repeats itself: of 4,096 observations of an 8x8 grid a sixth to a quarter are distinct. A network is
a function of its row, so it evaluates each distinct row once, and the outputs are copied to equal rows. The gradients
of copies add up by themselves.
"""

import torch
from torch import Tensor
from torch.nn import functional


def distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split integer rows (N, K) into (distinct rows (U, K), index (N,)) with `distinct[index] == rows`, exactly.

    Rows are distinguished by a 64-bit hash. The result is checked, and after a collision the function compares the rows
    themselves, which is slower.
    """
    hashes = _hashes(rows)
    _, index = torch.unique(hashes, return_inverse=True)
    count = int(index.max()) + 1
    representative = torch.empty(count, dtype=torch.long, device=rows.device)
    representative[index] = torch.arange(len(rows), device=rows.device)
    distinct = rows[representative]
    if torch.equal(distinct[index], rows):
        return distinct, index
    distinct, index = torch.unique(rows, dim=0, return_inverse=True)
    return distinct, index


def _hashes(rows: Tensor) -> Tensor:
    """Hash the rows' bytes into (N,) int64: multiply, fold the high half down, multiply again, add over words."""
    raw = rows.contiguous().view(torch.uint8).reshape(len(rows), -1)
    words = functional.pad(raw, (0, -raw.shape[1] % 8)).view(torch.int64)
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (2, words.shape[1]), generator=generator).mul_(2).add_(1).to(rows.device)
    mixed = words * odd[0]
    mixed ^= mixed >> 32
    mixed *= odd[1]
    mixed ^= mixed >> 29
    return mixed.sum(1)
