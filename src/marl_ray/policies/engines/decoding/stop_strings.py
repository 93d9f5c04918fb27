"""Find stop strings while tokens arrive."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.policies.prompting.tokenizers import decode_visibly, special_tokens


class StopStrings:
    """Finds out when a response's text contains a stop string, with its special tokens or without them.

    Only the end of a response is decoded: a string of n bytes that the newest token completes lies within the last n
    tokens that count, for each of them has at least one byte. One more token before them is decoded, because some
    tokenizers write the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._special = frozenset(special_tokens(tokenizer))
        self._vocabulary = 1 + max(tokenizer.get_vocab().values())
        """Number of the tokenizer's tokens. A model may have more tokens; those have no text."""
        self._window = max(len(stop.encode("utf-8", "surrogatepass")) for stop in stops) + 1

    def completes_stop(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """Return True for each response whose newest token completes a stop string.

        Before that token no response may contain one.
        """
        ends = [self._newest_tokens(ids, frozenset()) for ids in responses]
        complete = self._contain_stop(ends)
        mixed = [row for row, ids in enumerate(ends) if self._special.intersection(ids)]
        if mixed:
            plain = [self._newest_tokens(responses[row], self._special) for row in mixed]
            for row, holds in zip(mixed, self._contain_stop(plain), strict=True):
                complete[row] |= holds
        return complete

    def _contain_stop(self, ends: list[list[int]]) -> list[bool]:
        texts = decode_visibly(self._tokenizer, ends)
        return [any(stop in text for stop in self._stops) for text in texts]

    def _newest_tokens(self, ids: Sequence[int], excluded: AbstractSet[int]) -> list[int]:
        """Return the newest tokens that have text and are not in the set that is left out."""
        end = list(ids[-self._window :])
        if max(end) < self._vocabulary and not excluded:
            return end
        end = []
        for token in reversed(ids):
            if len(end) == self._window:
                break
            if token < self._vocabulary and token not in excluded:
                end.append(token)
        return end[::-1]


def first_stop(tokenizer: Tokenizer, stops: tuple[str, ...], ids: Sequence[int]) -> int | None:
    """Return the index of the token that completes a response's first stop string; None without one."""
    completed = StopStrings(tokenizer, stops).completes_stop([ids[: end + 1] for end in range(len(ids))])
    return completed.index(True) if True in completed else None
