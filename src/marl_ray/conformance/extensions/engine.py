"""Checks engines by the responses of a small model, whose log-probabilities the policy itself computes too."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.conformance.extensions.properties import (
    CheckedProperty,
    check_property,
    load_part,
    refuse_unknown_settings,
)
from marl_ray.conformance.torch_threads import one_thread
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ENGINE
from marl_ray.policies.engines.base import Completion, Engine, Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy

SEED = 3
"""Seed of the model's weights and of the samples; any would do."""
TOLERANCE = 0.02
"""Maximum difference of a log-probability from the policy's own, in nats."""
PROMPTS = [Prompt(tuple(range(40, 41 + 5 * (number // 2))), stream=number) for number in range(6)]
"""Two responses to each of three prompts."""


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Sample from a model with random weights; an engine has no settings."""
    refuse_unknown_settings("engine", settings)
    load_part(ENGINE, name)
    with one_thread():
        policy = _build_policy(name)
        engines: list[Engine] = []
        made = check_property("making", "it is made from a policy", lambda: engines.append(make_engine(policy)))
        yield made
        if made.failure is not None:
            return
        engine = engines[0]
        try:
            yield from _check_sampling(engine, policy)
        finally:
            engine.close()


def _build_policy(engine: str) -> TokenPolicy:
    """Return a small policy that samples by an engine, with random weights whose distributions are not flat."""
    generation = GenerationConfig(max_tokens=8, temperature=0.7, engine=engine)
    policy = build_token_policy(ModelConfig(preset="tiny-0.2m", context=64), generation, SEED)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return policy


def _check_sampling(engine: Engine, policy: TokenPolicy) -> Iterator[CheckedProperty]:
    engine.start()
    engine.update_weights()
    responses: list[Completion] = []

    def sample() -> str | None:
        responses.extend(engine.generate(PROMPTS, SEED))
        return _check_lengths(responses, policy)

    sampled = check_property("responses", "a response to every prompt, which ends where it must", sample)
    yield sampled
    if sampled.failure is not None:
        return
    yield check_property(
        "log-probabilities",
        "they are those of the policy at its temperature",
        lambda: _check_log_probs(policy, responses),
    )
    yield check_property(
        "streams",
        "a response depends on its prompt, its stream and the seed, not on the others of its batch",
        lambda: _check_streams(engine, responses),
    )
    yield check_property("tokens", "`stream` gives the tokens of `generate`", lambda: _check_tokens(engine, responses))
    yield check_property("prompts", "an empty or too long prompt is refused", lambda: _check_refusals(engine))
    yield check_property(
        "weights", "after `update_weights` it samples from the new weights", lambda: _check_new_weights(engine, policy)
    )


def _check_lengths(responses: Sequence[Completion], policy: TokenPolicy) -> str | None:
    if len(responses) != len(PROMPTS):
        return f"{len(responses)} responses to {len(PROMPTS)} prompts"
    max_tokens = policy.generation.max_tokens
    for number, response in enumerate(responses):
        if not 0 < len(response.ids) <= max_tokens or len(response.ids) != len(response.log_probs):
            counts = f"{len(response.ids)} ids, {len(response.log_probs)} log_probs"
            return f"response {number}: {counts}, max_tokens {max_tokens}"
        at_end = response.ids[-1] in policy.end_tokens
        if response.ended != at_end or any(token in policy.end_tokens for token in response.ids[:-1]):
            return f"response {number}: ended is {response.ended}, and its ids are {response.ids}"
        if not response.ended and len(response.ids) < max_tokens:
            return f"response {number}: neither an end token nor {max_tokens} tokens"
        if response.version != policy.version:
            return f"response {number}: version is {response.version}, expected the policy's, {policy.version}"
    return None


def _check_log_probs(policy: TokenPolicy, responses: Sequence[Completion]) -> str | None:
    for number, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
        ids, device = torch.tensor([response.ids]), policy.device
        with torch.no_grad():
            log_probs = policy.evaluate(
                torch.tensor([prompt.ids]).to(device), ids.to(device), torch.ones_like(ids, dtype=torch.bool).to(device)
            ).log_probs[0]
        difference = float((log_probs.cpu() - torch.tensor(response.log_probs)).abs().max())
        if not difference <= TOLERANCE:
            return f"response {number}: a log-probability differs by {difference:.3g} from the policy's"
    return None


def _check_streams(engine: Engine, responses: Sequence[Completion]) -> str | None:
    for number, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
        if engine.generate([prompt], SEED)[0].ids != response.ids:
            return f"response {number} is another one when it is asked for alone"
    if all(
        again.ids == response.ids for again, response in zip(engine.generate(PROMPTS, SEED + 1), responses, strict=True)
    ):
        return "another seed gives the same responses"
    return None


def _check_tokens(engine: Engine, responses: Sequence[Completion]) -> str | None:
    tokens = list(engine.stream(PROMPTS[0], SEED))
    if [token.id for token in tokens] != responses[0].ids:
        return f"got {[token.id for token in tokens]}, expected {responses[0].ids}"
    finish = "stop" if responses[0].ended else "length"
    return None if tokens[-1].finish == finish else f"the last token's finish is {tokens[-1].finish}, expected {finish}"


def _check_refusals(engine: Engine) -> str | None:
    for what, prompt in (("empty", Prompt((), 0)), ("too long", Prompt((65,) * 64, 0))):
        try:
            engine.generate([prompt], SEED)
        except MarlRayError:
            continue
        return f"a prompt that is {what} raises no MarlRayError"
    return None


def _check_new_weights(engine: Engine, policy: TokenPolicy) -> str | None:
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.mul_(0.5)
    policy.version += 1
    engine.update_weights()
    responses = engine.generate(PROMPTS, SEED)
    return _check_lengths(responses, policy) or _check_log_probs(policy, responses)
