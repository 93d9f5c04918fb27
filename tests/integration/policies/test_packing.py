"""Packed responses: what they read and who sees whom, against every sequence by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models.tokens import LORA, tiny

from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.language.packing import LENGTH_MULTIPLE, pack

POLICY = tiny()


def gradients(policy):
    return [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]


def loss(outputs):
    parts = (outputs.log_probs, 0.1 * outputs.entropy, outputs.values, outputs.cost_values)
    return sum((part * torch.linspace(0.5, 1.5, part.numel()).reshape(part.shape)).sum() for part in parts)


def rows(groups, seed=0):
    """Prompts, responses and mask; `groups`: (tokens of a prompt, tokens of each of its responses)."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(length for length, _ in groups)
    steps = max(1, *(length for _, lengths in groups for length in lengths))
    prompts, mask = [], []
    for length, lengths in groups:
        ids = torch.randint(0, 259, (length,), generator=generator)
        for steps_of_row in lengths:
            prompts.append(torch.cat([torch.full((longest - length,), -1), ids]))
            mask.append(torch.arange(steps) < steps_of_row)
    shuffled = torch.randperm(len(prompts), generator=generator)
    shuffled_mask = torch.stack(mask)[shuffled]
    responses = torch.randint(0, 259, shuffled_mask.shape, generator=generator)
    return torch.stack(prompts)[shuffled], responses, shuffled_mask


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 6), min_size=1, max_size=4)), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_sharing_a_prompt_changes_neither_scores_nor_gradients(groups, seed):
    prompts, responses, mask = rows(groups, seed)
    results = []
    for packs in (True, False):
        POLICY.packs = packs
        try:
            POLICY.zero_grad()
            outputs = POLICY.evaluate(prompts, responses, mask)
            loss(outputs).backward()
        finally:
            POLICY.packs = True
        results.append((outputs, [gradient.clone() for gradient in gradients(POLICY)]))
    (packed, packed_gradients), (plain, plain_gradients) = results
    for first, other in zip(vars(packed).values(), vars(plain).values(), strict=True):
        torch.testing.assert_close(first, other, atol=1e-5, rtol=0)
    for first, other in zip(packed_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(first, other, atol=1e-4, rtol=1e-4)


def test_a_prompt_is_read_once_and_only_the_row_is_padded():
    prompts, responses, mask = rows([(5, [3, 6, 1]), (2, [2, 4])])
    packed, places, *_ = pack(prompts, responses, mask)
    tokens = 5 + 2 + 2 + 5 + 0 + 1 + 3
    assert packed.ids.shape == (1, LENGTH_MULTIPLE)
    assert tokens < LENGTH_MULTIPLE and not packed.ids[0, tokens:].any()
    assert len(places) == 16
    assert packed.positions.max() == 5 + 5 - 1


def test_layers_that_recompute_and_adapters_are_no_different():
    from torch.distributed.device_mesh import init_device_mesh

    from marl_ray.policies.language.sharding.shard import shard
    from marl_ray.training.single_process import process_group

    prompts, responses, mask = rows([(5, [3, 6, 1]), (2, [2, 4])])
    plain = tiny(lora=LORA)
    plain.packs = False
    expected = plain.evaluate(prompts, responses, mask)
    loss(expected).backward()
    packed = tiny(lora=LORA, activation_checkpointing=True)
    with process_group():
        shard(packed, init_device_mesh("cpu", (1,)), False)
        outputs = packed.evaluate(prompts, responses, mask)
        torch.testing.assert_close(outputs.log_probs, expected.log_probs, atol=1e-5, rtol=0)
        loss(outputs).backward()
        for first, other in zip(gradients(packed), gradients(plain), strict=True):
            torch.testing.assert_close(first.full_tensor(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_a_model_that_packs_still_samples_as_it_scores(engine):
    policy = tiny(critic=False, signals=0)
    policy.generation = policy.generation.model_copy(update={"engine": engine, "max_tokens": 6})
    prompts = [Prompt((1, 2, 3), 0), Prompt((1, 2, 3), 1), Prompt((4, 5), 2)]
    completions = make_engine(policy).generate(prompts, seed=0)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([completion.ids])
        with torch.no_grad():
            scored = policy.evaluate(torch.tensor([prompt.ids]), ids, torch.ones_like(ids, dtype=torch.bool))
        torch.testing.assert_close(scored.log_probs[0], torch.tensor(completion.log_probs), atol=1e-4, rtol=0)
