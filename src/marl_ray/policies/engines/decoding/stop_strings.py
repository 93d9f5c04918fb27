"""Finding stop strings while tokens arrive."""

from collections.abc import Sequence, Set
from typing import Any


class StopStrings:
    """Tells when a response's text holds a stop string, be it with the special tokens in it or without them.

    Only the end of a response is decoded: a string of n bytes that the newest token completes lies within the last n
    tokens that count, for each of them has at least one byte. One token more is decoded before them, because some
    tokenizers write the first token of a text differently.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._special = frozenset(special_tokens(tokenizer))
        self._known = 1 + max(tokenizer.get_vocab().values())
        """Models may have more tokens than their tokenizer; those have no text."""
        self._window = max(len(stop.encode("utf-8", "surrogatepass")) for stop in stops) + 1

    def completed(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """True for each response whose newest token completes a stop string; before that token it held none."""
        ends = [self._end(ids, frozenset()) for ids in responses]
        complete = self._hold(ends)
        mixed = [row for row, ids in enumerate(ends) if self._special.intersection(ids)]
        if mixed:
            plain = [self._end(responses[row], self._special) for row in mixed]
            for row, holds in zip(mixed, self._hold(plain), strict=True):
                complete[row] |= holds
        return complete

    def _hold(self, ends: list[list[int]]) -> list[bool]:
        texts = decode_visibly(self._tokenizer, ends)
        return [any(stop in text for stop in self._stops) for text in texts]

    def _end(self, ids: Sequence[int], left_out: Set[int]) -> list[int]:
        """The newest tokens that have text, and are not to be left out."""
        end = list(ids[-self._window :])
        if max(end) < self._known and not left_out:
            return end
        end = []
        for token in reversed(ids):
            if len(end) == self._window:
                break
            if token < self._known and token not in left_out:
                end.append(token)
        return end[::-1]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens that have no text: those that the tokenizer has a name for, such as its end token, and all others that are
    special, such as Llama 3's `<|eot_id|>`."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def decode_visibly(tokenizer: Any, responses: list[list[int]]) -> list[str]:
    """Texts with their special tokens in them."""
    texts: list[str] = tokenizer.batch_decode(responses, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts


def first_stop(tokenizer: Any, stops: tuple[str, ...], ids: Sequence[int]) -> int | None:
    """Index of the token with which a response first holds a stop string; None if it holds none."""
    completed = StopStrings(tokenizer, stops).completed([ids[: end + 1] for end in range(len(ids))])
    return completed.index(True) if True in completed else None
