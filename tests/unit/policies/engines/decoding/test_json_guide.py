"""Every text that a guide lets through is JSON, and from every state there is a way to the end."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_models.tokenizers import LLAMA2, spacing_tokenizer

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Prompt, Token
from marl_ray.policies.engines.decoding.decoder import Decoder
from marl_ray.policies.engines.decoding.json_guide import (
    MAX_DEPTH,
    OBJECT_START,
    Guides,
    GuideState,
    advance,
    frame_guide,
    guides_of,
)
from marl_ray.policies.engines.torch_engine import make_cached_model
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import build_token_policy

BYTES = byte_tokenizer()
GUIDES = guides_of(BYTES)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def read(text: str, state: GuideState | None = OBJECT_START) -> GuideState | None:
    for character in text:
        state = None if state is None else advance(state, character)
    return state


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.sampled_from([None, 0, 2]))
def test_every_object_is_let_through(value, indent):
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if "\\u" not in text:
        state = read(text)
        assert state is not None and state.mode == "done"


@given(st.text('{}[]",:\\ \n\t0123456789-+.eEtrufalsnxb€', max_size=12))
def test_what_is_let_through_to_the_end_is_an_object(text):
    state = read(text)
    if state is not None and state.mode == "done":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "text",
    ["[", "1", '"', "{,", '{"a" 1', '{"a":01', '{"a":1.}', '{"a":+1', '{"a":[1,]', '{"a":tru}', "{}{", '{"a":1}}'],
)
def test_what_is_no_json_is_not(text):
    assert read(text) is None


def test_depth_is_bounded():
    assert read('{"a":' + "[" * (MAX_DEPTH - 1)) is not None and read('{"a":' + "[" * MAX_DEPTH) is None


@given(st.randoms(use_true_random=False))
def test_whatever_tokens_are_drawn_it_can_be_ended(drawn):
    state, ids = frame_guide(("<a>", "<b> "), "</>"), []
    for step in range(400):
        allowed = np.flatnonzero(GUIDES.allowed_tokens(state, 300))
        assert len(allowed) and allowed.max() < 256
        # The way out: what closes comes first.
        ways = [ord(c) for c in '"}]' if ord(c) in allowed] if step > 40 else []
        token = ways[0] if ways else int(drawn.choice(list(allowed)))
        ids.append(token)
        state = GUIDES.next_state(state, token)
        if state.mode == "done":
            break
    text = BYTES.decode(ids)
    assert text[:3] in ("<a>", "<b>") and text.endswith("</>")
    assert isinstance(json.loads(text[3:-3], strict=False), dict)


def test_a_blank_before_a_word_counts_where_a_tokenizer_hides_it():
    """`1` and then `▁2` are no number."""
    tokenizer = spacing_tokenizer(LLAMA2)
    guides = Guides(tokenizer)
    state = read('{"a":1')
    assert state is not None
    allowed = guides.allowed_tokens(state, len(tokenizer))
    blank = tokenizer.convert_tokens_to_ids("▁")
    assert allowed[blank] and guides.next_state(state, blank).mode == "next"


def test_a_tokenizer_that_cannot_write_json_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["none"])  # type: ignore[attr-defined]  # transformers'
    vocabulary = tokenizer.get_vocab()

    class Lacking:
        all_special_ids, all_special_tokens, added_tokens_decoder = [], [], {}

        def get_vocab(self):
            return {text: number for text, number in vocabulary.items() if text != "{"}

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    with pytest.raises(MarlRayError, match=r"^the tokenizer has no token for '\{' alone, which JSON may need$"):
        Guides(Lacking())


def test_a_guided_row_writes_an_object_and_its_company_is_as_ever():
    generation = GenerationConfig(max_tokens=200, temperature=1.5)
    torch.manual_seed(0)
    policy = plain_copy(build_token_policy(ModelConfig(preset="tiny-0.2m", context=512), generation, 1, False, 0))

    def texts(prompts):
        decoder = Decoder(make_cached_model(policy), policy.tokenizer, policy.end_tokens)
        tokens: dict[int, list[Token]] = {}
        handles = decoder.add(prompts, 0, generation)
        ends = {}
        while len(decoder):
            for token in decoder.step():
                tokens.setdefault(token.handle, []).append(token)
                ends[token.handle] = token.finish
        return [(tokens[handle], ends[handle]) for handle in handles]

    free = [Prompt((1, 2, 3), stream) for stream in range(4)]
    guided = [Prompt((1, 2, 3), stream, stream == 9, OBJECT_START, 3) for stream in range(10)]
    together = texts([*free, *guided])
    assert [[t.id for t in row] for row, _ in together[:4]] == [[t.id for t in row] for row, _ in texts(free)]
    finished = 0
    for row, finish in together[4:]:
        text = policy.tokenizer.decode([token.id for token in row])
        assert all(len(token.top) == 3 and token.top[0][1] >= token.log_prob for token in row)
        if finish == "stop":
            finished += 1
            assert isinstance(json.loads(text), dict)
        else:
            assert read(text.rstrip("\ufffd")) is not None or "\ufffd" in text
    assert finished
