"""Texts as token ids: loading a tokenizer, encoding a prompt, and what they must fulfil."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from marl_ray.errors import MarlRayError, one_line


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or of a name that transformers knows.

    It must have an end token: without one a response would only ever end at its greatest length. Where it has no padding
    token, the end token stands for it; nothing here reads what is padded.
    """
    try:
        # One that names no class of its own is what its file says. AutoTokenizer would make some models' usual one of it,
        # with another normaliser and tokens added.
        general = get_tokenizer_config(path).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        tokenizer = (PreTrainedTokenizerFast if general else AutoTokenizer).from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MarlRayError(f"model.path {path!r} has no tokenizer: {one_line(error)}") from error
    if not tokenizer.encode("a", add_special_tokens=False):  # what transformers makes where there are no files of one
        raise MarlRayError(f"model.path {path!r} has no tokenizer: it has no vocabulary")
    if tokenizer.eos_token_id is None:
        raise MarlRayError(f"model.path {path!r}: its tokenizer has no eos_token, and a response needs an end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_prompt(tokenizer: Any, text: str, chat: bool | None) -> list[int]:
    """Token ids of a prompt, at least one.

    With `chat` it is one user message in the tokenizer's chat template, up to where the reply begins; None means with the
    template if there is one. Raises MarlRayError if there must be one and is none, or if nothing is left to condition on.
    """
    template = tokenizer.chat_template is not None
    if chat and not template:
        raise MarlRayError(f"model.chat: tokenizer {tokenizer.name_or_path!r} has no chat template")
    if template if chat is None else chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    # A template writes the special tokens of the start by itself.
    ids = tokenizer.encode(text, add_special_tokens=not (template if chat is None else chat))
    if not ids:
        raise MarlRayError("prompt: expected at least one token, got an empty text and no chat template")
    return ids


def check_fits(ids: Sequence[int], max_tokens: int, context: int, whose: str = "prompt") -> None:
    """Raise MarlRayError if a prompt and a response after it may be longer than the context."""
    if len(ids) + max_tokens > context:
        raise MarlRayError(
            f"{whose}: {len(ids)} tokens and generation.max_tokens={max_tokens} exceed model.context={context}"
        )
