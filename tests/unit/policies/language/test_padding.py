"""Prompts and responses of different lengths as tensors."""

from hypothesis import given
from hypothesis import strategies as st

from marl_ray.policies.language.padding import pad_sequences


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1)), max_size=5)
)
def test_padding_keeps_every_token(pairs):
    prompts, responses, mask = pad_sequences([prompt for prompt, _ in pairs], [response for _, response in pairs])
    assert [(p[p >= 0].tolist(), r[m].tolist()) for p, r, m in zip(prompts, responses, mask, strict=True)] == pairs
