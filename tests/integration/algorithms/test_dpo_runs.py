"""Runs of direct preference optimisation: a model learns to prefer, and pairs stay together."""

import json
import math
from pathlib import Path

import pytest
import torch
from toys.texts import config

from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.training.single_process import train_alone

pytestmark = pytest.mark.usefixtures("alone")


def write_pairs(path: Path, count: int) -> str:
    """Whatever the letter, `x` is preferred to `y`."""
    lines = [{"prompt": "ab"[k % 2], "chosen": "x" * (1 + k % 3), "rejected": "y" * (1 + k % 3)} for k in range(count)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def log_prob(bundle: Path, prompt: str, text: str) -> float:
    policy = load_bundle(bundle).policies["speaker"]
    ids = [policy.tokenizer.encode(text_part, add_special_tokens=False) for text_part in (prompt, text)]
    prompt_ids, answer = (torch.tensor([part]) for part in ids)
    with torch.no_grad():
        return float(policy.evaluate(prompt_ids, answer, torch.ones_like(answer, dtype=torch.bool)).log_probs.sum())


LEARN = ("algorithm=dpo", "train.group_size=1", "hyper.lr=0.003", "train.total_steps=96", "train.env_copies=16")


def test_a_model_learns_to_prefer(tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl", 48)
    rows = train_alone(config(*LEARN, f"data={data}"), tmp_path / "run")
    assert [row["steps"] for row in rows] == [16, 32, 48, 64, 80, 96]
    assert rows[0]["policy_loss"] == pytest.approx(math.log(2)) and rows[0]["clip_fraction"] == 0
    assert rows[-1]["policy_loss"] < 0.4 and rows[-1]["clip_fraction"] == 0
    assert rows[-1]["data/speaker/passes"] == 1 and rows[-1]["a/reward"] == 0.5
    before, after = (tmp_path / "run" / number / "bundle" for number in ("1", "6"))
    gained = {text: log_prob(after, "a", text) - log_prob(before, "a", text) for text in "xy"}
    assert gained["x"] > gained["y"] + 1


@pytest.mark.parametrize("more", ["train.micro_batch=3", "hyper.minibatches=2", "team.speaker.model.lora={rank: 2}"])
def test_pairs_stay_together_however_a_batch_is_divided(tmp_path, more):
    data = write_pairs(tmp_path / "pairs.jsonl", 16)
    short = [*LEARN, f"data={data}", "train.total_steps=32"]
    rows = train_alone(config(*short, more))
    assert rows[0]["policy_loss"] == pytest.approx(math.log(2), abs=0.15) and rows[-1]["policy_loss"] < math.log(2)
    if "micro" in more:
        for first, other in zip(rows, train_alone(config(*short)), strict=True):
            assert first["policy_loss"] == pytest.approx(other["policy_loss"], abs=1e-5)


def test_what_pairs_cannot_do_is_refused(tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl", 4)
    wrong = {
        "data: dpo of policy 'speaker' needs preferred pairs": ["algorithm=dpo", "train.group_size=1"],
        "does not learn from a file of preferred pairs": ["train.group_size=1", f"data={data}"],
        "hyper.clip: dpo does not read it": [*LEARN, f"data={data}", "hyper.clip=0.1"],
        "warm_start: dpo of policy 'speaker' would hold it at the weights before": [
            *LEARN,
            f"data={data}",
            "warm_start={data: environment}",
        ],
        "train.group_size: nothing reads it with `data`": [*LEARN, f"data={data}", "train.group_size=2"],
    }
    for message, overrides in wrong.items():
        with pytest.raises(MarlRayError) as caught:
            config(*overrides)
        assert message in str(caught.value)
    lines = {
        "prompt": "pairs.jsonl:1: missing key 'chosen'",
        "agent": "pairs.jsonl:1: agent: expected one of a",
        "chosen": "pairs.jsonl:1: response of 31 tokens, but team.speaker.generation.max_tokens=4",
    }
    good = {"prompt": "a", "chosen": "x", "rejected": "y"}
    changes = {"prompt": {"prompt": "a"}, "agent": good | {"agent": "z"}, "chosen": good | {"chosen": "x" * 30}}
    for key, message in lines.items():
        Path(data).write_text(json.dumps(changes[key]))
        with pytest.raises(MarlRayError) as caught:
            train_alone(config(*LEARN, f"data={data}"))
        assert message in str(caught.value)
