"""The interface of a tokenizer: what the product reads of one of transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol


class AddedToken(Protocol):
    """A token that was added to a vocabulary."""

    content: str
    special: bool
    normalized: bool


class Tokenizer(Protocol):
    """Encodes texts as token ids, and decodes them; transformers documents its methods."""

    name_or_path: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int | None

    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def all_special_tokens(self) -> list[str]: ...
    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]: ...

    def __len__(self) -> int: ...
    def __call__(
        self, text: list[str], *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Mapping[str, list[list[int]]]: ...
    def get_vocab(self) -> dict[str, int]: ...
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]: ...
    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str: ...
    def batch_decode(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]: ...
    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, tokenize: Literal[False], **settings: object
    ) -> str: ...
    def save_pretrained(self, save_directory: str | Path) -> object: ...
