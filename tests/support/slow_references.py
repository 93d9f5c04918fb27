"""The shared maths of the algorithms once more, as slow and obvious as possible.

It is loops over Python floats (float64).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

GroupFormula = Callable[[float, Sequence[float]], float]
"""The advantage of a score among the scores of its group."""


def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """(B, T) inputs; advantages and returns."""
    rows = []
    for r, v, boot, decisions, terminal, boundary in _rows(rewards, values, bootstrap, mask, terminated, truncated):
        row = [0.0] * len(r)
        for episode in _episodes([a or b for a, b in zip(terminal, boundary, strict=True)]):
            steps = [t for t in episode if decisions[t]]
            last = episode[-1]
            next_value = 0.0 if terminal[last] else boot[last]
            next_advantage = 0.0
            for k in reversed(range(len(steps))):
                t = steps[k]
                until = steps[k + 1] if k + 1 < len(steps) else last + 1
                reward = sum(r[t:until])
                row[t] = reward + gamma * next_value - v[t] + gamma * lam * next_advantage
                next_value, next_advantage = v[t], row[t]
        rows.append(row)
    advantages = _tensor(rows).reshape(mask.shape)
    return advantages, torch.where(mask, advantages + values, 0.0)


def reward_to_go(rewards: Tensor, mask: Tensor, is_last: Tensor, gamma: float) -> Tensor:
    result = []
    for r, decided, ends in _rows(rewards, mask, is_last):
        row = [0.0] * len(r)
        for episode in _episodes(ends):
            for t in (t for t in episode if decided[t]):
                discount = 1.0
                for later in episode:
                    if later > t and decided[later]:
                        discount *= gamma
                    if later >= t:
                        row[t] += discount * r[later]
        result.append(row)
    return _tensor(result).reshape(mask.shape)


def group_index(group: Tensor, agent: Tensor, turn: Tensor, prompts: Tensor) -> tuple[Tensor, int]:
    keys = list(zip(group.tolist(), agent.tolist(), turn.tolist(), map(tuple, prompts.tolist()), strict=True))
    numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
    return torch.tensor([numbers[key] for key in keys]), len(numbers)


def score_groups(
    scores: Tensor, index: Tensor, include: Tensor, formula: GroupFormula, singleton: str = "zero"
) -> Tensor:
    """`formula(own score, scores of the whole group)` for every row that counts."""
    numbers, groups, counts = scores.tolist(), index.tolist(), include.tolist()
    counted = [i for i in range(len(numbers)) if counts[i] and not math.isnan(numbers[i])]
    members: dict[int, list[float]] = {}
    for i in counted:
        members.setdefault(groups[i], []).append(numbers[i])
    result = [0.0] * len(numbers)
    for i in counted:
        group = members[groups[i]]
        if len(group) == 1:
            result[i] = numbers[i] if singleton == "score" else 0.0
        elif len(set(group)) > 1:
            result[i] = formula(numbers[i], group)
    return _tensor(result)


def center_scores(score: float, group: Sequence[float]) -> float:
    return score - mean(group)


def standardize_scores(eps: float, ddof: int) -> GroupFormula:
    return lambda score, group: (score - mean(group)) / (deviation(group, ddof) + eps)


def leave_one_out(score: float, group: Sequence[float]) -> float:
    return score - (sum(group) - score) / (len(group) - 1)


def subtract_greedy_score(scores: Tensor, index: Tensor, include: Tensor, greedy: Tensor) -> Tensor:
    result = []
    for i, score in enumerate(scores.tolist()):
        baseline = [scores[j].item() for j in range(len(scores)) if index[j] == index[i] and greedy[j]]
        baseline = [b for b in baseline if not math.isnan(b)]
        counts = include[i] and not greedy[i] and not math.isnan(score) and baseline
        result.append(score - mean(baseline) if counts else 0.0)
    return _tensor(result)


def aggregate(losses: Tensor, mask: Tensor, mode: str, fixed_length: int) -> float:
    """The loss of a whole minibatch on one worker."""
    sequences = []
    for row, decided in _rows(losses, mask):
        sequence = [loss for loss, is_own in zip(row, decided, strict=True) if is_own]
        if sequence:
            sequences.append(sequence)
    everything = [loss for sequence in sequences for loss in sequence]
    if not everything:
        return 0.0
    modes: dict[str, Callable[[], float]] = {
        "token-mean": lambda: mean(everything),
        "token-sum": lambda: sum(everything),
        "seq-mean-token-sum": lambda: mean([sum(sequence) for sequence in sequences]),
        "seq-mean-token-mean": lambda: mean([mean(sequence) for sequence in sequences]),
        "fixed-length": lambda: mean([sum(sequence) / fixed_length for sequence in sequences]),
    }
    return modes[mode]()


def kl_estimate(log_probs: Tensor, reference: Tensor, kind: str) -> Tensor:
    def estimate(p: float, q: float) -> float:
        d = max(-20.0, min(20.0, q - p))
        k3 = min(math.exp(d) - d - 1, 10.0)
        return {"k1": p - q, "abs": abs(p - q), "k2": (p - q) ** 2 / 2, "k3": k3, "k1+": p - q, "k3+": k3}[kind]

    return _each(estimate, log_probs, reference)


def standardize(x: Tensor, mask: Tensor, ddof: int, eps: float, center: bool, scale: bool) -> Tensor:
    masked = [value for row, decided in _rows(x, mask) for value, is_own in zip(row, decided, strict=True) if is_own]
    flat = len(set(masked)) < 2
    middle = mean(masked) if masked else 0.0
    spread = 1.0 if flat else deviation(masked, ddof) + eps

    def score_of(value: float, is_own: bool) -> float:
        if not is_own or (flat and center):
            return 0.0
        return (value - (middle if center else 0.0)) / (spread if scale else 1.0)

    return _each(score_of, x, mask)


def token_ratio(log_probs: Tensor, old: Tensor) -> Tensor:
    return _each(lambda p, q: math.exp(max(-20.0, min(20.0, p - q))), log_probs, old)


def sequence_log_ratio(log_probs: Tensor, old: Tensor, mask: Tensor, summed: bool = False) -> Tensor:
    result = []
    for p, q, decided in _rows(log_probs, old, mask):
        differences = [p[t] - q[t] for t in range(len(p)) if decided[t]]
        result.append(sum(differences) if summed else mean(differences) if differences else 0.0)
    return _tensor(result)


def gspo_token_log_ratio(log_probs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    result = []
    for level, decided in zip(sequence_log_ratio(log_probs, old, mask).tolist(), mask.tolist(), strict=True):
        result.append([min(level, 10.0) if is_own else 0.0 for is_own in decided])
    return _tensor(result).reshape(mask.shape)


def truncated_importance(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    return _each(lambda p, q: min(math.exp(max(-20.0, min(20.0, p - q))), cap), old, behaviour)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], ddof: int) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - ddof))


def _episodes(ends: Sequence[bool]) -> Iterator[list[int]]:
    """Lists of step numbers, each up to a True; what follows the last one is an episode too."""
    episode = []
    for t, end in enumerate(ends):
        episode.append(t)
        if end or t == len(ends) - 1:
            yield episode
            episode = []


def _rows(*tensors: Tensor) -> Iterator[Any]:
    return zip(*(tensor.tolist() for tensor in tensors), strict=True)


def _each(function: Callable[..., float], *tensors: Tensor) -> Tensor:
    rows = [[function(*values) for values in zip(*row, strict=True)] for row in _rows(*tensors)]
    return _tensor(rows).reshape(tensors[0].shape)


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
