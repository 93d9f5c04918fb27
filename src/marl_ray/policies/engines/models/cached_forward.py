"""The interface of a language model to a decoder, and its implementation by transformers' own forward."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from marl_ray.errors import MarlRayError, one_line
from marl_ray.policies.engines.decoding.key_values import CacheShape


class CachedModel(Protocol):
    """A causal language model that leaves its cache to the caller."""

    shape: CacheShape

    def prefill(self, ids: Tensor) -> Tensor:
        """Return the keys and values (S, layers, 2, heads, P, width) of left-aligned sequences (S, P) int64.

        The values after a sequence's end do not matter.
        """

    def decode(self, ids: Tensor, positions: Tensor, cache: Tensor, hidden: Tensor | None) -> Tensor:
        """Return the logits (R, V) after one more token per row, int64 (R,), at positions (R,).

        `cache` and `hidden` are as `KeyValues.column` gives them. Writes the cache's last column.
        """


class _Column(DynamicLayer):
    """One layer of a cache whose last column is to be written."""

    def __init__(self, cache: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers'
        self._columns = cache

    def get_seq_length(self) -> int:
        """Return the number of tokens before the one that is being written."""
        return self._columns.shape[-2] - 1

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (R, heads, 1, width) of the newest token, and return those of all tokens."""
        self._columns[:, 0, :, -1:] = key_states
        self._columns[:, 1, :, -1:] = value_states
        return self._columns[:, 0], self._columns[:, 1]


class ForwardModel(CachedModel):
    """Any causal language model of transformers that keeps one key and one value per layer and token."""

    def __init__(self, lm: nn.Module) -> None:
        self._lm: Any = lm
        self.shape = _probe(lm)

    @override
    def prefill(self, ids: Tensor) -> Tensor:
        cache: Any = DynamicCache()
        self._lm(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return torch.stack([torch.stack([layer.keys, layer.values], 1) for layer in cache.layers], 1)

    @override
    def decode(self, ids: Tensor, positions: Tensor, cache: Tensor, hidden: Tensor | None) -> Tensor:
        layers: list[Any] = [_Column(cache[:, layer]) for layer in range(self.shape.layers)]
        seen = None if hidden is None else (hidden[:, 0, 0] == 0).long()
        logits: Tensor = self._lm(
            input_ids=ids[:, None],
            attention_mask=seen,
            position_ids=positions[:, None],
            past_key_values=Cache(layers=layers),
            use_cache=True,
        ).logits
        return logits[:, -1]


@torch.no_grad()
def _probe(lm: Any) -> CacheShape:
    """Return the cache's shape, found by running one token.

    Raises MarlRayError for models with another kind of cache.
    """
    device = next(lm.parameters()).device
    cache: Any = DynamicCache()
    kind = lm.config.model_type
    expected = "expected a causal decoder that keeps keys and values of one size, such as llama"
    try:
        lm(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), past_key_values=cache, use_cache=True)
        shapes = {tuple(part.shape) for layer in cache.layers for part in (layer.keys, layer.values)}
    except Exception as error:  # a model without such a cache may raise anything
        raise MarlRayError(
            f"architecture {kind} takes no plain key-value cache ({one_line(error)}): {expected}"
        ) from error
    if len(shapes) != 1:
        raise MarlRayError(f"architecture {kind} keeps no plain key-value cache: {expected}")
    [(_, heads, _, width)] = shapes
    keys = cache.layers[0].keys
    return CacheShape(len(cache.layers), heads, width, keys.dtype, device)
