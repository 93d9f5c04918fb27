"""The policy that the files of this folder sample from."""

import pytest
from toy_models.sampling import CONTEXT, add_weight_noise

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy


@pytest.fixture(scope="module")
def policy() -> TokenPolicy:
    built = build_token_policy(ModelConfig(preset="tiny-0.2m", context=CONTEXT), GenerationConfig(max_tokens=12), 0)
    add_weight_noise(built.lm)
    return built
