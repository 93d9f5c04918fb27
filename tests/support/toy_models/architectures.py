"""Every causal language model that transformers can build from a config, in a tiny size with random weights."""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy

ARCHITECTURES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WIDTH, HEADS = 32, 4
"""Width of all layers, and heads of the attention."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "tgt_vocab_size", "src_vocab_size"), 300),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "embed_dim"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "ngram_size", "hidden_dim", "lru_width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "d_inner", "dim_feedforward"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "moe_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys((*LAYERS, "encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "kv_channels", "attention_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "global_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_length"), 128
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    "sliding_window": 8,
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
}
"""The names of sizes in configs."""
OF_LOGITS = {"logit_scale": 0.5, "lm_head_multiplier": 0.5, "logits_scaling": 2.0, "final_logit_softcapping": 8.0}
"""Other keys of configs about logits; some do nothing by default."""
LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
    ("num_key_value_heads", "num_kv_heads"),
    ("head_dim", "num_hidden_layers"),
    ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    (*LAYERS, "head_dim", "num_attention_heads", "num_heads"),
)


IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 2, "head_dim": 8},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "head_dim": 8},
)
MAX_PARAMETERS = 100_000_000
"""Parameters of a model that counts as tiny."""


def configs(architecture: str) -> Iterator[Any]:
    """The architecture's config with its own defaults but for sizes, in several ways: not every one fits together."""
    kind = CONFIG_MAPPING[architecture]
    for more, left_out, layers in itertools.product(MORE, LEFT_OUT, (2, 4, 8)):
        sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if name not in left_out}
        sizes |= {name: layers for name in sizes if name in LAYERS}
        with contextlib.suppress(Exception):
            config = _shrunk(kind, sizes, more)
            for part in ("text_config", "decoder", "llm_config"):
                nested = getattr(config, part, None)
                if nested is not None and not isinstance(nested, dict):
                    setattr(config, part, _shrunk(type(nested), sizes, more))
            yield config


def _shrunk(kind: Any, sizes: dict[str, Any], more: dict[str, Any]) -> Any:
    plain = kind()
    parameters = set(inspect.signature(kind.__init__).parameters) | set(vars(plain))
    parameters |= {getattr(kind, "attribute_map", {}).get(name, "") for name in sizes}
    read_sizes = {
        name: size for name, size in sizes.items() if name in parameters and getattr(plain, name, None) is not None
    }
    return kind(**read_sizes | more | IDS | {name: value for name, value in OF_LOGITS.items() if name in parameters})


def tiny_lm(architecture: str) -> Any:
    """Return a model of the architecture whose distributions are far from uniform.

    Its weights are large enough for that. Raises ValueError if none can be built that takes a forward pass.
    """
    failure = "no config"
    for config in configs(architecture):
        try:
            with torch.device("meta"):
                numbers = sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())
            if numbers > MAX_PARAMETERS:
                failure = f"{numbers} parameters"
                continue
            torch.manual_seed(0)
            lm = AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for parameter in lm.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
                if lm(input_ids=torch.arange(40, 60)[None]).logits.isfinite().all():
                    return lm
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    raise ValueError(failure)


CONTEXT = 64
"""Tokens."""
PROMPTS = [Prompt(tuple(range(40, 41 + length)), stream) for stream, length in enumerate((0, 3, 7, 7, 12))]
"""The prompts have several lengths, so that some rows of a batch are padded."""


def sampling_error(lm: Any, engine: str) -> float:
    """Largest difference between the log-probabilities that an engine gives and those of a full forward pass."""
    generation = GenerationConfig(max_tokens=14, engine=engine)
    policy = TokenPolicy(lm, byte_tokenizer(CONTEXT), ModelConfig(preset="tiny-0.2m", context=CONTEXT), generation)
    completions = make_engine(policy).generate(PROMPTS, 0)
    return max(
        log_prob_gap(lm, prompt, completion.ids, torch.tensor(completion.log_probs))
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    )


def scoring_error(lm: Any) -> float:
    """Likewise of `TokenPolicy.evaluate`."""
    policy = TokenPolicy(
        lm, byte_tokenizer(CONTEXT), ModelConfig(preset="tiny-0.2m", context=CONTEXT), GenerationConfig(max_tokens=14)
    )
    worst = 0.0
    for prompt in PROMPTS:
        ids = [(7 * place + 13 * prompt.stream) % 250 for place in range(11)]
        with torch.no_grad():
            rows = torch.tensor([prompt.ids]), torch.tensor([ids]), torch.ones(1, 11, dtype=torch.bool)
            worst = max(worst, log_prob_gap(lm, prompt, ids, policy.evaluate(*rows).log_probs[0]))
    return worst


def log_prob_gap(lm: Any, prompt: Prompt, ids: list[int], log_probs: torch.Tensor) -> float:
    with torch.no_grad():
        all_log_probs = lm(input_ids=torch.tensor([[*prompt.ids, *ids]])).logits[0].float().log_softmax(-1)
    response_log_probs = all_log_probs[len(prompt.ids) - 1 : -1].gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return float((response_log_probs - log_probs).abs().max())
