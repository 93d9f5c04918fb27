"""Direct preference optimisation against a slow reference, its properties, and a model that learns to prefer."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys.texts import config

from marl_ray.algorithms.base import PolicyLossInputs
from marl_ray.algorithms.from_preferences.dpo import DPO, dpo_loss, policy_loss
from marl_ray.config import SPECS
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.actor_critic import load_bundle
from marl_ray.training.single_process import process_group, train_alone

HYPER = SPECS["dpo"].hyper.model_validate(SPECS["dpo"].defaults)
NATS = st.floats(-30, 0, width=32)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def evaluated(log_probs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> PolicyLossInputs:
    zeros = torch.zeros_like(log_probs)
    return PolicyLossInputs(log_probs, zeros, zeros, mask, zeros, zeros, reference)


def slow(log_probs: list[list[float]], reference: list[list[float]], beta: float, doubt: float) -> float:
    """Mean over the pairs of formula (7), token by token in plain floats."""
    losses = []
    for first in range(0, len(log_probs), 2):
        h = [sum(log_probs[first + k]) - sum(reference[first + k]) for k in (0, 1)]
        preferred = 1 / (1 + math.exp(-beta * (h[0] - h[1])))
        losses.append(-(1 - doubt) * math.log(preferred) - doubt * math.log(1 - preferred))
    return sum(losses) / len(losses)


@given(
    st.lists(st.tuples(*[st.lists(NATS, min_size=1, max_size=5)] * 2), min_size=1, max_size=4),
    st.floats(0.01, 0.5),
    st.floats(0, 0.4),
    st.randoms(use_true_random=False),
)
def test_the_loss_is_that_of_the_formula_whatever_the_padding(pairs, beta, doubt, random):
    rows = [row for pair in pairs for row in pair]
    reference = [[value + random.uniform(-1, 1) for value in row] for row in rows]
    steps = max(map(len, rows)) + random.randint(0, 2)
    mask = torch.tensor([[t < len(row) for t in range(steps)] for row in rows])
    padded = [torch.tensor([row + [-99.0] * (steps - len(row)) for row in table]) for table in (rows, reference)]
    hyper = HYPER.model_copy(update={"beta": beta, "label_smoothing": doubt})
    terms = policy_loss(evaluated(*padded, mask), hyper).loss
    # The aggregation: every sequence counts as one, and so does each of its decisions.
    mean = ((terms * mask).sum(1) / mask.sum(1)).mean()
    assert float(mean) == pytest.approx(slow(rows, reference, beta, doubt), rel=1e-3, abs=1e-4)


@given(st.lists(NATS, min_size=2, max_size=2), st.lists(NATS, min_size=2, max_size=2), st.floats(0.01, 1))
def test_the_preferred_is_raised_and_the_other_lowered(new, reference, beta):
    ratios = (torch.tensor(new) - torch.tensor(reference)).requires_grad_()
    loss = dpo_loss(ratios[:1], ratios[1:], beta).sum()
    loss.backward()
    assert ratios.grad[0] <= 0 <= ratios.grad[1] and float(ratios.grad.sum()) == pytest.approx(0, abs=1e-6)
    margin = beta * float((ratios[0] - ratios[1]).detach())
    assert float(-ratios.grad[0]) == pytest.approx(beta / (1 + math.exp(margin)), rel=1e-3, abs=1e-6)


@given(NATS, st.floats(0.01, 1), st.floats(0, 0.49))
def test_equal_responses_cost_log_two(value, beta, doubt):
    same = torch.tensor([value])
    assert float(dpo_loss(same, same, beta, doubt)) == pytest.approx(math.log(2))


def test_without_pairs_or_a_reference_it_is_refused():
    rows = torch.zeros(3, 2)
    for batch in (
        evaluated(rows, rows, rows == 0),
        evaluated(rows[:2], rows[:2], rows[:2] == 0)._replace(reference_log_probs=None),
    ):
        with pytest.raises(MarlRayError, match="dpo: expected pairs of rows"):
            policy_loss(batch, HYPER)
    assert DPO.spec.pairs and "preferred pairs (`data`)" in DPO.spec.needs


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
def test_pairs_stay_together_however_a_batch_is_cut(tmp_path, more):
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
        "prompt": "pairs.jsonl:1: chosen: Field required",
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
