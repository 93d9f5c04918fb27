"""A response of a language model once it is written, joined of the chunks in which it came."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from marl_ray.serving.arms.protocol import NamedToken, ResponseChunk, ResponseStart

BROKEN_OFF_FINISH = "broken_off"
"""The finish of a response that broke off, because its client left or its arm failed; the act log stores this text."""


@dataclass(frozen=True, kw_only=True)
class WrittenResponse:
    """A response that has ended."""

    text: str
    ids: list[int]
    """Its tokens; empty if the arm reports none."""
    log_probs: list[float]
    """The log-probability of each token."""
    finish: str
    """`stop`, `length` or BROKEN_OFF_FINISH."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    names: list[NamedToken]
    """Each token's own text, if the request asks for it."""
    tops: list[list[tuple[NamedToken, float]]]
    """Per token the most likely ones and their log-probabilities, if the request asks for them."""
    start: ResponseStart | None
    """The prompt and the settings that it began with; None if the arm does not know them."""
    tokens: int
    """Number of its tokens, with or without ids."""
    cost_usd: float | None
    """Cost in USD; None if it is unknown."""

    @property
    def log_prob(self) -> float | None:
        """The text's log-probability; None if its arm computes none, as external arms do."""
        return sum(self.log_probs) if self.ids else None


async def collect_response(next_chunk: Callable[[], Awaitable[ResponseChunk]]) -> WrittenResponse:
    """Wait for all chunks that are still to come, and join them."""
    chunks = [await next_chunk()]
    while chunks[-1].finish is None:
        chunks.append(await next_chunk())
    return join_chunks(chunks)


def join_chunks(chunks: Sequence[ResponseChunk]) -> WrittenResponse:
    """Join the chunks to a response; without a `finish` it broke off."""
    return WrittenResponse(
        text="".join(chunk.text for chunk in chunks),
        ids=[number for chunk in chunks for number in chunk.ids],
        log_probs=[log_prob for chunk in chunks for log_prob in chunk.log_probs],
        finish=chunks[-1].finish or BROKEN_OFF_FINISH,
        prompt_tokens=chunks[-1].prompt_tokens,
        names=[name for chunk in chunks for name in chunk.names],
        tops=[top for chunk in chunks for top in chunk.tops],
        start=chunks[0].start,
        tokens=sum(chunk.tokens for chunk in chunks),
        cost_usd=total_cost(chunk.cost_usd for chunk in chunks),
    )


def total_cost(costs: Iterable[float | None]) -> float | None:
    """Return the sum of costs in USD; None if any of them is unknown."""
    total = 0.0
    for cost in costs:
        if cost is None:
            return None
        total += cost
    return total
