"""Off-policy evaluation of bundles of language models on logged tokens, before any user meets the bundle.

As in `acts`, a unit's importance weight is the product, over all tokens of its responses, of the chance that the bundle
writes the logged token over the chance with which it was written. Units are left out if one of their responses was not
drawn from its model's full distribution, because it was written greedily, or with `top_k` or `top_p`, whose chances the
log does not hold. The bundle is judged at the temperature that the request chose, otherwise at its own. Prompts, stop
strings, limits of length and the points where clients left are taken from the log.

Weights of long responses spread over many orders of magnitude. The estimates are useful only if responses are short or
if the bundle is close to the served one. The effective number of units shows it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.off_policy.estimates import MAX_FEATURES, OffPolicyEstimate, combine_estimates, cross_fit
from marl_ray.experiments.statistics.off_policy import doubly_robust, snips
from marl_ray.policies.bundles.language import TokenBundle
from marl_ray.policies.language.padding import pad_sequences
from marl_ray.policies.language.token_policy import TokenPolicy
from marl_ray.rollout.served.texts import ServedText, check_readable, group_by_policy, read_served

RESPONSES_PER_PASS = 16
"""Number of responses in one pass."""


def estimate_text_outcome(
    bundle: TokenBundle, path: str, *, floor: float, min_effective: float = 100.0, alpha: float = 0.05
) -> OffPolicyEstimate:
    """Estimate a bundle's mean outcome from exported texts (file, folder or URI).

    Arguments and errors are as in `acts.estimate_outcome`.
    Raises MarlRayError for texts that were not all drawn from the whole distribution, and for files of another form.
    """
    served = read_served(path)
    units = sorted({text.unit for text in served})
    place = {unit: number for number, unit in enumerate(units)}
    outcomes, used = np.zeros(len(units)), np.ones(len(units), bool)
    for text in served:
        outcomes[place[text.unit]] = text.outcome
        used[place[text.unit]] &= text.sampled
    if not used.any():
        raise MarlRayError(f"{path}: expected units whose texts were all drawn from the whole distribution")
    drawn = [text for text in served if used[place[text.unit]]]
    sums = np.zeros(len(units))
    for text, weight in zip(drawn, log_ratios(bundle, drawn), strict=True):
        sums[place[text.unit]] += weight
    weights, rewards = sums[used], outcomes[used]
    predicted = cross_fit(_features(drawn, place, len(units))[used], rewards, weights)
    value, robust = snips(weights, rewards, alpha), doubly_robust(weights, rewards, predicted, predicted, alpha)
    return combine_estimates(value, robust, outcomes, used, floor, min_effective)


def log_ratios(bundle: TokenBundle, served: Sequence[ServedText]) -> np.ndarray:
    """Return the log ratios of the bundle's chance of each response to that of its writer, (responses,) float64.

    The writer is the arm that wrote the response. Raises MarlRayError if a policy cannot have written a response, or
    draws only from a part of its distribution.
    """
    ratios: dict[str, float] = {}
    for name, texts in group_by_policy(served, bundle.agents).items():
        policy = bundle.policies[name]
        settings = policy.generation
        if settings.top_k or settings.top_p < 1:
            raise MarlRayError(
                f"policy {name!r}: expected one that draws from its whole distribution, but its top_k is {settings.top_k} "
                f"and its top_p {settings.top_p:g}"
            )
        vocabulary = policy.lm.get_input_embeddings().weight.shape[0]
        check_readable(name, policy.tokenizer, vocabulary, policy.config.context, texts)
        parts: dict[float, list[ServedText]] = {}
        for text in sorted(texts, key=lambda text: -len(text.prompt_ids) - len(text.ids)):
            parts.setdefault(_temperature(text, policy), []).append(text)
        for temperature, part in parts.items():
            with _set_temperature(policy, temperature):
                ratios |= _log_ratios(policy, part)
    return np.array([ratios[text.where] for text in served])


def _temperature(text: ServedText, policy: TokenPolicy) -> float:
    """Return the temperature at which the policy would have answered the request."""
    default = float(policy.generation.temperature)
    return text.temperature if "temperature" in text.chosen_settings and text.temperature is not None else default


@contextmanager
def _set_temperature(policy: TokenPolicy, temperature: float) -> Iterator[None]:
    before = policy.generation
    policy.generation = before.model_copy(update={"temperature": temperature})
    try:
        yield
    finally:
        policy.generation = before


@torch.no_grad()
def _log_ratios(policy: TokenPolicy, served: Sequence[ServedText]) -> dict[str, float]:
    """Return the file and row of a response -> its log ratio."""
    ratios: dict[str, float] = {}
    for start in range(0, len(served), RESPONSES_PER_PASS):
        part = served[start : start + RESPONSES_PER_PASS]
        rows = pad_sequences([text.prompt_ids for text in part], [text.ids for text in part])
        prompts, responses, mask = (x.to(policy.device) for x in rows)
        sums = policy.evaluate(prompts, responses, mask, need_entropy=False).log_probs.double().sum(1).tolist()
        ratios |= {
            text.where: total - float(text.log_probs.sum(dtype=np.float64))
            for text, total in zip(part, sums, strict=True)
        }
    return ratios


def _features(served: Sequence[ServedText], place: dict[str, int], units: int) -> np.ndarray:
    """Return the share of each token in each unit's first prompts, (units, MAX_FEATURES).

    Tokens whose ids are equal modulo MAX_FEATURES share a column.
    """
    features: Any = np.zeros((units, MAX_FEATURES))
    counted = set()
    for text in served:
        if (text.unit, text.agent) not in counted:
            counted.add((text.unit, text.agent))
            np.add.at(features[place[text.unit]], text.prompt_ids % MAX_FEATURES, 1 / len(text.prompt_ids))
    return np.asarray(features)
