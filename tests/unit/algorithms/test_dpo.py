"""Direct preference optimisation against a slow reference, and its properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.algorithms.definition import PolicyLossInputs
from marl_ray.algorithms.from_preferences.dpo import DPO, dpo_loss, policy_loss
from marl_ray.config import SPECS
from marl_ray.errors import MarlRayError

HYPER = SPECS["dpo"].hyper.model_validate(SPECS["dpo"].defaults)
NATS = st.floats(-30, 0, width=32)


def evaluate(log_probs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> PolicyLossInputs:
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
    terms = policy_loss(evaluate(*padded, mask=mask), hyper).loss
    # The aggregation: every sequence counts as one, and so does each of its decisions.
    mean = ((terms * mask).sum(1) / mask.sum(1)).mean()
    assert float(mean) == pytest.approx(slow(rows, reference, beta, doubt), rel=1e-3, abs=1e-4)


@given(st.lists(NATS, min_size=2, max_size=2), st.lists(NATS, min_size=2, max_size=2), st.floats(0.01, 1))
def test_the_preferred_is_raised_and_the_other_lowered(new, reference, beta):
    ratios = (torch.tensor(new) - torch.tensor(reference)).requires_grad_()
    loss = dpo_loss(ratios[:1], ratios[1:], beta).sum()
    loss.backward()
    assert ratios.grad is not None
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
        evaluate(rows, rows, rows == 0),
        evaluate(rows[:2], rows[:2], rows[:2] == 0)._replace(reference_log_probs=None),
    ):
        with pytest.raises(
            MarlRayError, match=r"^dpo: expected pairs of rows, and log-probabilities of the reference policy$"
        ):
            policy_loss(batch, HYPER)
    assert DPO.spec.pairs and "preferred pairs (`data`)" in DPO.spec.requirements
