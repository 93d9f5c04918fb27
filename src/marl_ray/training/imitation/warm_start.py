"""Warm start of actor-critics: imitate logged decisions before the first iteration.

Filtered behaviour cloning (Chen et al. 2021, arXiv 2106.01345, section 5.1, "percentile behaviour cloning"): the actor
maximises the log-likelihood of the actions in the units with the best outcomes,

    max  sum log pi(a | s)   over the decisions of the best `top` of the units,

and the critic is fitted to the discounted rewards that followed, in all units. From the best units alone it would learn
to expect luck. Every worker reads all data and takes every n-th decision of a minibatch, so that the gradients are the
same for any number of workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from pettingzoo import ParallelEnv
from torch import Tensor, nn

from marl_ray.algorithms.advantages.returns import reward_to_go
from marl_ray.algorithms.losses.critics import clipped_value_loss
from marl_ray.config import RunConfig, WarmStartConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.policy import EncodedRows
from marl_ray.policies.actor_critic.spaces import joint_space, row_dtype, row_size
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.rollout.rng import permutation
from marl_ray.rollout.served.acts import LoggedUnits, read_logged
from marl_ray.training.collectives import rank_and_world_size, sum_over_workers
from marl_ray.training.errors import DivergedError
from marl_ray.training.learner.optimizers import backward_over_workers, clip_gradients, optimizer_of
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.learner.trained_policy import TrainedPolicy
from marl_ray.training.team.members import Team


class Fit(Protocol):
    """One policy and the data that it imitates."""

    def run_epoch(self, seed: int, number: int) -> dict[str, float]:
        """Make one pass over the data, in an order drawn by seed and epoch, and return its metrics."""


WARM_START_ITERATION = -1
"""The iteration that random orders of a warm start are drawn for; training begins with iteration 0."""


@dataclass(frozen=True)
class Decisions:
    """All N logged decisions of one policy, on the learner's device."""

    rows: Tensor
    """(N, D) observations."""
    actions: Tensor
    """(N, *shape)."""
    allowed: Tensor | None
    """(N, choices) bool."""
    imitation_mask: Tensor
    """(N,) bool: decisions in the best units, which the actor imitates."""
    returns: Tensor
    """(N,) discounted rewards that followed each decision, in reward units."""
    value_mask: Tensor
    """(N,) bool: decisions that the critic is fitted to."""
    agent: Tensor
    """(N,) number of the policy's agent that decided."""
    states: Tensor
    """(M, S) joint observations; M is 0 unless the critic is central."""
    state: Tensor
    """(N,) the row of `states` at each decision."""


def read_logged_units(config: RunConfig, env: ParallelEnv, agents: Mapping[str, Sequence[str]]) -> LoggedUnits:
    """Read the logged data of a warm start for each policy (policy -> its agents). Raises MarlRayError."""
    settings = cast(WarmStartConfig, config.warm_start)
    spaces = {
        name: (env.observation_space(members[0]), env.action_space(members[0])) for name, members in agents.items()
    }
    table = {agent: name for name, members in agents.items() for agent in members}
    logged = read_logged(settings.data, table, spaces)
    for name in agents:
        if not config.team[name].frozen and not (name in logged.policies and logged.policies[name].mask.any()):
            raise MarlRayError(f"warm_start.data: {settings.data} has no decision of policy {name!r}")
    return logged


def warm_start(config: RunConfig, env: ParallelEnv, team: Team, emit: Callable[[dict[str, float]], None]) -> None:
    """Fit every trained policy to the logged data; every worker takes part.

    `emit` gets each epoch's metrics, on rank 0 alone: the mean log-likelihood of an imitated decision, and the critic's
    loss in units of the value normaliser. Raises DivergedError if they are not finite.
    """
    settings = cast(WarmStartConfig, config.warm_start)
    logged = run_on_all_workers(lambda: read_logged_units(config, env, team.agents))
    fits = {name: LoggedFit(name, learner, logged, env, team, settings) for name, learner in team.learners.items()}
    fit_all(config, team, fits, emit)


def fit_all(config: RunConfig, team: Team, fits: Mapping[str, Fit], emit: Callable[[dict[str, float]], None]) -> None:
    """Run the epochs of a warm start, policy by policy; `emit` gets their metrics on rank 0."""
    for epoch in range(cast(WarmStartConfig, config.warm_start).epochs):
        row = {"steps": 0.0, "warm_start/epoch": epoch + 1.0}
        for name, fit in fits.items():
            prefix = "" if len(fits) == 1 else f"{name}/"
            row |= {f"{prefix}warm_start/{key}": value for key, value in fit.run_epoch(config.seed, epoch).items()}
        if rank_and_world_size()[0] == 0:
            emit(row)
    for name, learner in team.learners.items():
        learner.policy.model.zero_grad(set_to_none=True)
        learner.policy.refresh_rollout_model(f"policy {name!r}, warm start")


class LoggedFit:
    """One policy, its logged decisions, and an optimiser for the warm start alone.

    The run begins with a fresh optimiser.
    """

    def __init__(
        self, name: str, learner: Learner, logged: LoggedUnits, env: ParallelEnv, team: Team, settings: WarmStartConfig
    ):
        model, hyper = learner.policy.model, learner.policy.hyper
        self.name, self.learner, self.batch = name, learner, settings.batch
        self.data = _make_decisions(name, learner.policy, logged, env, team, settings.top)
        # A critic that is fitted to every batch before the actor moves needs no warm start, and has targets of its own.
        trains_critic = model.critic is not None and not learner.policy.algorithm.spec.critic_first
        self.critic = model.critic if trains_critic and bool(self.data.value_mask.any()) else None
        parts = [([model.actor], settings.lr or hyper.lr)]
        if self.critic is not None:
            parts.append(([self.critic], settings.lr or hyper.critic_lr or hyper.lr))
            returns = self.data.returns[self.data.value_mask].double()
            learner.note_returns(float(returns.mean()), float(returns.square().mean()))
        self.optimizer = optimizer_of(hyper, parts)

    def run_epoch(self, seed: int, number: int) -> dict[str, float]:
        """Make one pass over the decisions, in an order drawn by seed and epoch, and return means over it.

        Raises DivergedError naming a mean that is not finite.
        """
        size = len(self.data.rows)
        order = torch.from_numpy(permutation(seed, WARM_START_ITERATION, number, size)).to(self.data.rows.device)
        sums = torch.zeros(2, dtype=torch.float64, device=order.device)
        for minibatch in order.split(self.batch):
            sums += self._step(minibatch)
        likelihood, value = sum_over_workers(sums).tolist()
        means = {"log_likelihood": likelihood / int(self.data.imitation_mask.sum())}
        if self.critic is not None:
            means["value_loss"] = value / int(self.data.value_mask.sum())
        for key, mean in means.items():
            if not math.isfinite(mean):
                raise DivergedError(f"policy {self.name!r}, warm start, epoch {number + 1}: {key} is not finite")
        return means

    def _step(self, minibatch: Tensor) -> Tensor:
        """Take one gradient step on decisions (all workers' numbers).

        Returns this worker's sums of log-likelihood and value loss, (2,).
        """
        data, policy, (rank, workers) = self.data, self.learner.policy, rank_and_world_size()
        worker_part = minibatch[rank::workers]
        share = 1.0 if len(worker_part) else 0.0
        # A worker without a part of the minibatch takes part in the collectives of the pass with a row that counts 0.
        worker_part = worker_part if len(worker_part) else minibatch[:1]
        actor = EncodedRows.from_rows(policy.model.actor, data.rows[worker_part])
        central = policy.model.central
        critic = (
            EncodedRows.from_rows(policy.model.critics[0], data.states[data.state[worker_part]]) if central else actor
        )
        allowed = None if data.allowed is None else data.allowed[worker_part]
        outputs, *values = policy.model.evaluate(actor, critic, allowed)
        likelihood = policy.model.distribution.log_prob(outputs, data.actions[worker_part])
        likelihood = (likelihood * data.imitation_mask[worker_part]).sum() * share
        loss, value = -likelihood / data.imitation_mask[minibatch].sum().clamp(min=1), torch.zeros_like(likelihood)
        if self.critic is not None:
            heads = values[0]
            estimates = heads.gather(1, data.agent[worker_part][:, None])[:, 0] if central else heads[:, 0]
            targets = self.learner.state.value_norm.normalize(data.returns[worker_part])
            value = clipped_value_loss(estimates, estimates, targets, None, policy.hyper.huber_delta)
            value = (value * data.value_mask[worker_part]).sum() * share
            loss = loss + value / data.value_mask[minibatch].sum().clamp(min=1)
        self.optimizer.zero_grad(set_to_none=True)
        backward_over_workers(loss)
        modules: list[nn.Module] = [policy.model.actor, *([] if self.critic is None else [self.critic])]
        clip_gradients(modules, policy.hyper.max_grad_norm)
        self.optimizer.step()
        return torch.stack([likelihood, value]).detach().double()


def best_units(outcomes: np.ndarray, top: float) -> np.ndarray:
    """Return (units,) bool: True for the units of the share `top` with the best outcomes.

    At least one unit is; among equal outcomes the first units count.
    """
    is_best = np.zeros(len(outcomes), bool)
    count = max(1, math.ceil(top * len(outcomes) - 1e-9))
    is_best[np.argsort(-outcomes, kind="stable")[:count]] = True
    return is_best


def _make_decisions(
    name: str, policy: TrainedPolicy, logged: LoggedUnits, env: ParallelEnv, team: Team, top: float
) -> Decisions:
    """Return the logged decisions of the policy `name`, which imitates those of the share `top` of the units.

    Raises MarlRayError if these units hold none.
    """
    batch = logged.policies[name]
    mask = batch.mask
    returns = reward_to_go(batch.rewards, mask, batch.terminated | batch.truncated, policy.hyper.gamma)

    def per_decision(per_row: Tensor) -> Tensor:
        """Repeat a value per row (B,) for each of its decisions, (N,)."""
        return per_row[:, None].expand(mask.shape)[mask]

    unit = per_decision(batch.episode)
    value_mask, states, state = torch.ones_like(unit, dtype=torch.bool), batch.observations.new_zeros(0, 0), unit
    if policy.model.central:
        joint, aligned = joint_states(logged, env, team.agents)
        state = (batch.episode[:, None] * joint.shape[1] + torch.arange(mask.shape[1]))[mask]
        states, value_mask = joint.flatten(0, 1), aligned[unit]
    imitation_mask = torch.from_numpy(best_units(logged.outcomes, top))[unit]
    if not imitation_mask.any():
        raise MarlRayError(f"warm_start.top: the best {top:g} of the units hold no decision of policy {name!r}")
    device = policy.device
    return Decisions(
        rows=batch.observations[mask].to(device),
        actions=batch.actions[mask].to(device),
        allowed=None if batch.action_masks is None else batch.action_masks[mask].to(device),
        imitation_mask=imitation_mask.to(device),
        returns=returns[mask].to(device),
        value_mask=value_mask.to(device),
        agent=per_decision(batch.agent).to(device),
        states=states.to(device),
        state=state.to(device),
    )


def joint_states(logged: LoggedUnits, env: ParallelEnv, agents: Mapping[str, Sequence[str]]) -> tuple[Tensor, Tensor]:
    """Build the inputs of a central critic, and find the units in which they are known.

    Returns the inputs, (units, T, S), and the known units, (units,) bool.

    Logged rows hold no times. So the joint observations of a unit are known only if every agent has one sequence
    there, and all have the same length: then step t was the same moment for all.
    """
    members = [(name, number) for name, played in agents.items() for number in range(len(played))]
    space = joint_space([env.observation_space(agents[name][number]) for name, number in members])
    units = len(logged.units)
    longest = max(batch.mask.shape[1] for batch in logged.policies.values())
    states = torch.from_numpy(np.zeros((units, longest, row_size(space)), row_dtype(space)))
    rows, lengths, begin = torch.zeros(units, len(members)), torch.zeros(units, len(members)), 0
    for column, (name, number) in enumerate(members):
        width = row_size(env.observation_space(agents[name][number]))
        batch = logged.policies.get(name)
        if batch is not None:
            is_of_agent = batch.agent == number
            unit = batch.episode[is_of_agent]
            states[unit, : batch.mask.shape[1], begin : begin + width] = batch.observations[is_of_agent].to(
                states.dtype
            )
            rows[:, column] = torch.bincount(unit, minlength=units).float()
            lengths[unit, column] = logged.lengths[name][is_of_agent].float()
        begin += width
    return states, (rows == 1).all(1) & (lengths == lengths[:, :1]).all(1)
