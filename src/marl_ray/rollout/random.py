"""Random numbers that depend on what they are for and not on who draws them."""

import numpy as np

_MASK = (1 << 64) - 1


def episode_seed(seed: int, copy: int, episode: int) -> int:
    """Seed in [0, 2^31) of one episode of one environment copy."""
    return int(np.random.SeedSequence([seed, copy, episode]).generate_state(1)[0] >> 1)


def action_noise(seed: int, iteration: int, copies: range, steps: int, width: int) -> np.ndarray:
    """Uniforms in [0, 1) for the actions of one batch, (steps, copies, width), float64.

    Philox keyed by (seed, iteration, copy), so a copy draws the same numbers whichever worker holds it.
    """
    blocks = [
        np.random.Generator(np.random.Philox(key=[seed & _MASK, (iteration << 32 | copy) & _MASK])).random(
            (steps, width)
        )
        for copy in copies
    ]
    return np.stack(blocks, axis=1)


def time_permutation(seed: int, iteration: int, epoch: int, steps: int) -> np.ndarray:
    """Order of the time indices of one epoch, the same on every worker; (steps,)."""
    # Above any iteration's copies, so that minibatch order and action noise never share a key.
    stream = (iteration << 32 | 1 << 31 | epoch) & _MASK
    return np.random.Generator(np.random.Philox(key=[seed & _MASK, stream])).permutation(steps)
