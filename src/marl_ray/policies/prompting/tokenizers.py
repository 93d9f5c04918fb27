"""Tokenizers: loading, checks of what training requires, and their tokens without text."""

from typing import Any, cast

from marl_ray.errors import MarlRayError, one_line
from marl_ray.policies.prompting.protocol import Tokenizer

UNUSUAL_CHARACTERS = "é日\U0001f600\ue000"
"""Characters that no small vocabulary contains."""


def load_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a folder or of a name that transformers knows.

    The tokenizer must have an end token, because without one every response would reach its greatest length. If it has
    no padding token, the end token takes its place; no code of the product reads padding. Raises MarlRayError for a
    path without a tokenizer, and for one that has no end token or cannot encode every text.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        # A tokenizer of a general class is read from its file alone. AutoTokenizer would use the usual class
        # of some models, with another normaliser and more tokens.
        general = get_tokenizer_config(path).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        tokenizer = (PreTrainedTokenizerFast if general else AutoTokenizer).from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MarlRayError(f"model.path {path!r} has no tokenizer: {one_line(error)}") from error
    # Transformers makes an empty tokenizer if the folder has no files of one.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise MarlRayError(f"model.path {path!r} has no tokenizer: it has no vocabulary")
    try:
        tokenizer.encode(UNUSUAL_CHARACTERS, add_special_tokens=False)
    except Exception as error:  # the vocabulary lacks its token for unknown text, which agents would write
        raise MarlRayError(f"model.path {path!r}: its tokenizer cannot encode every text: {one_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise MarlRayError(f"model.path {path!r}: its tokenizer has no eos_token, and a response needs an end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return cast(Tokenizer, tokenizer)


def check_vocabulary(tokenizer: Tokenizer, lm: Any, path: str) -> None:
    """Raise MarlRayError if a tokenizer has tokens that its model lacks."""
    needed, embedded = 1 + max(tokenizer.get_vocab().values()), lm.get_input_embeddings().weight.shape[0]
    if needed > embedded:
        raise MarlRayError(f"model.path {path!r}: its tokenizer has {needed} tokens, it has {embedded}")


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens that have no text.

    These are the tokens that the tokenizer has a name for, such as its end token, and all others that are special, such
    as Llama 3's `<|eot_id|>`.
    """
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def decode_visibly(tokenizer: Tokenizer, responses: list[list[int]]) -> list[str]:
    """Decode token ids to texts that show special tokens."""
    texts: list[str] = tokenizer.batch_decode(responses, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts
