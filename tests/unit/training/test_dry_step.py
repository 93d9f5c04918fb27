"""A step whose tensors have no numbers takes the memory that a real one of that shape must take."""

import pytest
from transformers import LlamaConfig, Qwen2Config

from marl_ray.config.run.model import ModelConfig
from marl_ray.training.team.dry_step import dry_step

TINY = LlamaConfig(
    vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, eos_token_id=257
)
TINY_WEIGHTS = 2 * 259 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
QWEN_3B = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
QWEN_3B |= {"num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN_7B = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
QWEN_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}


def step(architecture, workers, rows, length, tokens):
    model = ModelConfig(preset="tiny-1m", context=length, activation_checkpointing=True)
    return dry_step(architecture, model, workers, rows, length, tokens)


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_share_weights_and_moments(workers):
    kinds = step(TINY, workers, 2, 64, 8)
    share = 4 * TINY_WEIGHTS / workers
    assert kinds["SHARDED_PARAM"] == pytest.approx(share, rel=0.02)
    assert 2 * share <= 1.02 * kinds["OPT"]
    assert kinds["Total"] == sum(number for kind, number in kinds.items() if kind != "Total")


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "weights"), [(QWEN_3B, 3.086e9), (QWEN_7B, 7.616e9)])
def test_models_of_3_and_7_billion_weights_fit_on_eight_gpus_of_80_gb(sizes, weights):
    kinds = step(Qwen2Config(**sizes, max_position_embeddings=4096), 8, 16, 2048, 512)
    share = 4 * weights / 8
    assert kinds["SHARDED_PARAM"] == pytest.approx(share, rel=0.01)
    # What the layers receive is kept for the backward pass, in bfloat16.
    assert kinds["ACT"] == pytest.approx(2 * 16 * 2048 * sizes["hidden_size"] * sizes["num_hidden_layers"], rel=0.2)
    copy_that_samples = 2 * weights
    assert kinds["Total"] + copy_that_samples < 80e9
