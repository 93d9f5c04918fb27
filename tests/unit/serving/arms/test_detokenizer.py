"""The text of a response while its tokens arrive."""

import re
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from toy_models.tokenizers import LLAMA2, bytes_with, spacing_tokenizer

from marl_ray.policies.engines.decoding.stop_strings import first_stop
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.serving.arms.text.detokenizer import Detokenizer

TOKENIZER = byte_tokenizer()


@given(st.lists(st.lists(st.integers(0, 258), max_size=4), max_size=8))
def test_the_parts_of_a_text_are_the_whole(parts_ids):
    detokenizer = Detokenizer(TOKENIZER)
    parts = [detokenizer.add(ids, False) for ids in parts_ids] + [detokenizer.add([], True)]
    assert "".join(parts) == TOKENIZER.decode([*chain.from_iterable(parts_ids)], skip_special_tokens=True)


@given(st.text("ab€", max_size=20), st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_hidden_stop_is_told(text, stops):
    # As the decoder does, the response ends with the token that completes a stop.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    text = text[: min(ends, default=len(text))]
    ids = TOKENIZER.encode(text)
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    detokenizer = Detokenizer(TOKENIZER, stops)
    text_out = "".join(detokenizer.add([number], k == len(ids) - 1) for k, number in enumerate(ids))
    assert text_out == text[: min(places, default=len(text))]


def test_special_tokens_without_a_name_have_no_text_either():
    """The tokenizers of Llama 3 and of most that write ChatML name their end token alone."""
    tokenizer = bytes_with(None, "<|im_end|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end not in tokenizer.all_special_ids
    ids = [*b"ab", end, *b"cd"]
    assert first_stop(tokenizer, ("bc",), ids) == 3
    assert Detokenizer(tokenizer, ("b<|im_end|>",)).add(ids[:3], True) == "a"


@given(st.lists(st.sampled_from(["a", "b", "▁", "\n", "<s>", "</s>"]), max_size=12))
def test_a_special_token_does_not_make_the_next_word_the_first(tokens):
    tokenizer = spacing_tokenizer(LLAMA2)
    ids = tokenizer.convert_tokens_to_ids(tokens)
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.add([number], False) for number in ids] + [detokenizer.add([], True)]
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)


def test_tokens_that_the_tokenizer_does_not_know_have_no_text_either():
    """Models may have more of them, which round their vocabularies up."""
    ids = [*b"a", *[len(TOKENIZER) + 1] * 5, *b"b"]
    assert TOKENIZER.decode(ids) == "ab" and first_stop(TOKENIZER, ("ab",), ids) == 6


@given(
    st.lists(st.sampled_from(["a", "b", "€", "<|reply|>", "<|end|>"]), max_size=12),
    st.lists(st.sampled_from(["ab", "a<|reply|>", "<|reply|>b", "a<|reply|>b", "<|end|>", "b€"]), max_size=2),
)
def test_nothing_of_a_hidden_stop_with_special_tokens_is_told(pieces, stops):
    ids = TOKENIZER.encode("".join(pieces))
    at = first_stop(TOKENIZER, tuple(stops), ids) if stops else None
    ids = ids if at is None else ids[: at + 1]
    shown, plain = (TOKENIZER.decode(ids, skip_special_tokens=skip) for skip in (False, True))
    expected = plain
    if at is not None:
        lengths = [len(re.sub(r"<\|\w+\|>", "", s)) for s in stops if shown.endswith(s) or plain.endswith(s)]
        expected = plain[: len(plain) - max(lengths)]
    detokenizer = Detokenizer(TOKENIZER, stops)
    parts = [detokenizer.add([number], k == len(ids) - 1) for k, number in enumerate(ids)]
    assert "".join(parts) == expected
