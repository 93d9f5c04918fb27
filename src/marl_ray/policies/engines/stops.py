"""Finding stop strings while tokens arrive."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Tells when a response's text, without special tokens, holds a stop string.

    Only the end of a response is decoded: a string of n bytes that the newest token completes lies within the last n
    tokens that are not special, for each of them has at least one byte. One token more is decoded before them, because
    some tokenizers write the first token of a text differently.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._special = frozenset(tokenizer.all_special_ids)
        self._window = max(len(stop.encode()) for stop in stops) + 1

    def completed(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the newest token of each response, which held no stop string before it, completes one."""
        ends = [self._end(ids) for ids in responses]
        texts = self._tokenizer.batch_decode(ends, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [any(stop in text for stop in self._stops) for text in texts]

    def _end(self, ids: Sequence[int]) -> list[int]:
        end: list[int] = []
        for token in reversed(ids):
            if len(end) == self._window:
                break
            if token not in self._special:
                end.append(token)
        return end[::-1]


def first_stop(tokenizer: Any, stops: tuple[str, ...], ids: Sequence[int]) -> int | None:
    """Index of the token with which a response first holds a stop string; None if it holds none."""
    found = StopStrings(tokenizer, stops).completed([ids[: end + 1] for end in range(len(ids))])
    return found.index(True) if True in found else None
