"""The text of a response, decoded while its tokens arrive."""

import re
from collections.abc import Sequence

from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.policies.prompting.tokenizers import decode_visibly, special_tokens

BROKEN_CHARACTER = "\ufffd"
"""The character that decoders write for bytes that are not, or not yet, a whole character."""


class Detokenizer:
    """Decodes a response in parts, which together are the text of all its tokens without what is hidden.

    Special tokens have no text. The end of a part is held back while it may become a character or a hidden stop string.
    Of a stop string with special tokens in it, such as `done<|im_end|>`, the plain text is hidden.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Sequence[str] = ()):
        """End the text where the first `hidden` string begins."""
        self._tokenizer = tokenizer
        self._hidden = tuple(hidden)
        names = sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._plain_texts = {stop: plain for stop in hidden if (plain := special.sub("", stop)) not in ("", stop)}
        """Hidden strings that contain special tokens -> their text without these."""
        self._newest_ids: list[int] = []
        """The newest tokens, in which a hidden string with special tokens may end."""
        self._window = max((len(stop.encode("utf-8", "surrogatepass")) for stop in self._plain_texts), default=0)
        self._ids: list[int] = []
        """The tokens that the next part's text may depend on: a few that were passed on before, and the newest."""
        self._context = 0
        """The number of `_ids` that were passed on before and are only context."""
        self._passed_on = 0
        """Number of characters of the text of `_ids` that have been passed on."""
        self._held_back = ""

    def add(self, ids: Sequence[int], is_last: bool) -> str:
        """Return the text that later tokens cannot change; with the last tokens (`is_last`) all of it."""
        self._held_back += self._decode(ids, is_last)
        stops_at = [at for stop in self._hidden if (at := self._held_back.find(stop)) >= 0]
        if stops_at:
            text = self._held_back[: min(stops_at)]
            self._held_back = ""
            return text
        if self._plain_texts:
            self._newest_ids = [*self._newest_ids, *ids][-self._window :]
            if is_last:
                [visible] = decode_visibly(self._tokenizer, [self._newest_ids])
                plain = max(
                    (plain_form for stop, plain_form in self._plain_texts.items() if stop in visible),
                    key=len,
                    default="",
                )
                self._held_back = self._held_back.removesuffix(plain)
        # Hold back the whole text of such a string: only the special token behind it decides whether it is hidden.
        ends = (*self._hidden, *(f"{plain}\0" for plain in self._plain_texts.values()))
        keep = 0 if is_last else max((_overlap(self._held_back, stop) for stop in ends), default=0)
        end = len(self._held_back) - keep
        text = self._held_back[:end]
        self._held_back = self._held_back[end:]
        return text

    def _decode(self, ids: Sequence[int], is_last: bool) -> str:
        self._ids += ids
        decoded = self._decode_all(self._ids)
        # Decode all of them together, because some tokenizers read a run of single bytes only as a whole.
        end = len(decoded if is_last else decoded.rstrip(BROKEN_CHARACTER))
        text = decoded[self._passed_on : end]
        self._passed_on = max(end, self._passed_on)
        # Special tokens have no text and cannot be context, on which the text of the next tokens depends.
        if end == len(decoded) and (behind := self._decode_all(self._ids[self._context :])):
            self._ids, self._context = self._ids[self._context :], len(self._ids) - self._context
            self._passed_on = len(behind)
        return text

    def _decode_all(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
