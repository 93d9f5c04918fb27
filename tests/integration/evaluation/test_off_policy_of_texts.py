"""The return of a bundle of language models, estimated from texts that another one wrote."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_serving.logged_texts import served_row, write_served
from toy_serving.text_gateways import make_text_bundle

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.off_policy.texts import estimate_text_outcome, log_ratios
from marl_ray.policies.bundles.language import TokenBundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.rollout.served.texts import read_served

PROMPT = [104, 105]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[TokenBundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return [load_bundle(make_text_bundle(folder, seed, context=32)) for seed in (1, 2)]


def serve(bundle: TokenBundle, count: int, path: Path, **settings: float) -> str:
    """One token each; the outcome is 1 for an even one."""
    policy = bundle.policies["lm"]
    generation = policy.generation.model_copy(update={"max_tokens": 1} | settings)
    prompts = [Prompt(tuple(PROMPT), seed) for seed in range(count)]
    written = TorchEngine(policy).generate(prompts, 0, generation)
    rows = [
        served_row(
            f"u{k}", PROMPT, reply.ids, reply.log_probs, float(reply.ids[0] % 2 == 0), policy.tokenizer, generation
        )
        for k, reply in enumerate(written)
    ]
    return write_served(path, rows)


def chance_of_even(bundle: TokenBundle, temperature: float) -> float:
    policy = bundle.policies["lm"]
    before, policy.generation = policy.generation, GenerationConfig(temperature=temperature)
    ids = torch.arange(policy.lm.config.vocab_size)
    with torch.no_grad():
        log_probs = policy.evaluate(
            torch.tensor([PROMPT] * len(ids)), ids[:, None], torch.ones(len(ids), 1, dtype=torch.bool)
        )
    policy.generation = before
    return float(log_probs.log_probs[::2].exp().sum())


def test_the_estimate_is_what_the_other_bundle_earns(bundles, tmp_path):
    path = serve(bundles[0], 4000, tmp_path / "e.parquet")
    value = estimate_text_outcome(bundles[1], path, floor=0.0)
    truth, logged = chance_of_even(bundles[1], 0.8), chance_of_even(bundles[0], 0.8)
    assert abs(value.logged - logged) < 0.03
    assert abs(truth - logged) > 4 * value.value.error  # else the next two lines say nothing
    assert abs(value.value.estimate - truth) < 4 * value.value.error
    assert abs(value.doubly_robust.estimate - truth) < 4 * value.doubly_robust.error
    assert value.units == 4000 and value.gate.passed


def test_the_gate_asks_for_the_floor_and_a_bundles_own_texts_have_weight_one(bundles, tmp_path):
    path = serve(bundles[0], 400, tmp_path / "e.parquet")
    assert not estimate_text_outcome(bundles[1], path, floor=1.0).gate.passed
    report = estimate_text_outcome(bundles[0], path, floor=0.0)
    assert report.value.mean_weight == pytest.approx(1, abs=1e-4) and report.value.effective == pytest.approx(
        400, rel=1e-3
    )


def test_a_bundle_is_judged_at_the_temperature_that_was_asked_for(bundles, tmp_path):
    policy = bundles[0].policies["lm"]
    path = serve(bundles[0], 8, tmp_path / "e.parquet", temperature=0.3)
    assert np.abs(log_ratios(bundles[0], read_served(path))).max() > 0.1
    config = policy.generation.model_copy(update={"temperature": 0.3})
    rows = [
        served_row(
            f"u{k}",
            PROMPT,
            reply.ids.tolist(),
            reply.log_probs.tolist(),
            1.0,
            policy.tokenizer,
            config,
            asked=["temperature"],
        )
        for k, reply in enumerate(read_served(path))
    ]
    again = read_served(write_served(tmp_path / "asked.parquet", rows))
    assert log_ratios(bundles[0], again) == pytest.approx([0.0] * 8, abs=1e-4)
    assert policy.generation.temperature == 0.8


def test_units_of_greedy_or_cut_distributions_are_left_out(bundles, tmp_path):
    policy = bundles[0].policies["lm"]
    row = [PROMPT, [65], [-1.0], 1.0, policy.tokenizer, policy.generation]
    rows = [served_row("a", *row), served_row("b", *row), served_row("b", *row, turn=1, sampled=False)]
    assert estimate_text_outcome(bundles[0], write_served(tmp_path / "e.parquet", rows), floor=0.0).units == 1
    with pytest.raises(
        MarlRayError, match=r"/e\.parquet: expected units whose texts were all drawn from the whole distribution$"
    ):
        estimate_text_outcome(bundles[0], write_served(tmp_path / "e.parquet", rows[2:]), floor=0.0)


def test_what_does_not_fit_is_named(bundles, tmp_path):
    policy = bundles[0].policies["lm"]
    good = served_row("a", PROMPT, [65], [-1.0], 1.0, policy.tokenizer, policy.generation)
    wrong = {
        "row 0, column ids: policy 'lm' has another tokenizer": {"text": "something else"},
        "row 0, column ids: policy 'lm' has another": {"ids": [10_000]},
        "row 0, column ids: expected ids of tokens": {"ids": [None]},
        "row 0, column prompt_ids: expected ids of tokens": {"prompt_ids": [1 << 40]},
        "row 0: 40 tokens, but policy 'lm' has a context of 32": {"prompt_ids": [65] * 39},
        "row 0, column agent: 'other' is not one of writer": {"agent": "other"},
        "row 0, column log_probs: expected 1 logarithms": {"log_probs": [0.5]},
        "row 0, column outcome: expected a finite number": {"outcome": math.nan},
        "row 0, column unit: expected a value, not null": {"unit": None},
        "expected at least one response with its tokens": {"ids": [], "log_probs": []},
    }
    for message, change in wrong.items():
        path = write_served(tmp_path / "e.parquet", [good | change])
        with pytest.raises(MarlRayError) as caught:
            estimate_text_outcome(bundles[0], path, floor=0.0)
        assert message in str(caught.value)
    path = write_served(tmp_path / "e.parquet", [good, good | {"turn": 1, "outcome": 2.0}])
    with pytest.raises(
        MarlRayError, match=r"/e\.parquet: row 1, column outcome: expected the same outcome in all rows of a unit$"
    ):
        estimate_text_outcome(bundles[0], path, floor=0.0)
