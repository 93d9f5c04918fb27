"""Small bundles of language models, for the tests of serving."""

from pathlib import Path
from typing import Any

import torch
from toy_gateways import LINEAGE

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.config.model import GenerationConfig, ModelConfig
from marl_ray.policies.token_bundle import save_token_bundle
from marl_ray.policies.token_policy import build_token_policy, plain_copy

CONTEXT = 2048


def make_text_bundle(
    folder: Path, seed: int, agents: dict[str, str] | None = None, broken: bool = False, context: int = CONTEXT
) -> str:
    """Small random models, one per policy of `agents` (agent -> policy); with `broken` their logits are not finite.

    Greedy, and mostly otherwise, their responses end by length only.
    """
    agents = agents or {"writer": "lm"}
    generation = GenerationConfig(max_tokens=12, temperature=0.8)
    policies = {}
    for number, name in enumerate(dict.fromkeys(agents.values())):
        model = ModelConfig(preset="tiny-0.2m", context=context)
        policy = plain_copy(build_token_policy(model, generation, seed + 100 * number, False, 0))
        generator = torch.Generator().manual_seed(seed + 100 * number)
        with torch.no_grad():
            for parameter in policy.lm.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            policy.lm.get_input_embeddings().weight[policy.tokenizer.eos_token_id] = 0  # tied to the output
            if broken:
                policy.lm.model.norm.weight.fill_(torch.nan)
        policies[name] = policy
    return str(save_token_bundle(folder, agents, policies, LINEAGE))


def text_config(bundles: dict[str, str], folder: Path, **more: Any) -> GatewayConfig:
    """An experiment of all these bundles; generous deadlines, for machines with much to do."""
    arms = {arm: {"bundle": bundle} for arm, bundle in bundles.items()}
    experiments = [{"name": "exp", "arms": arms, "min_outcomes": 5}]
    where = {"database": f"sqlite:///{folder}/experiments.db", "spool": str(folder / "spool")}
    return parse_config(GatewayConfig, {"experiments": experiments, "request_timeout_s": 60} | where | more)
