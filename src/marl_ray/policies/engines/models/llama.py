"""A short forward for decoders of the Llama family.

Rotary positions (Su et al. 2021, arXiv 2104.09864), RMS norms before each part, grouped queries (Ainslie et al. 2023,
arXiv 2305.13245), gated MLPs, and, if the model has them, biases of the query, key and value projections and norms of
queries and keys. A step of a small model takes as long as its Python code, so there is little of that: projections of
the same input are one product, rotary tables are made once, and the queries that share keys are a sequence to the
attention kernel, so that no key is repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from marl_ray.policies.engines.decoding.key_values import CacheShape
from marl_ray.policies.engines.models.cached_forward import CachedModel
from marl_ray.policies.engines.models.joint_products import Product, join_layers

LLAMA_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions that do not depend on the length of the sequence."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries (N, heads, width), keys and values (N, groups, width)) to (N, heads * width)."""


@dataclass(frozen=True)
class _Layer:
    before_attention: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Product
    before_mlp: Tensor
    gate_up: Product
    down: Product


def is_llama(lm: Any, context: int) -> bool:
    """Return True if `LlamaModel` computes the same as this model for sequences of at most `context` tokens."""
    if type(lm).__name__ not in LLAMA_CLASSES or not type(lm).__module__.startswith("transformers."):
        return False
    window = getattr(lm.config, "sliding_window", None)
    without_bias = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return (
        (window is None or window >= context)
        and lm.config.rope_parameters["rope_type"] in ROTARY_KINDS
        and all(layer.get_submodule(name).bias is None for layer in lm.model.layers for name in without_bias)
    )


class LlamaModel(CachedModel):
    """A forward pass that reads the weights of a transformers model.

    Weights that are multiplied together become views of one tensor, in place.
    """

    def __init__(self, lm: Any, context: int) -> None:
        config, model = lm.config, lm.model
        self._model, self._head = model, join_layers(lm.lm_head)
        self._heads: int = config.num_attention_heads
        self._groups: int = config.num_key_value_heads
        self._width: int = model.layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self._activation = model.layers[0].mlp.act_fn
        self._layers = [_read_layer(layer) for layer in model.layers]
        weight = model.embed_tokens.weight
        self.shape = CacheShape(len(self._layers), self._groups, self._width, weight.dtype, weight.device)
        with torch.no_grad():
            positions = torch.arange(context, device=weight.device)[None]
            cos, sin = model.rotary_emb(weight[:1], positions)
        half = self._width // 2
        # A rotation swaps the halves of a head and changes the sign of one half. The table contains that sign.
        self._cos = cos[0, :, None]
        self._sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)

    @override
    def prefill(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        caches = []

        def attend(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            q, k, v = (part.view(rows, length, -1, self._width).transpose(1, 2) for part in (queries, keys, values))
            caches.append(torch.stack([k, v], 1))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).reshape(rows * length, -1)

        cos, sin = (table[:length].repeat(rows, 1, 1) for table in (self._cos, self._sin))
        self._run(ids.flatten(), cos, sin, attend)
        return torch.stack(caches, 1)

    @override
    def decode(self, ids: Tensor, positions: Tensor, cache: Tensor, hidden: Tensor | None) -> Tensor:
        rows, grouped = len(ids), self._heads // self._groups

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            k, v = cache[:, layer, 0], cache[:, layer, 1]
            k[:, :, -1] = keys
            v[:, :, -1] = values
            q = queries.reshape(rows, self._groups, grouped, self._width)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden).reshape(rows, -1)

        x = self._run(ids, self._cos[positions], self._sin[positions], attend)
        return self._head(x)

    def _run(self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the last hidden states (N, hidden) of tokens (N,).

        `attend` decides which keys each token attends to.
        """
        x = functional.embedding(ids, self._model.embed_tokens.weight)
        hidden, rotated = x.shape[-1:], self._heads + self._groups
        for index, layer in enumerate(self._layers):
            inputs = functional.rms_norm(x, hidden, layer.before_attention, self._eps)
            qkv = layer.qkv(inputs).view(len(ids), -1, self._width)
            qk, values = qkv[:, :rotated], qkv[:, rotated:]
            if layer.q_norm is not None:
                parts = (qk[:, : self._heads], layer.q_norm), (qk[:, self._heads :], layer.k_norm)
                qk = torch.cat(
                    [functional.rms_norm(part, (self._width,), scale, self._eps) for part, scale in parts], 1
                )
            qk = torch.addcmul(qk * cos, qk.roll(self._width // 2, -1), sin)
            mixed = attend(index, qk[:, : self._heads], qk[:, self._heads :], values)
            x = torch.addmm(x, layer.out.widen_input(mixed), layer.out.weight.t())
            inputs = functional.rms_norm(x, hidden, layer.before_mlp, self._eps)
            gate, up = layer.gate_up(inputs).chunk(2, -1)
            x = torch.addmm(x, layer.down.widen_input(self._activation(gate) * up), layer.down.weight.t())
        return functional.rms_norm(x, hidden, self._model.norm.weight, self._eps)


def _read_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        layer.input_layernorm.weight,
        join_layers(attention.q_proj, attention.k_proj, attention.v_proj),
        attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        join_layers(attention.o_proj),
        layer.post_attention_layernorm.weight,
        join_layers(mlp.gate_proj, mlp.up_proj),
        join_layers(mlp.down_proj),
    )
