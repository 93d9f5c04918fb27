"""Small language models with random weights and a byte-level tokenizer, made without a download."""

from typing import Any, cast

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerCore
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from marl_ray.config.run.model import Preset
from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.policies.prompting.token_bytes import BYTE_ALPHABET

PAD, END, REPLY = "<|pad|>", "<|end|>", "<|reply|>"
CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    + REPLY
    + "{{ message['content'] }}"
    + END
    + "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    + REPLY
    + "{% endif %}"
)
"""Chat template: contents one after another; `<|reply|>` says that the model speaks next."""

SHAPES: dict[Preset, dict[str, Any]] = {
    "tiny-0.2m": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2},
    "tiny-1m": {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3},
    "tiny-6m": {"hidden_size": 384, "intermediate_size": 960, "num_hidden_layers": 4},
}
"""Sizes of the models, which have few and wide layers, because on a CPU each layer of a small model takes about the
same time, however narrow it is."""
HEADS: dict[Preset, tuple[int, int]] = {"tiny-0.2m": (3, 1), "tiny-1m": (6, 2), "tiny-6m": (6, 2)}
"""Numbers of heads of queries, and of keys and values; each is 32 or 64 wide."""


def byte_tokenizer(context: int = 1024) -> Tokenizer:
    """Make a tokenizer whose token b is the byte b of the text's UTF-8 form.

    Token 256 pads, 257 ends and 258 begins a reply. Decoding an encoded text gives the text. Bytes that are no UTF-8
    decode to the replacement character.
    """
    core = TokenizerCore(models.BPE(vocab=BYTE_ALPHABET, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in (PAD, END, REPLY)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[REPLY],
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    return cast(Tokenizer, tokenizer)  # its `decode` is typed as that of several texts at once


def tiny_model(preset: Preset, tokenizer: Tokenizer, context: int) -> LlamaForCausalLM:
    """Make a decoder of about 0.2, 1 or 6 million parameters, with weights from torch's global generator.

    The model is a Llama, because AutoTokenizer reads a Llama's tokenizer as it is in its files. For some other model
    types, such as Qwen 2, it takes that type's own pre-tokenizer and normaliser and ignores the files.
    """
    queries, keys = HEADS[preset]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=queries,
        num_key_value_heads=keys,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPES[preset],
    )
    return LlamaForCausalLM(config)
