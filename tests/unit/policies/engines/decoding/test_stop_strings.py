"""Stop strings end a response wherever its tokens divide them, and special tokens do not hide them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from toy_models.tokenizers import word_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from marl_ray.config.run.model import GenerationConfig
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.decoding.decoder import Decoder
from marl_ray.policies.engines.models.cached_forward import ForwardModel
from marl_ray.policies.language.tiny_models import byte_tokenizer


class Parrot:
    """A model that says fixed token ids after a prompt of one token, whose id chooses what is said."""

    def __init__(self, vocabulary: int, sayings: dict[int, list[int]]) -> None:
        self.shape = ForwardModel(GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=2))).shape
        self._vocabulary, self._sayings = vocabulary, sayings
        self._written: dict[int, int] = {}

    def prefill(self, ids: Tensor) -> Tensor:
        raise AssertionError("prompts have one token")

    def decode(self, ids: Tensor, positions: Tensor, cache: Tensor, hidden: Tensor | None) -> Tensor:
        cache[..., -1, :] = ids[:, None, None, None, None].float()
        logits = torch.zeros(len(ids), self._vocabulary)
        for row, (first, position) in enumerate(zip(cache[:, 0, 0, 0, :, 0].tolist(), positions.tolist(), strict=True)):
            saying = self._sayings[int(first[-1 - position])]
            logits[row, saying[position]] = 1000.0
        return logits


def rest_of(tokenizer: Any, sayings: list[list[int]], *stop: str) -> list[list[int]]:
    """The rest of some sayings under stop strings."""
    decoder = Decoder(Parrot(len(tokenizer), dict(enumerate(sayings))), tokenizer, {tokenizer.eos_token_id})
    for number, saying in enumerate(sayings):
        decoder.add([Prompt((number,), 0)], 0, GenerationConfig(max_tokens=len(saying), stop=stop))
    got: list[list[int]] = [[] for _ in sayings]
    while len(decoder):
        for token in decoder.step():
            got[token.handle].append(token.id)
    return got


def test_a_stop_string_may_span_tokens():
    tokenizer = byte_tokenizer()
    sayings = [list(text.encode()) for text in ("one\n\ntwo", "a STOP b", "é\n €\n\n", "never")]
    expected = ["one\n\n", "a STOP", "é\n €\n\n", "never"]
    assert rest_of(tokenizer, sayings, "\n\n", "STOP") == [list(text.encode()) for text in expected]
    assert rest_of(tokenizer, [list("say €5!".encode())], "€") == [list("say €".encode())]


def test_special_tokens_do_not_hide_a_stop_string():
    tokenizer = byte_tokenizer()
    reply = tokenizer.convert_tokens_to_ids("<|reply|>")  # type: ignore[attr-defined]  # transformers'
    assert rest_of(tokenizer, [[97, 98, reply, reply, reply, reply, 99, 100]], "abc") == [[97, 98, *[reply] * 4, 99]]


@pytest.mark.parametrize(
    "stop", ["<|reply|>", "b<|reply|>", "<|reply|><|reply|>", "<|reply|>c", "|reply|>c", "bcd", "d\n"]
)
def test_stop_strings_see_special_tokens(stop):
    """One in the text as it is written with them or without them ends a response, as soon as it is there."""
    tokenizer = byte_tokenizer()
    reply = tokenizer.convert_tokens_to_ids("<|reply|>")  # type: ignore[attr-defined]  # transformers'
    saying = [97, 98, reply, reply, 99, 100, reply, 10, 101]
    [ids] = rest_of(tokenizer, [saying], stop)
    shown = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
    before = [tokenizer.decode(ids[:-1], skip_special_tokens=skip) for skip in (False, True)]
    assert any(stop in text for text in shown) and not any(stop in text for text in before)
    assert ids == saying[: len(ids)] and len(ids) < len(saying)


def test_a_stop_string_may_be_part_of_a_token():
    tokenizer = word_tokenizer("a", "b.\n", "\nc", "x.\n\ny", "d")
    assert rest_of(tokenizer, [[0, 1, 2, 4], [0, 3, 4], [0, 4, 4]], "\n\n") == [[0, 1, 2], [0, 3], [0, 4, 4]]
