"""One forward pass for responses that share prompts, each of which is read once.

All tokens stand one after another in a single row with hardly any padding, so the parts of a model that work token by
token run once over a group's prompt. Only attention must know which sequence each token belongs to; transformers calls
it as an attention function of ours.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from marl_ray.policies.language.sharding.joint_pass import Heads

ATTENTION_NAME = "marl_ray_packed"
LENGTH_MULTIPLE = 32
"""The length of a row is a multiple of this number. In bfloat16, products of other lengths are slower, and oneDNN
compiles a kernel per length."""
HIDDEN_SCORE = -1e4
"""Number that is added to the scores of hidden keys: finite, and so low that their weight is zero in float16 too."""


class PackedSequences(NamedTuple):
    """Sequences of R responses to G distinct prompts as one row of S tokens.

    All prompts come first, then all responses, then some padding.
    """

    ids: Tensor
    """(1, S) int64."""
    positions: Tensor
    """(1, S) int64, from the begin of each sequence."""
    layout: "Layout"


class Layout(NamedTuple):
    """The tree of shared prefixes: the prompt that each response continues, and the places of all tokens."""

    prompts: Tensor
    """(G, P) the prompts' tokens in S, padded on the right."""
    responses: Tensor
    """(R, T) the responses' tokens in S, padded on the right. The last token of each is left out, because nothing
    follows it."""
    prompt_numbers: Tensor
    """(R,) number of each response's prompt."""
    hidden: Tensor
    """(R, 1, T, P + T) float32: HIDDEN_SCORE for keys of prompt and response that no token of a response may see; else 0."""
    back: Tensor
    """(S,) the place of each token in G * P and then R * T; 0 for the padding at the row's end."""
    heads: Heads | None = None
    """The exchange with the workers that have other parts of S; None where this one has all of S."""


def pack(
    prompts: Tensor, responses: Tensor, mask: Tensor, parts: int = 1
) -> tuple[PackedSequences, Tensor, Tensor, Tensor]:
    """Pack sequences, and return them with the places, rows and steps of their decisions.

    The place is where in S a decision is predicted. The place, row and step are (N,) each. `prompts` (R, P) are on the
    right with -1 before them, none empty; `responses` and `mask` are (R, T), with a decision. S can be divided into
    `parts` of equal lengths.
    """
    device = mask.device
    rows, steps = mask.nonzero(as_tuple=True)
    distinct, prompt_numbers = torch.unique(prompts, dim=0, return_inverse=True)
    read = (distinct >= 0).sum(1)
    # The model reads all tokens of a response but the last.
    width = mask.shape[1]
    written = (mask * torch.arange(width, device=device)).amax(1)
    first, seen = _place_tokens(read, 0)
    begun, answered = _place_tokens(written, int(read.sum()))
    ids = torch.cat([distinct[distinct >= 0], responses[:, : answered.shape[1]][answered]])
    ahead = torch.arange(seen.shape[1], device=device).expand_as(seen)[seen]
    behind = (read[prompt_numbers][:, None] + torch.arange(answered.shape[1], device=device))[answered]
    # The last token of a prompt predicts the first token of a response.
    last = read.cumsum(0) - 1
    starts = written.cumsum(0) - written + read.sum()
    places = torch.where(steps == 0, last[prompt_numbers][rows], starts[rows] + steps - 1)
    back = torch.cat([seen.flatten().nonzero()[:, 0], seen.numel() + answered.flatten().nonzero()[:, 0]])
    ids, positions, back = (
        functional.pad(part, (0, -len(part) % (LENGTH_MULTIPLE * parts)))
        for part in (ids, torch.cat([ahead, behind]), back)
    )
    causal = torch.ones(answered.shape[1], answered.shape[1], dtype=torch.bool, device=device).tril()
    visible = torch.cat(
        [seen[prompt_numbers][:, None].expand(-1, len(causal), -1), causal.expand(len(prompt_numbers), -1, -1)], 2
    )
    hidden = torch.zeros(visible.shape, device=device).masked_fill(~visible, HIDDEN_SCORE)[:, None]
    layout = Layout(first, begun, prompt_numbers, hidden, back)
    return PackedSequences(ids[None], positions[None], layout), places, rows, steps


def _place_tokens(lengths: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return the places (N, L) of the tokens of N sequences that stand one after another from `start`, padded.

    Returns also a bool (N, L) that is True where there is a token.
    """
    columns = torch.arange(int(lengths.max()), device=lengths.device)
    inside = columns < lengths[:, None]
    return torch.where(inside, start + (lengths.cumsum(0) - lengths)[:, None] + columns, 0), inside


def use_packed_attention(lm: Any) -> None:
    """Let a model take `layout=` in its forward pass.

    Without that argument the model works as before.
    """
    lm.set_attn_implementation(ATTENTION_NAME)


def last_hidden_states(lm: Any, packed: PackedSequences, workers: DeviceMesh | None = None) -> Tensor:
    """Return the last hidden states (S, H) of a model that `use_packed_attention` was called on.

    With `workers`, who call it together, they are those of this worker's part of S.
    """
    if workers is not None and workers.size() > 1:
        ids, positions = (x.chunk(workers.size(), 1)[workers.get_local_rank()] for x in packed[:2])
        packed = PackedSequences(ids, positions, packed.layout._replace(heads=Heads(workers)))
    # The layout's mask is passed on, because without one transformers would build a mask of S x S.
    no_mask = packed.ids.new_zeros(1, 1, 1, 1)
    outputs = lm.get_decoder()(
        input_ids=packed.ids,
        position_ids=packed.positions,
        attention_mask=no_mask,
        use_cache=False,
        layout=packed.layout,
    )
    hidden: Tensor = outputs.last_hidden_state[0]
    return hidden


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Return the attention of (1, heads, S, width) queries; (1, S, heads, width)."""
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    if layout.heads is not None:
        query, key, value = map(layout.heads.of_all_tokens, (query, key, value))
    # In bfloat16 the backward pass of torch's kernel for CPUs takes several times as long as in float32.
    dtype = query.dtype if query.is_cuda else torch.float32
    q, k, v = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
    queries, keys, values = (_arrange_by_sequence(part, layout.prompts) for part in (q, k, v))
    # Padding stands on the right, which causal attention does not read.
    mixed = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True
    )
    parts = [mixed.transpose(1, 2).flatten(0, 1)]
    if layout.responses.shape[1]:
        queries, new_keys, new_values = (_arrange_by_sequence(part, layout.responses) for part in (q, k, v))
        keys = torch.cat([keys[layout.prompt_numbers], new_keys], 2)
        values = torch.cat([values[layout.prompt_numbers], new_values], 2)
        if q.is_cuda:  # its kernels take a mask or shared keys, but not both
            keys, values = (part.repeat_interleave(queries.shape[1] // part.shape[1], 1) for part in (keys, values))
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=layout.hidden.to(q.dtype),
            scale=scaling,
            enable_gqa=True,
        )
        parts.append(mixed.transpose(1, 2).flatten(0, 1))
    attended = torch.cat(parts).index_select(0, layout.back)[None].to(query.dtype)
    return attended if layout.heads is None else layout.heads.of_own_tokens(attended), None


def _arrange_by_sequence(tokens: Tensor, places: Tensor) -> Tensor:
    """Return the tokens (S, heads, width) as (N, heads, L, width), by their places (N, L) in S."""
    arranged: Tensor = tokens.index_select(0, places.flatten()).unflatten(0, places.shape)
    return arranged.transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, _attend)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
