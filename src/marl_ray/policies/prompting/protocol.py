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
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens, such as the one that ends a text."""

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of the special tokens."""

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id -> token, of the tokens that were added to the vocabulary."""

    def __len__(self) -> int: ...
    def __call__(
        self, text: list[str], *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Mapping[str, list[list[int]]]:
        """Return the lists of ids of several texts, under `input_ids` and other keys."""

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id, the added tokens among them."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """Return the token of an id as the vocabulary spells it; None if no token has it."""

    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """Return the ids of a text. `verbose` says a text beyond the model's context in a warning."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of ids."""

    def batch_decode(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """Return the text of each sequence of ids."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, tokenize: Literal[False], **settings: object
    ) -> str:
        """Return the messages of a conversation in the chat template, as text."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write the files of the tokenizer into a folder, from which transformers can read it again."""
