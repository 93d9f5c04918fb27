"""The bytes of a token of a byte-level tokenizer.

Byte-level tokenizers (GPT-2, Llama 3, Qwen) write every byte as one printable character: bytes that print as
themselves, and the others from character 256 on (`bytes_to_unicode` of GPT-2's encoder). So each token has bytes of its
own, even if it is only a part of a character.
"""

import json

from marl_ray.policies.prompting.protocol import Tokenizer

_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_others = iter(range(256, 512))
BYTE_ALPHABET = {chr(byte if byte in _PRINTABLE else next(_others)): byte for byte in range(256)}
"""Character of a token -> the byte that it stands for."""


class TokenBytes:
    """The bytes of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        self._is_byte_level = _is_byte_level(tokenizer)

    def bytes_of(self, token: int) -> list[int] | None:
        """Return the bytes (0 to 255) that the token adds to a text; None if it has none of its own.

        A special token has no text. In a tokenizer that is not byte-level no token has bytes of its own, because the
        text of a token depends on its neighbours.
        """
        if not self._is_byte_level:
            return None
        if (added := self._added.get(token)) is not None:
            return None if added.special else list(added.content.encode())
        spelling = self._tokenizer.convert_ids_to_tokens(token)
        if spelling is None or any(character not in BYTE_ALPHABET for character in spelling):
            return None
        return [BYTE_ALPHABET[character] for character in spelling]


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return True if the tokenizer turns tokens into text by their bytes alone."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or core.decoder is None:
        return False
    decoder = json.loads(core.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps] == ["ByteLevel"]
