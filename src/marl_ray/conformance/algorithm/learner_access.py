"""Access of the properties to a learner: with `game_run.py` the one place that touches training."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from marl_ray.algorithms import algorithm_of
from marl_ray.config import HyperParameters, RunConfig, spec_of
from marl_ray.conformance.algorithm.game_run import GameRun, local_part, own_rows, read_keys, write_back
from marl_ray.conformance.algorithm.games import POLICY_NAMES, STATE_COUNT, GameRules
from marl_ray.json_types import JsonObject
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.learner.preparation.prepare import raw_violations
from marl_ray.trajectories import Trajectories


def actor_gradient(learner: Learner) -> Tensor:
    """Return the actor's gradient in the last gradient step, flat."""
    return flat_gradient([*learner.policy.actor.parameters()])


def critic_gradient(learner: Learner) -> Tensor:
    """Return the critics' gradient in the last gradient step, flat."""
    return flat_gradient([p for critic in learner.policy.critics for p in critic.parameters()])


def gradient(learner: Learner) -> Tensor:
    """Return the gradient of all weights that the last gradient step moved, flat."""
    return flat_gradient([*learner.policy.model.parameters()])


def flat_gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients of the parameters that have one, flat."""
    return torch.cat([local_part(p.grad).reshape(-1).double() for p in parameters if p.grad is not None])


def without_decisions(batch: Trajectories) -> Trajectories:
    """Return the same batch without decisions."""
    return replace(batch, mask=torch.zeros_like(batch.mask))


def movement(learner: Learner, batch: Trajectories) -> float:
    """Return the greatest change of a log-probability of the batch's actions since the batch was played."""
    with torch.no_grad():
        if batch.prompts is None:
            return float(learner.log_ratio(batch).abs().max()) if batch.mask.numel() else 0.0
        evaluation = learner.policy.rollout_model.evaluate(batch.prompts, batch.actions, batch.mask)
        return float(torch.where(batch.mask, evaluation.log_probs - batch.log_probs, 0.0).abs().max())


@contextmanager
def nudge_policy(game_run: GameRun, number: int, direction: Tensor, size: float) -> Iterator[None]:
    """Move the policy that plays by `size` along a flat direction of its weights, within the block."""
    parameters = list(game_run.learners[number].policy.rollout_model.actor.parameters())
    saved = [parameter.clone() for parameter in parameters]
    parts = direction.split([parameter.numel() for parameter in parameters])
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter += size * part.reshape(parameter.shape)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, saved, strict=True):
                parameter.copy_(before)


def joint_factor(learner: Learner, batch: Trajectories, before: Tensor | None) -> Tensor:
    """Return the ratio by which the joint actions of a batch have become likelier, times the ratio `before`."""
    change = learner.log_ratio(batch).exp()
    return change if before is None else before * change


def moved_costs(
    game_run: GameRun, number: int, batch: Trajectories, after: Tensor, before: Tensor | None
) -> list[float]:
    """Return the changes of an episode's costs that a policy's learner attributes to its update, by signal."""
    stats = game_run.costs[POLICY_NAMES[number]]
    changes = game_run.learners[number].estimate_moved_costs(stats, batch, after, before).means
    assert stats.means is not None and changes is not None
    return [now - then for now, then in zip(changes, stats.means, strict=True)]


def violations(game_run: GameRun, number: int) -> list[float]:
    """Return the violations per decision as the policy's learner computes them, in units of the cost."""
    budgets = game_run.learners[number].policy.budgets
    return raw_violations(budgets, game_run.costs[POLICY_NAMES[number]]) or [0.0] * len(budgets)


def normalizer_state(learner: Learner) -> object:
    """Return the normalisers' state, by value."""
    state = learner.state.to_plain()
    return copy.deepcopy([state["value_norm"], state["cost_norms"]])


def accepts_hyper(algorithm: str, hyper: Mapping[str, object], rolling: bool = False) -> bool:
    """Return True if a run's config accepts these hyper-parameters with the algorithm."""
    spec = spec_of(algorithm)
    try:
        RunConfig.model_validate(
            {
                "name": "conformance",
                "algorithm": algorithm,
                "env": {"id": "marl_ray.conformance.algorithm.games:TinyGame"},
                "hyper": dict(hyper),
                "constraints": [{"budget": 1.0}] if spec.needs_costs else [],
                "train": {
                    "env_copies": 2,
                    "horizon": 4,
                    "group_size": 2 if spec.groups or spec.greedy else 1,
                    "rollout": "steps" if rolling else "episodes",
                },
            }
        )
    except ValidationError:
        return False
    return True


def unread_keys(algorithm: str) -> JsonObject:
    """Return the keys of `hyper` that the algorithm does not read, each with a value that it may have."""
    fields = spec_of(algorithm).hyper.model_fields
    return {
        name: 2 if field.default is None else field.default
        for name, field in fields.items()
        if name not in read_keys(algorithm)
    }


def choices(key: str) -> tuple[Any, ...]:
    """Return the possible values of a key of `hyper` that takes one of a list of names."""
    return get_args(HyperParameters.model_fields[key].annotation)


def aim_reference(learner: Learner) -> list[list[list[float]]]:
    """Move the reference policy away from the policy and return its tables by agent, state and action."""
    reference = learner.policy.models.reference
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        outputs = reference.infer(own_rows(GameRules())).double().softmax(-1)
    tables: list[list[list[float]]] = outputs.reshape(STATE_COUNT, 1, 2).transpose(0, 1).tolist()
    return tables


def prefer_one_action(learner: Learner) -> None:
    """Make the policy prefer one action everywhere."""
    with torch.no_grad():
        cast(nn.Linear, learner.policy.rollout_model.actor.rest[-1]).bias.copy_(torch.tensor([0.0, 1.0]))
    write_back(learner)


def every_step(algorithm: str) -> bool:
    """Return True if multipliers move after every gradient step."""
    return algorithm_of(algorithm).every_step


def multipliers(game_run: GameRun) -> list[Any]:
    """Return the multipliers by policy and signal, never changed in place; [] for algorithms without them."""
    return [learner.state.multipliers for learner in game_run.learners]


def fresh_multipliers(game_run: GameRun) -> list[Any]:
    """Return the multipliers' first values."""
    start = algorithm_of(game_run.algorithm).multiplier
    assert start is not None
    return [[start(learner.policy.hyper, budget) for budget in game_run.budgets] for learner in game_run.learners]


def implied_cost(old: Any, new: Any) -> float:
    """Return the mean cost that moved a multiplier from `old` to `new`; NaN if no cost from 0 to 10 can."""
    low, high = 0.0, 10.0
    if not old.with_cost(low).multiplier <= new.multiplier <= old.with_cost(high).multiplier:
        return float("nan")
    for _ in range(60):
        middle = (low + high) / 2
        if old.with_cost(middle).multiplier < new.multiplier:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def row_weight(game_run: GameRun) -> Callable[[int], float]:
    """Return the weight that the loss gives to a decision of a row, by the row's number of decisions.

    The weight is that of the mean over each sequence's decisions, or 1, also where a sequence is one term of the loss.
    """
    hyper = game_run.config.hyper_of(POLICY_NAMES[0])
    by_row = hyper.aggregation == "seq-mean-token-mean" and hyper.ratio_level == "token"
    return (lambda decisions: 1 / decisions) if by_row else (lambda decisions: 1.0)
