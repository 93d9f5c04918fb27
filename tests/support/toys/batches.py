"""Random trajectories of whole sequences, as hypothesis and plain tests need them."""

import torch

from marl_ray.trajectories import Trajectories


def batch(
    seed: int, groups: int = 3, members: int = 4, steps: int = 6, signals: int = 1, greedy: bool = False
) -> Trajectories:
    """`groups * members` ragged sequences, one episode each.

    Some are empty, some have one step, and all are ended or truncated at the last.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = groups * members

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(0, steps + 1, (rows,), generator=generator)
    lengths[0] = 1
    mask = torch.arange(steps)[None] < lengths[:, None]
    last = torch.arange(steps)[None] == (lengths - 1)[:, None]
    truncated = (torch.rand(rows, generator=generator) < 0.3)[:, None] & last
    member = torch.arange(rows) % members
    return Trajectories(
        observations=normal(rows, steps, 2).float(),
        states=None,
        actions=torch.randint(0, 3, (rows, steps), generator=generator),
        log_probs=normal(rows, steps) - 1,
        action_masks=None,
        values=normal(rows, steps),
        bootstrap=torch.where(truncated, normal(rows, steps), 0.0),
        cost_values=normal(rows, steps, signals),
        cost_bootstrap=torch.where(truncated[..., None], normal(rows, steps, signals), 0.0),
        rewards=normal(rows, steps) * mask,
        costs=normal(rows, steps, signals).abs() * mask[..., None],
        mask=mask,
        terminated=last & ~truncated,
        truncated=truncated,
        greedy=(member == 0) & greedy,
        group=torch.arange(rows) // members,
        episode=torch.zeros(rows, dtype=torch.int64),
        agent=torch.zeros(rows, dtype=torch.int64),
        turn=torch.zeros(rows, dtype=torch.int64),
    )
