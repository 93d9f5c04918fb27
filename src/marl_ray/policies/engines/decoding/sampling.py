"""Sample tokens from logits."""

import torch
from torch import Tensor


def draw(
    logits: Tensor,
    uniforms: Tensor,
    greedy: Tensor | None,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    allowed: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return one token per row and its log-probability: ((R,) int64, (R,) float32).

    `logits` (R, V); `uniforms` (R,) float64, as `token_uniforms` makes them; `greedy` (R,) bool marks rows that take
    the most likely token, None if no row does. Log-probabilities are of softmax(logits / temperature) over all tokens;
    `allowed` (R, V) bool, and after it top_k and top_p, only forbid tokens. A token that is exactly as likely as the
    last one within the limit is within it too. `added` (R, V) is added to the logits from which tokens are drawn, and
    not to those of the log-probabilities.

    A row takes the first token, in the vocabulary's order, whose cumulative probability exceeds uniform * sum, summed in
    float64. Logits that differ by some relative rounding e move every edge by at most about e, so two batch layouts choose
    different tokens only where the uniform falls between an edge and its moved self: with probability of the order of
    e times the number of likely tokens.
    """
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    within = log_p if added is None else torch.log_softmax((logits.float() + added) / temperature, -1)
    # The allowed tokens may be so unlikely that their probabilities are zero in float32.
    within = within if allowed is None else torch.log_softmax(within.masked_fill(~allowed, -torch.inf), -1)
    p = _drop_unlikely(within.exp(), top_k, top_p)
    edges = p.double().cumsum(-1)
    tokens = torch.searchsorted(edges, uniforms[:, None] * edges[:, -1:], right=True)
    # It is beyond the last token only if the logits are NaN, and then the log-probability is NaN too.
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], within.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], log_p.gather(-1, tokens)[:, 0]


def _drop_unlikely(p: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the probabilities (R, V) with zeros where top_k and top_p forbid a token; not renormalised.

    top_p (Holtzman et al. 2020, arXiv 1904.09751, section 3.1) is a share of what top_k has left.
    """
    if 0 < top_k < p.shape[-1]:
        p = p.masked_fill(p < p.topk(top_k).values[:, -1:], 0.0)
    if top_p < 1:
        ordered = p.sort(-1, descending=True).values
        before = ordered.double().cumsum(-1) - ordered
        inside = before < top_p * p.double().sum(-1, keepdim=True)
        least = ordered.gather(-1, inside.sum(-1, keepdim=True) - 1)
        p = p.masked_fill(p < least, 0.0)
    return p
