"""Texts become ids and ids the same texts, and what cannot be encoded is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from marl_ray.errors import MarlRayError
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.prompting.prompts import check_fits, encode_prompt, fit_prompt
from marl_ray.policies.prompting.tokenizers import load_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text() | st.lists(st.sampled_from(["<|end|>", "<|", " ", "\n", "é", "a", "\ufffd"])).map("".join))
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_a_token_is_a_byte(text):
    assert TOKENIZER.encode(text) == list(text.encode())


def test_bytes_that_are_no_text_decode_to_something():
    assert TOKENIZER.decode([0xFF, 97]) == "\ufffda"
    assert TOKENIZER.decode([97, TOKENIZER.eos_token_id], skip_special_tokens=True) == "a"


def test_a_prompt_is_wrapped_where_there_is_a_template_unless_told_not_to():
    reply = TOKENIZER.convert_tokens_to_ids("<|reply|>")  # type: ignore[attr-defined]  # transformers'
    assert encode_prompt(TOKENIZER, "ab", None) == encode_prompt(TOKENIZER, "ab", True) == [97, 98, reply]
    assert encode_prompt(TOKENIZER, "ab", False) == [97, 98]
    assert encode_prompt(TOKENIZER, "", None) == [reply]


def test_the_tokenizer_survives_its_files(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    text = "π = 3.14 <|end|>\n"
    assert again.encode(text) == TOKENIZER.encode(text)
    assert again.decode(again.encode(text)) == text
    assert (again.pad_token_id, again.eos_token_id) == (256, 257)
    assert encode_prompt(again, "ab", None) == encode_prompt(TOKENIZER, "ab", None)


def _bare(folder, **left_out):
    tokenizer = byte_tokenizer()
    for name, value in left_out.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_what_a_tokenizer_lacks_is_named(tmp_path):
    path = _bare(tmp_path / "a", eos_token=None)
    with pytest.raises(MarlRayError, match=rf"model.path '{path}': its tokenizer has no eos_token"):
        load_tokenizer(path)
    assert load_tokenizer(_bare(tmp_path / "b", pad_token=None)).pad_token == "<|end|>"  # type: ignore[attr-defined]  # transformers'
    plain = load_tokenizer(_bare(tmp_path / "c", chat_template=None))
    assert encode_prompt(plain, "ab", None) == [97, 98]
    with pytest.raises(MarlRayError, match=r"model.chat: tokenizer '.*c' has no chat template"):
        encode_prompt(plain, "ab", True)
    with pytest.raises(
        MarlRayError, match=r"^prompt: expected at least one token, got an empty text and no chat template$"
    ):
        encode_prompt(plain, "", None)
    with pytest.raises(MarlRayError, match=rf"model.path '{tmp_path}' has no tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_its_unknown_token_is_refused(tmp_path):
    core = Tokenizer(models.BPE(vocab={"a": 0, "<end>": 1}, merges=[], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(tmp_path)
    with pytest.raises(MarlRayError, match=rf"'{tmp_path}': its tokenizer cannot encode every text: .*<unk>"):
        load_tokenizer(str(tmp_path))


def test_a_text_of_unknown_characters_is_read_as_an_empty_one():
    core = Tokenizer(models.BPE(vocab={"a": 0, "<end>": 1}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    assert fit_prompt(tokenizer, "日本", None, 4) == fit_prompt(tokenizer, "", None, 4) == ([1], False)


def test_a_prompt_that_leaves_no_room_is_refused():
    check_fits([1] * 54, 10, 64)
    with pytest.raises(MarlRayError, match=r"agent a: 55 tokens and generation.max_tokens=10 exceed model.context=64"):
        check_fits([1] * 55, 10, 64, "agent a")
