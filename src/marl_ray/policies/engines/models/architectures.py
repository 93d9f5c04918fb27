"""The language models that the engines sample from.

tests/integration/language/test_architectures.py checks every entry. An engine may sample from an architecture if
decoding token by token gives the log-probabilities of a full forward pass, and `TokenPolicy.evaluate` gives the same.
Other architectures give wrong log-probabilities without an error: encoders see later tokens, the decoders of
encoder-decoders count positions from the batch's first token, and recurrent layers keep states instead of keys and
values.
"""

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]  # not in its __all__

from marl_ray.config.run.engines import ENGINES, EngineSpec, engine_spec
from marl_ray.errors import MarlRayError

_PAGED_NAMES = """
afmoe apertus arcee aria_text biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm ernie4_5 ernie4_5_moe exaone4
exaone_moe flex_olmo fuyu gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe got_ocr2 gpt-sw3 gpt2 gpt_neox gpt_oss
granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
hyperclovax jais2 laguna lfm2 llama mellum minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat
olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open
starcoder2 vaultgemma
"""
_DECODED_NAMES = """
bloom codegen diffllama doge falcon gpt_bigcode gpt_neo gptj hrm_text jetmoe moshi mpt nemotron stablelm xglm
"""
_SCORED_NAMES = """
axk1 axk2 deepseek_v3 deepseek_v32 deepseek_v4 falcon_h1 falcon_mamba gemma4 gemma4_text gemma4_unified
gemma4_unified_text glm4_moe_lite glm_moe_dsa hy_v4 jamba kimi_linear mamba mimo_v2_flash minicpm3 minimax nemotron_h
olmo_hybrid openai-gpt qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next rwkv youtu
"""

PAGED_TYPES = frozenset(_PAGED_NAMES.split())
"""Model types whose attention transformers' continuous batching can page."""
DECODED_TYPES = PAGED_TYPES | frozenset(_DECODED_NAMES.split())
"""Model types with one key and one value per layer and token, of the same sizes in every layer."""
SCORED_TYPES = DECODED_TYPES | frozenset(_SCORED_NAMES.split())
"""Model types that `TokenPolicy.evaluate` scores. vLLM may sample from those of them that it knows."""
MODEL_TYPES = {"paged": PAGED_TYPES, "decoded": DECODED_TYPES, "scored": SCORED_TYPES}
"""`EngineSpec.architectures` -> the model types that such an engine samples from."""
_FIRST_MAMBA = frozenset({"falcon_mamba", "jamba", "mamba"})
"""Model types with layers of the first Mamba."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
_LOOK_AHEAD: dict[str, tuple[object, ...]] = {"is_causal": (False,), "use_bidirectional_attention": (True, "all")}
"""Keys of configs, for example of embedding models made from decoders, and their values with which a forward pass is
not causal."""
_MORE_LOOK_AHEAD: dict[str, dict[str, tuple[object, ...]]] = {"doge": {"is_moe": (True,)}}
"""The same keys and values for single architectures: Doge's routing mixes the tokens of a batch."""


def check_architecture(config: Any, engine: str, context: int, where: str) -> None:
    """Raise MarlRayError if an engine, as its spec says, cannot sample from a model of this config.

    `where` begins the message. Model types that transformers does not know pass.
    """
    kind = config.model_type
    if kind not in CONFIG_MAPPING_NAMES:  # transformers does not know the type, so the engine's own probe decides
        return
    text = config.get_text_config()
    for name, values in (_LOOK_AHEAD | _MORE_LOOK_AHEAD.get(kind, {})).items():
        if (value := getattr(text, name, None)) in values:
            raise MarlRayError(
                f"{where}: architecture {kind} with {name}={value} lets a token depend on those behind it: expected a "
                "causal decoder that keeps keys and values, such as llama"
            )
    spec, layers = engine_spec(engine), set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if not _samples(spec, kind, layers):
        what = f"with layers of {', '.join(sorted(layers))} " if layers else ""
        other = next((name for name, possible in ENGINES.items() if _samples(possible, kind, layers)), None)
        expected = f"generation.engine={other}, or " if other else ""
        raise MarlRayError(
            f"{where}: architecture {kind} {what}cannot be sampled from with generation.engine={engine}: expected {expected}"
            "a causal decoder that keeps keys and values, such as llama"
        )
    build = spec.build_without_mamba
    if build is not None and kind in _FIRST_MAMBA and _is_installed(build):
        raise MarlRayError(
            f"{where}: architecture {kind} cannot be sampled from with generation.engine={engine} on a CPU: {build} has no "
            "kernels for the layers of Mamba"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        max_context = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if max_context is not None and context > max_context:
            raise MarlRayError(
                f"{where}: model.context={context}: expected at most {max_context}, beyond which the positions of "
                f"architecture {kind} (longrope) depend on the other prompts of a batch"
            )


def _samples(spec: EngineSpec, kind: str, layers: Collection[str]) -> bool:
    """Return True if such an engine samples from a model type with these `layers` besides those of attention."""
    return kind in MODEL_TYPES[spec.architectures] and (spec.architectures == "scored" or not layers)


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


class LogitsShape(NamedTuple):
    """The operations of an architecture on the outputs of its last layer."""

    factor: float
    """The logits are multiplied by it."""
    cap: float | None
    """The logits become cap x tanh(logits / cap); None if they stay."""
    width: int | None
    """Number of tokens that have a logit; None if all do."""


def logits_shape(lm: Any) -> LogitsShape:
    """Read the operations from a model of transformers.

    The meaning of a config's key differs between architectures, and some have keys that they do not read.
    """
    kind, config = lm.config.model_type, lm.config.get_text_config()

    def key(name: str, *others: str) -> Any:
        return None if kind in others else getattr(config, name, None)

    factor = (key("logit_scale", "mpt") or 1) * (key("lm_head_multiplier") or 1)
    scaling = key("logits_scaling") or 1
    factor = factor * scaling if kind == "hyperclovax" else factor / scaling
    return LogitsShape(factor, key("final_logit_softcapping", "gemma3"), key("unpadded_vocab_size"))
