"""Off-policy evaluation of actor-critic bundles on logged acts, before any user meets the bundle.

A unit's importance weight is the product, over its agents and steps, of the chance that the bundle takes the logged
action over the chance with which it was taken. Units in which an agent acted greedily are left out: they contain no
evidence about other choices, and with a weight of 1 the bundle would be judged by decisions that it would not make. The
bundle must not have learned from the units, or it would be judged by the luck that it was fitted to.
"""

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.off_policy.estimates import MAX_FEATURES, OffPolicyEstimate, combine_estimates, cross_fit
from marl_ray.experiments.statistics.off_policy import PolicyValue, doubly_robust, snips
from marl_ray.policies.actor_critic.distributions import Gaussian
from marl_ray.policies.actor_critic.spaces import CATEGORICAL_SPACES, cardinalities
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.rollout.served.acts import LoggedUnits, read_logged

MAX_CODES = 64
"""Maximum number of categories of an entry that is one-hot; an entry with more counts as a number."""


def estimate_outcome(
    bundle: ActorCriticBundle, path: str, *, floor: float, min_effective: float = 100.0, alpha: float = 0.05
) -> OffPolicyEstimate:
    """Estimate a bundle's mean outcome from exported decisions (file, folder or URI) and compare it with `floor`.

    The gate passes if the one-sided lower bound at level `alpha` lies above `floor`, on at least `min_effective` effective
    units whose mean weight is about 1. Raises MarlRayError if the data cannot be read, do not fit the bundle, or hold no
    unit that can be used.
    """
    logged = logged_for(bundle, path)
    value = evaluate_bundle(bundle, logged, alpha)
    robust = evaluate_doubly_robust(bundle, logged, alpha)
    return combine_estimates(value, robust, logged.outcomes, ~greedy_units(logged), floor, min_effective)


def logged_for(bundle: ActorCriticBundle, path: str) -> LoggedUnits:
    """Read exported decisions in the form that the bundle's policies take. Raises MarlRayError if they do not fit."""
    policies = {name: (policy.observation_space, policy.action_space) for name, policy in bundle.policies.items()}
    return read_logged(path, bundle.agents, policies)


def evaluate_bundle(bundle: ActorCriticBundle, data: LoggedUnits | str, alpha: float = 0.05) -> PolicyValue:
    """Return the mean outcome of a unit under the bundle, by self-normalised importance sampling.

    The estimator is `experiments.statistics.off_policy.snips`.
    """
    logged = logged_for(bundle, data) if isinstance(data, str) else data
    weights, used = log_weights(bundle, logged), _drawn_units(logged)
    return snips(weights[used], logged.outcomes[used], alpha)


def evaluate_doubly_robust(bundle: ActorCriticBundle, data: LoggedUnits | str, alpha: float = 0.05) -> PolicyValue:
    """Return the mean outcome of a unit under the bundle, doubly robust, with a ridge regression as the model.

    The model predicts a unit's outcome from its first observations, with the same prediction for the logged actions and
    for the bundle's. So it removes the variance between starts, and the weights must be right. The model is fitted with
    the importance weights, so that it tends to the bundle's outcome from a start, and across five folds of units, so
    that no unit is predicted by a model that saw it (Chernozhukov et al. 2018, arXiv 1608.00060, definition 3.1).
    """
    logged = logged_for(bundle, data) if isinstance(data, str) else data
    weights, used = log_weights(bundle, logged), _drawn_units(logged)
    unit_weights, outcomes = weights[used], logged.outcomes[used]
    predicted = cross_fit(start_features(bundle, logged)[used], outcomes, unit_weights)
    return doubly_robust(unit_weights, outcomes, predicted, predicted, alpha)


def log_weights(bundle: ActorCriticBundle, logged: LoggedUnits) -> np.ndarray:
    """Return the log importance weights of units, (units,).

    The weights are sums of target - behaviour log-probabilities over own decisions of stochastic acts. Raises
    MarlRayError if a continuous action lies at its bound: the log does not hold the chance that the action was clipped
    to it.
    """
    sums = np.zeros(len(logged.units))
    for name, batch in logged.policies.items():
        distribution = bundle.policies[name].distribution
        mask = batch.mask & ~batch.greedy[:, None]
        if not mask.any():
            continue
        actions = batch.actions[mask]
        if isinstance(distribution, Gaussian):
            low, high = (torch.from_numpy(np.asarray(bound)) for bound in (distribution.low, distribution.high))
            clipped = int(((actions <= low) | (actions >= high)).flatten(1).any(1).sum())
            if clipped:
                raise MarlRayError(
                    f"actions of policy {name!r}: expected values inside {bundle.policies[name].action_space}, but "
                    f"{clipped} of {len(actions)} lie at a bound, to which they may have been clipped"
                )
        allowed = None if batch.action_masks is None else batch.action_masks[mask]
        target = bundle.log_probs(name, batch.observations[mask], actions, allowed).double()
        ratios = (target - batch.log_probs[mask]).numpy()
        unit = batch.episode[:, None].expand(mask.shape)[mask].numpy()
        sums += np.bincount(unit, ratios, minlength=len(sums))
    return sums


def greedy_units(logged: LoggedUnits) -> np.ndarray:
    """Return (units,) bool: True for a unit in which an agent acted greedily."""
    greedy = np.zeros(len(logged.units), bool)
    for batch in logged.policies.values():
        greedy[batch.episode[batch.greedy].numpy()] = True
    return greedy


def _drawn_units(logged: LoggedUnits) -> np.ndarray:
    used = ~greedy_units(logged)
    if not used.any():
        raise MarlRayError("data: expected units whose actions were drawn, but in every one an agent acted greedily")
    return used


def start_features(bundle: ActorCriticBundle, logged: LoggedUnits) -> np.ndarray:
    """Return the first observations of all agents side by side, (units, at most MAX_FEATURES).

    Entries with few categories are one-hot.
    """
    blocks = []
    for name, batch in logged.policies.items():
        for agent in range(batch.agents):
            # An agent's first turn is written last, so that it stays.
            rows_of_agent = torch.nonzero(batch.agent == agent)[:, 0].flip(0)
            rows = _encode_rows(bundle.policies[name].observation_space, batch.observations[rows_of_agent, 0].numpy())
            blocks.append((batch.episode[rows_of_agent].numpy(), rows))
    width = sum(rows.shape[1] for _, rows in blocks)
    features, begin, random = np.zeros((len(logged.units), min(width, MAX_FEATURES))), 0, np.random.default_rng(0)
    for unit, rows in blocks:
        if width > MAX_FEATURES:
            projected = np.zeros((len(features), MAX_FEATURES))
            projected[unit] = rows @ (random.standard_normal((rows.shape[1], MAX_FEATURES)) / math.sqrt(width))
            features += projected
        else:
            features[unit, begin : begin + rows.shape[1]] = rows
            begin += rows.shape[1]
    return features


def _encode_rows(space: spaces.Space[Any], rows: np.ndarray) -> np.ndarray:
    """Convert flat rows (N, D) to numbers that a linear model can use."""
    if not isinstance(space, CATEGORICAL_SPACES) or max(cardinalities(space)) > MAX_CODES:
        return rows.astype(np.float32)
    columns = zip(rows.T, cardinalities(space), strict=True)
    return np.concatenate([np.eye(size, dtype=np.float32)[column] for column, size in columns], 1)
