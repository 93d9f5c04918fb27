"""A small Llama in a folder, as users have large ones."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marl_ray.policies.language.tiny_models import byte_tokenizer


def saved_llama(folder: Path, tied: bool = True) -> str:
    """Save a Llama of random weights, whose heads four workers can share.

    Returns the folder as an override of the speaker's model.
    """
    tokenizer = byte_tokenizer(32)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"team.speaker.model={{path: '{folder}', context: 32}}"
