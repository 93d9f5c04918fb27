"""The architecture of a config's language model, without its weights."""

import re
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig, Qwen2Config

from marl_ray.config.run.model import ModelConfig
from marl_ray.errors import MarlRayError, one_line
from marl_ray.policies.language.tiny_models import byte_tokenizer, tiny_model
from marl_ray.policies.language.token_policy import model_folder

QWEN = re.compile(r"qwen2\.5-(?:coder-|math-)?(\d+(?:\.\d+)?b)\b", re.IGNORECASE)
"""The part that the names of all models of one shape have in common."""
SIZES = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False),
}
"""Parameters in a name -> width, inner width, layers, heads of queries, heads of keys, vocabulary, tied embeddings.

The numbers are those of each model's `config.json` at https://huggingface.co/Qwen."""


def read_architecture(model: ModelConfig, tracking_uri: str | None = None) -> PretrainedConfig:
    """Return the architecture of a model.

    The architecture is that of the folder's `config.json`, of its preset, or, for a Qwen2.5 that is named and not
    there, as that model's page has it. Raises MarlRayError if there is none.
    """
    if model.preset is not None:
        shape: PretrainedConfig = tiny_model(model.preset, byte_tokenizer(model.context), model.context).config
        return shape
    path = str(model.path)
    match = QWEN.search(path)
    if match and match[1].lower() in SIZES and not Path(path).is_dir() and not path.startswith("models:/"):
        return qwen_architecture(match[1].lower())
    try:
        with model_folder(path, tracking_uri) as folder:
            read: PretrainedConfig = AutoConfig.from_pretrained(folder)
            return read
    except MarlRayError:
        raise
    except Exception as error:  # transformers raises different errors for different models
        raise MarlRayError(f"model.path {path!r} has no config.json of a language model: {one_line(error)}") from error


def qwen_architecture(size: str) -> PretrainedConfig:
    """Return the architecture of a Qwen2.5 of one of SIZES."""
    width, inner, layers, heads, keys, vocabulary, tied = SIZES[size]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
    )
