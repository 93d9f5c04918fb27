"""The bits of the numbers that key a run's random streams, and the bounds that they set for its config.

`rollout.rng` puts several numbers into one key. A number of more bits would reach into its neighbour's, and two streams of
the run would draw the same random numbers.
"""

from typing import Annotated, TypeAlias

from pydantic import Field

COPY_BITS, ATTEMPT_BITS = 20, 7
"""Bits of the number of an environment copy (or of an evaluation's start), and of an attempt at a batch."""
ORDER_BITS = COPY_BITS + ATTEMPT_BITS
"""Bits of the number of an order of a batch's parts, which takes the place of those two."""
BLOCK_STEPS, BLOCK_BITS = 64, 20
"""Steps of an evaluation whose random numbers are drawn at once, and the bits of the number of such a block."""

MAX_COPIES = 1 << COPY_BITS
"""Maximum number of environment copies, and of the starts of an evaluation."""
MAX_REFILLS = (1 << ATTEMPT_BITS) - 1
"""Maximum number of times that a batch is filled up again; attempt 0 is its first play."""
MAX_EPOCHS = 1 << (ORDER_BITS - 1)
"""Maximum number of epochs; the upper half of the numbers of orders is for those that are not of epochs."""
MAX_EVALUATION_STEPS = BLOCK_STEPS << BLOCK_BITS
"""Maximum number of steps of an episode of an evaluation."""
MAX_SEED = (1 << 53) - 1
"""Greatest seed of a run. JSON holds it exactly, and those of a team's weights, 1,000 times it and more, fit in 64 bits."""

Copies: TypeAlias = Annotated[int, Field(gt=0, le=MAX_COPIES)]
Refills: TypeAlias = Annotated[int, Field(ge=0, le=MAX_REFILLS)]
Epochs: TypeAlias = Annotated[int, Field(gt=0, le=MAX_EPOCHS)]
EvaluationSteps: TypeAlias = Annotated[int, Field(gt=0, le=MAX_EVALUATION_STEPS)]
Seed: TypeAlias = Annotated[int, Field(ge=0, le=MAX_SEED)]
