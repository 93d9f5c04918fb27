"""Teams of language models: their policies, the collector that they play in, and their bundle."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pettingzoo import AECEnv
from torch import Tensor

from marl_ray.config import RunConfig
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.actor_critic import load_bundle
from marl_ray.policies.bundles.language import Models, TokenBundle
from marl_ray.policies.language.token_policy import TokenPolicy, adopt, begin_with, build_token_policy
from marl_ray.rollout.protocol import CollectPlan
from marl_ray.rollout.served.collector import ResponseBlock, ServedCollector
from marl_ray.rollout.text.collector import TextBatch, TextCollector
from marl_ray.rollout.text.transcripts import Transcript, means
from marl_ray.training.collectives import gather
from marl_ray.training.texts.served_data import Reader, read_data
from marl_ray.training.tracking.mlflow_run import uri_of


def build_policies(config: RunConfig, agents: Mapping[str, Sequence[str]]) -> dict[str, TokenPolicy]:
    """Make the team's policies on CPU, equal on every worker. A policy that learns has the critics that its algorithm
    needs. The weights of `model.path`, or of a bundle in their place, stay in their files until the policy is sharded or
    copied."""
    policies = {}
    for number, (name, members) in enumerate(agents.items()):
        spec, own = config.spec_of(name), config.team[name]
        assert own.model is not None
        policies[name] = build_token_policy(
            own.model,
            own.generation,
            config.seed * 1000 + number,
            not own.frozen and spec.critic != "none",
            config.signals if spec.costs and not own.frozen else 0,
            uri_of(config),
            unread=True,
        )
        weights = bundle_weights(config, name, members[0])
        if weights is not None:
            models, chosen = weights
            try:
                if policies[name].unread is None:
                    adopt(policies[name], models[chosen])
                else:
                    begin_with(policies[name], models.stored(chosen))
                policies[name].base = f"{own.bundle}/{chosen}"
            except MarlRayError as error:
                raise MarlRayError(f"team.{name}.{error}") from error
    return policies


def bundle_weights(config: RunConfig, name: str, agent: str) -> tuple[Models, str] | None:
    """The policies of `team.NAME.bundle`, with their weights still unread, and the name of the one that plays `agent`;
    None if no bundle is given."""
    reference = config.team[name].bundle
    if reference is None:
        return None
    bundle = load_bundle(reference, uri_of(config))
    if not isinstance(bundle, TokenBundle):
        raise MarlRayError(f"team.{name}.bundle: {reference!r} holds actor-critics, expected language models")
    if agent not in bundle.agents:
        raise MarlRayError(f"team.{name}.bundle: {reference!r} has no policy for agent {agent!r}")
    return bundle.policies, bundle.agents[agent]


def build_text_collector(
    config: RunConfig,
    agents: Mapping[str, Sequence[str]],
    copies: range,
    plan: CollectPlan,
    state: Mapping[str, Any] | None = None,
    data: Mapping[str, Sequence[ResponseBlock]] | None = None,
) -> TextCollector:
    """Make the collector of one worker's share of the environment copies, or, if the run has data, of its share of
    `data`."""

    def make() -> AECEnv:
        return cast(AECEnv, make_env(config.env, config.constraints))

    common = (make, agents, copies, plan, config.seed, config.signals, state, gather)
    if data is not None:
        return ServedCollector(*common, data, config.train.env_copies)
    return TextCollector(*common, config.train.curriculum)


def build_data(
    config: RunConfig, agents: Mapping[str, Sequence[str]], models: Mapping[str, Any]
) -> dict[str, list[ResponseBlock]]:
    """Read the run's `data` as token ids of these policies."""
    return read_data(config, agents, {name: Reader(model.lm, model.tokenizer) for name, model in models.items()})


def response_metrics(batch: TextBatch) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Gather metrics of all workers' responses, and the transcripts of the drawn episodes; every worker calls it.

    The metrics are the tokens that are trained on, the tokens of their prompts, and means of roles and environment.
    """
    rows = [own for own in batch.trajectories.values() if own.prompts is not None]
    trained = sum(int(own.mask.sum()) for own in rows)
    prompts = sum(int((cast(Tensor, own.prompts) >= 0).sum()) for own in rows)
    parts = gather((trained, prompts, batch.sums, batch.transcripts))
    counts = {
        "tokens": float(sum(part[0] for part in parts)),
        "prompt_tokens": float(sum(part[1] for part in parts)),
    }
    return counts | means(part[2] for part in parts), [_plain(transcript) for part in parts for transcript in part[3]]


def _plain(transcript: Transcript) -> dict[str, Any]:
    return transcript._asdict() | {"lines": [line._asdict() for line in transcript.lines]}
