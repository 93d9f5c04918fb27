"""The log-probabilities of complete responses that are trained on, for engines that report others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marl_ray.policies.engines.base import Completion, Prompt
from marl_ray.policies.language.padding import pad_sequences

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

RESPONSES_PER_PASS = 16
"""Responses that one pass scores: it bounds the memory that a pass over a large batch would need."""


def with_trained_log_probs(
    policy: "TokenPolicy", prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> list[Completion]:
    """Give responses, for which an engine reports others, the log-probabilities that are trained on.

    These are at the temperature, of the whole distribution. `policy` computes them; its weights must be those that
    wrote the responses. An empty copy computes none: its engine reports those of the policy's own generation, and no
    others are trained on.
    """
    if policy.source is not None:
        return list(completions)
    exact: list[Completion] = []
    for start in range(0, len(prompts), RESPONSES_PER_PASS):
        part = completions[start : start + RESPONSES_PER_PASS]
        scores = _evaluate_responses(
            policy, prompts[start : start + RESPONSES_PER_PASS], [completion.ids for completion in part]
        )
        exact += [replace(completion, log_probs=score) for completion, score in zip(part, scores, strict=True)]
    return exact


@torch.no_grad()
def _evaluate_responses(
    policy: "TokenPolicy", prompts: Sequence[Prompt], responses: Sequence[list[int]]
) -> list[list[float]]:
    rows = pad_sequences([prompt.ids for prompt in prompts], responses)
    ids, answers, mask = (x.to(policy.device) for x in rows)
    scores: Tensor = policy.evaluate(ids, answers, mask, need_entropy=False).log_probs
    return [row[: len(response)] for row, response in zip(scores.tolist(), responses, strict=True)]
