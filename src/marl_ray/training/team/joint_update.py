"""Update all policies of a team.

The policies are updated together, or one after another (HAPPO, Kuba et al. 2022, arXiv 2109.11251).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from marl_ray.algorithms.losses.ratios import LOG_RATIO_LIMIT
from marl_ray.config import RunConfig
from marl_ray.rollout.rng import team_order
from marl_ray.training.costs import CostStats
from marl_ray.training.team.gpu_pass_limit import translate_out_of_memory
from marl_ray.training.team.members import Team
from marl_ray.trajectories import Trajectories


def update_team(
    config: RunConfig,
    team: Team,
    batches: dict[str, Trajectories],
    iteration: int,
    steps: int,
    costs: Mapping[str, CostStats],
) -> dict[str, float]:
    """Update every policy by its batch and return metrics, prefixed with the policy's name if there are several.

    `costs` are by policy; the run had played `steps` before this iteration. For a sequential algorithm, policies are
    updated one after another in an order drawn from the seed: each gets the compound factor of the policies before it,
    and the costs after their updates. Raises DivergedError and PassMemoryError, which name the policy.
    """
    metrics: dict[str, float] = {}
    names = list(team.learners)
    sequential = any(config.spec_of(name).order == "sequential" for name in names)
    if sequential:
        names = [names[i] for i in team_order(config.seed, iteration, len(names))]
    factor: torch.Tensor | None = None
    means = next(iter(costs.values())).means
    for name in names:
        learner, batch = team.learners[name], batches[name]
        learner.set_progress(steps / max(config.train.total_steps, 1), iteration)
        ratio = factor if config.spec_of(name).order == "sequential" else None
        where = f"policy {name!r}, iteration {iteration + 1}, step {steps}"
        stats = replace(costs[name], means=means)
        with translate_out_of_memory(where, learner.policy.settings.micro_batch, name, len(batch.mask) // batch.agents):
            losses = learner.update(batch, config.seed, iteration, stats, ratio, where)
        prefix = "" if len(team.learners) == 1 else f"{name}/"
        metrics |= {prefix + key: value for key, value in losses.items()}
        if sequential:
            change = learner.log_ratio(batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            after = change if factor is None else factor * change
            means, factor = learner.estimate_moved_costs(stats, batch, after, factor).means, after
    return metrics
