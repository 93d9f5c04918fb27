"""Drawing a token from logits: temperature, top-k and top-p against plain loops, frequencies against probabilities."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.policies.engines.decoding.sampling import draw
from marl_ray.policies.language.philox import token_uniforms


def reference_choice(logits: list[float], uniform: float, temperature: float, top_k: int, top_p: float) -> int:
    """One token by plain loops."""
    weights = torch.tensor(logits, dtype=torch.float32).div(temperature).softmax(0).tolist()
    allowed = sorted(range(len(weights)), key=lambda token: -weights[token])[: top_k or None]
    inside, total = [], 0.0
    for token in allowed:
        if total < top_p * sum(weights[t] for t in allowed):
            inside.append(token)
        total += weights[token]
    target = uniform * sum(weights[token] for token in inside)
    for token in sorted(inside):
        target -= weights[token]
        if target < 0:
            return token
    return max(inside)


@settings(max_examples=60)
@given(
    st.lists(st.integers(-60, 60), min_size=2, max_size=8, unique=True),
    st.integers(0, 9),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([1.0, 0.4, 3.0]),
    st.integers(0, 1000),
)
def test_tokens_are_drawn_as_a_slow_reference_draws(words, top_k, top_p, temperature, stream):
    logits = [number / 13 for number in words]
    uniforms = token_uniforms(0, [stream], 6)[0]
    rows = torch.tensor([logits] * 6)
    tokens, log_probs = draw(rows, torch.from_numpy(uniforms), None, temperature, top_k, top_p)
    assert tokens.tolist() == [reference_choice(logits, u, temperature, top_k, top_p) for u in uniforms]
    torch.testing.assert_close(log_probs, rows.div(temperature).log_softmax(-1)[range(6), tokens])


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0]).repeat(20_000, 1)
    uniforms = torch.from_numpy(token_uniforms(0, range(20_000), 1)[:, 0])
    tokens, _ = draw(logits, uniforms, None, 1.0)
    share = tokens.bincount(minlength=4) / 20_000
    torch.testing.assert_close(share, logits[0].softmax(0), atol=0.012, rtol=0)
    assert share[2] == 0
    assert draw(torch.zeros(1, 3), torch.tensor([1 - 2.0**-52], dtype=torch.float64), None, 1.0)[0].item() == 2
