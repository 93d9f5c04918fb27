"""Small bundles of language models and questions to them, for the tests of serving."""

import json
from pathlib import Path
from typing import Any

import torch

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.token_policy import build_token_policy
from marl_ray.serving.asgi import Gateway
from toy_serving.gateways import LINEAGE

CONTEXT = 2048
"""Tokens."""
ASK = {"session_id": "s", "prompt": "hello", "seed": 5}
CHAT = {"model": "exp", "messages": [{"role": "user", "content": "hello"}], "user": "s", "seed": 5}

TEXT = {"model": "exp", "prompt": "hello", "user": "s", "seed": 5}


def make_text_bundle(
    folder: Path,
    seed: int,
    agents: dict[str, str] | None = None,
    broken: bool = False,
    context: int = CONTEXT,
    template: str | None = None,
) -> str:
    """Small random models, one per policy of `agents` (agent -> policy).

    With `broken` their logits are not finite. Greedy, and mostly otherwise, their responses end by length only.
    """
    agents = agents or {"writer": "lm"}
    generation = GenerationConfig(max_tokens=12, temperature=0.8)
    policies = {}
    for number, name in enumerate(dict.fromkeys(agents.values())):
        model = ModelConfig(preset="tiny-0.2m", context=context)
        policy = plain_copy(build_token_policy(model, generation, seed + 100 * number, False, 0))
        if template is not None:
            policy.tokenizer.chat_template = template
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


async def post(client: Any, path: str, body: dict[str, Any], **more: Any) -> Any:
    answer = await client.post(path, json=body, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(client: Any, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await client.post(path, json=body | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def rows(app: Gateway) -> int:
    arms: list[Any] = [arm for router in app.service.endpoints.routers.values() for arm in router.arms.values()]
    return sum(arm.rows for arm in arms)
