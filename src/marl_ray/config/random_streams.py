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
MAX_REFILLS = (1 << ATTEMPT_BITS) - 1
"""Attempt 0 is the first play of a batch."""
MAX_EPOCHS = 1 << (ORDER_BITS - 1)
"""The upper half of the numbers of orders is for those that are not of epochs."""
MAX_EVALUATION_STEPS = BLOCK_STEPS << BLOCK_BITS
MAX_SEED = (1 << 53) - 1
"""The seeds of a team's weights are 1,000 times the run's and more, and must fit in 64 bits; JSON holds it exactly."""

Copies: TypeAlias = Annotated[int, Field(gt=0, le=MAX_COPIES)]
Refills: TypeAlias = Annotated[int, Field(ge=0, le=MAX_REFILLS)]
Epochs: TypeAlias = Annotated[int, Field(gt=0, le=MAX_EPOCHS)]
EvaluationSteps: TypeAlias = Annotated[int, Field(gt=0, le=MAX_EVALUATION_STEPS)]
Seed: TypeAlias = Annotated[int, Field(ge=0, le=MAX_SEED)]
