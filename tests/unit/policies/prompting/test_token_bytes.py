"""The bytes of tokens, as clients of chats read them."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toy_models.tokenizers import CHATML, bytes_with, spacing_tokenizer
from transformers import PreTrainedTokenizerFast

from marl_ray.policies.prompting.token_bytes import BYTE_ALPHABET, TokenBytes


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges, some of them of parts of characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["the cat, the hat", "日本語 日月", "\U0001f600\U0001f601"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


TOKENIZER = merging_tokenizer()


@given(st.text())
def test_the_bytes_of_tokens_are_those_of_the_text(text):
    known = TokenBytes(TOKENIZER)
    parts = [known.bytes_of(number) for number in TOKENIZER.encode(text, add_special_tokens=False)]
    assert b"".join(map(bytes, parts)) == text.encode()


def test_the_alphabet_is_that_of_byte_level_tokenizers():
    assert set(BYTE_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_ALPHABET.values()) == list(range(256))


def test_what_has_no_bytes_of_its_own_has_none():
    tokenizer = bytes_with(CHATML, "<|im_end|>", common=("<tool_call>",))
    known, vocabulary = TokenBytes(tokenizer), tokenizer.get_vocab()
    assert known.bytes_of(vocabulary["<|im_end|>"]) is None and known.bytes_of(10**6) is None
    assert known.bytes_of(vocabulary["<tool_call>"]) == list(b"<tool_call>")
    words = TokenBytes(spacing_tokenizer(CHATML))  # a word's space depends on what stands before it
    assert {words.bytes_of(number) for number in range(20)} == {None}
