"""The language models that write samples: of a bundle, or of a run that trains them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import ValidationError

from marl_ray.config.mistakes.wording import message_of
from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import FieldError
from marl_ray.json_types import JsonMapping
from marl_ray.policies.bundles.language import TokenBundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.base import Engine
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.prompting.protocol import Tokenizer


class Author(Protocol):
    """The parts of a `TokenPolicy` that a writer reads itself; its weights are the engine's matter."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of transformers, by which prompts are encoded and responses decoded."""

    @property
    def config(self) -> ModelConfig:
        """The config of the model, which names its chat template and its context."""

    @property
    def generation(self) -> GenerationConfig:
        """The options by which its responses are sampled."""


@dataclass(frozen=True)
class WriterPolicies:
    """A team of language models, and what it was trained on."""

    agents: Mapping[str, str]
    """Agent -> the policy that plays it."""
    policies: Mapping[str, Author]
    env: JsonMapping
    """`id` and `kwargs` of the environment that the team learned in."""
    engine: Callable[[str], Engine]
    """Policy -> the engine that samples from it; asked once for each policy that writes."""
    digest: str = ""
    """Digest of the bundle; empty where there is none."""


SamplingOverrides = Mapping[str, float | None]
"""Sampling option -> its value instead of the bundle's; None leaves the bundle's own."""


def generation_of(policy: Author, overrides: SamplingOverrides, stop: tuple[str, ...] = ()) -> GenerationConfig:
    """Return the sampling options of a policy, whose responses also end at `stop`.

    Raises FieldError naming the option.
    """
    settings = {key: value for key, value in overrides.items() if value is not None}
    try:
        return GenerationConfig.model_validate(
            policy.generation.model_dump() | settings | {"stop": policy.generation.stop + stop}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise FieldError(str(first["loc"][0]), f"{message_of(first)}, got {first['input']}") from error


def authors_of_bundle(reference: str, tracking_uri: str | None) -> WriterPolicies:
    """Return the language models of a bundle, each read when it is first used.

    Raises FieldError for any other bundle.
    """
    bundle = load_bundle(reference, tracking_uri)
    if not isinstance(bundle, TokenBundle):
        instead = "; `marl-ray evaluate --episodes N` plays whole episodes with these"
        raise FieldError("policy", f"{reference} holds actor-critics, expected language models{instead}")
    return authors_of(bundle)


def authors_of(bundle: TokenBundle) -> WriterPolicies:
    """Return the language models of a bundle that is open."""
    policies = bundle.policies
    return WriterPolicies(
        bundle.agents, policies, bundle.manifest.lineage.env, lambda name: make_engine(policies[name]), bundle.digest
    )
