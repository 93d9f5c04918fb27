"""Every causal language model that transformers builds from a config is sampled from rightly, or refused by name."""

import pytest
from toy_models.architectures import ARCHITECTURES, sampling_error, scoring_error, tiny_lm

from marl_ray.config import engine_spec
from marl_ray.policies.engines.models.architectures import DECODED_TYPES, MODEL_TYPES, PAGED_TYPES, SCORED_TYPES

TOLERANCE = 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_sampled_has_the_log_probs_of_a_full_pass(architecture):
    try:
        lm = tiny_lm(architecture)
    except Exception as error:
        known = [kind for kind, names in MODEL_TYPES.items() if architecture in names]
        assert not known, f"{architecture} is allowed for {known}, but is not checked: {error}"
        pytest.skip(f"none is built: {error}")
    if architecture in SCORED_TYPES:
        assert scoring_error(lm) < TOLERANCE
    for engine in ("torch", "transformers"):
        if architecture in MODEL_TYPES[engine_spec(engine).architectures]:
            assert sampling_error(lm, engine) < TOLERANCE


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_neox", "mixtral", "bloom", "opt"])
def test_a_handful_has_the_log_probs_of_a_full_pass(architecture):
    lm = tiny_lm(architecture)
    assert architecture in DECODED_TYPES and scoring_error(lm) < TOLERANCE and sampling_error(lm, "torch") < TOLERANCE
    if architecture in PAGED_TYPES:
        assert sampling_error(lm, "transformers") < TOLERANCE


@pytest.mark.parametrize(
    "architecture",
    [
        *("cohere", "hyperclovax", "granite", "gemma2", "mpt"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("falcon_h1", "gemma3")),
    ],
)
def test_logits_are_shaped_as_the_architecture_shapes_them(architecture):
    """Granite divides by `logits_scaling` and HyperCLOVA X multiplies; MPT has a `logit_scale` that it does not read."""
    assert scoring_error(tiny_lm(architecture)) < TOLERANCE
