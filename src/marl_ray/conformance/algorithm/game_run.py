"""A run of one algorithm on one tiny game, with real configs, teams, collectors and updates, in this process.

The policies begin uniform, with critics that are exact, and play listed actions, so that every path of the game is in a
batch equally often and means over the batch are expectations.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from marl_ray.config import HyperParameters, RunConfig, spec_of
from marl_ray.conformance.algorithm import truth
from marl_ray.conformance.algorithm.games import EPISODE_STEPS, POLICY_NAMES, STATE_COUNT, GameRules
from marl_ray.envs.registry import make_env
from marl_ray.policies.actor_critic.distributions import Categorical
from marl_ray.policies.actor_critic.networks import Network
from marl_ray.rollout.protocol import BatchCollector
from marl_ray.rollout.rng import team_order
from marl_ray.training.costs import CostStats
from marl_ray.training.evaluation.recent_episodes import RecentEpisodes, cost_stats
from marl_ray.training.evaluation.whole_episodes import gather_episodes
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.loop.collection import build_collector
from marl_ray.training.team.assembly import build_team
from marl_ray.training.team.joint_update import update_team
from marl_ray.trajectories import Trajectories

STILL_LEARNING_RATE = 1e-30
"""A learning rate that moves nothing."""
UNLIMITED = 1e9
"""A budget, a clip or a norm that no game of these reaches."""
_COLLECTOR_STATES: dict[object, dict[str, object]] = {}
"""Collectors' states, by the game and the number of cost signals; they depend on nothing else."""


class GridPoint(NamedTuple):
    """One case in which properties are checked."""

    policies: int = 1
    """Number of policies."""
    agents: int = 1
    """Number of agents of each policy."""
    below: bool = False
    """True if the horizon is below the episode's length."""
    is_terminated: bool = True
    """True if episodes end by their rules; otherwise they are truncated."""

    def __str__(self) -> str:
        horizon = "below" if self.below else "above"
        end = "ended" if self.is_terminated else "truncated"
        return f"{self.policies} policies x {self.agents} agents, horizon {horizon} the episode, {end}"


def read_keys(algorithm: str) -> frozenset[str]:
    """Return the keys of `hyper` that the algorithm reads."""
    return spec_of(algorithm).read_keys


def default_hyper(algorithm: str) -> HyperParameters:
    """Return the algorithm's default hyper-parameters."""
    spec = spec_of(algorithm)
    return spec.hyper.model_validate(spec.defaults)


def needs_whole_episodes(algorithm: str) -> bool:
    """Return True if the algorithm learns from whole episodes only, so that nothing stands for what follows a truncation."""
    return spec_of(algorithm).needs_whole_episodes


class ScriptedCategorical(Categorical):
    """A categorical that plays listed actions."""

    def __init__(self, script: list[np.ndarray]):
        """`script` are the actions (copies, agents) step by step; it is emptied as it is played."""
        super().__init__((2,), ())
        object.__setattr__(self, "script", script)

    @override
    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        actions: np.ndarray = self.script.pop(0)  # type: ignore[attr-defined]
        return torch.from_numpy(actions).reshape(-1)


@dataclass
class GameRun:
    """One algorithm on one tiny game, a batch at a time."""

    algorithm: str
    case: GridPoint
    hyper: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters; those that the algorithm does not read are left out."""
    budgets: Sequence[float] = (UNLIMITED, UNLIMITED)
    """Budget of each cost signal."""
    game: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `GameRules`."""
    mixed: bool = False
    """True if copies stand at all steps of the episode, and not all at the same."""
    after: truth.After = field(default_factory=truth.zero_sums)
    """Reward and costs that follow the end of a truncated episode, as the critics know them."""
    scripted: bool = True
    """True if the policies play listed actions, so that a batch holds every path; otherwise they sample."""
    micro_batch: int | None = None
    """Copies of a pass; None for all of them."""
    text: bool = False
    """True if the policies are language models, which talk."""

    def __post_init__(self) -> None:
        case, spec = self.case, spec_of(self.algorithm)
        self.game = {"priced": spec.needs_costs, **self.game}
        self.rules = GameRules(case.policies, case.agents, case.is_terminated, **self.game)
        self.has_whole_episodes = needs_whole_episodes(self.algorithm)
        bits = sum(len(self.rules.decisions(time)) for time in range(EPISODE_STEPS))
        self.paths = 1 << bits if self.scripted else 8
        self.mixed = self.mixed and case.below and not self.has_whole_episodes and self.scripted
        copies = self.paths * (2 if self.mixed else 1) + (spec.greedy and self.scripted)
        self.config = RunConfig.model_validate(
            {
                "name": "conformance",
                "algorithm": self.algorithm,
                "env": self._env_config(),
                "team": {name: self._policy_config(name) for name in POLICY_NAMES[: case.policies]},
                "hyper": {key: value for key, value in self.hyper.items() if key in read_keys(self.algorithm)},
                "constraints": [{"budget": budget} for budget in self.budgets] if spec.needs_costs else [],
                "train": {
                    "env_copies": copies,
                    "horizon": self._horizon(),
                    "group_size": copies if spec.groups or spec.greedy else 1,
                    "micro_batch": self.micro_batch,
                },
            }
        )
        torch.manual_seed(0)
        self.env = make_env(self.config.env, self.config.constraints)
        self.team = build_team(self.config, self.env, init_device_mesh("cpu", (1,)), False)
        self.learners: list[Learner] = list(self.team.learners.values())
        for learner in self.learners:
            learner.compiled_refusal = "the properties read torch's gradients"
        self.iteration = 0
        self.costs: dict[str, CostStats] = {name: CostStats(None, 0) for name in self.team.learners}
        self.recent = RecentEpisodes(self.config)
        if self.text:
            self.collector = self._build_collector()
            for learner in self.learners:
                silence_critics(learner)
            return
        self.uniform = [[[0.5, 0.5]] * STATE_COUNT for _ in range(self.rules.count)]
        self.values = truth.values(self.rules, self.uniform, self.after)
        for number, learner in enumerate(self.learners):
            self._fit_exactly(number, learner)
        self.collector = self._build_collector(self._state_ahead() if self.mixed else None)

    def _horizon(self) -> int:
        if self.text:
            return 2 * self.rules.count
        above = EPISODE_STEPS + 1 if self.has_whole_episodes else 2 * EPISODE_STEPS
        return 1 if self.case.below else above

    def _env_config(self) -> dict[str, object]:
        case = self.case
        if not self.text:
            kwargs = {
                "policies": case.policies,
                "agents": case.agents,
                "is_terminated": case.is_terminated,
                **self.game,
            }
            return {"id": "marl_ray.conformance.algorithm.games:TinyGame", "kwargs": kwargs}
        kwargs = {"policies": case.policies, "agents": case.agents}
        if spec_of(self.algorithm).needs_costs:
            kwargs["cost"] = ["calls", "seconds"]
        return {"id": "marl_ray.conformance.algorithm.games:TinyTalk", "kwargs": kwargs}

    def _policy_config(self, name: str) -> dict[str, object]:
        if not self.text:
            return {"agents": [f"{name}_*"], "network": {"hidden": [32]}}
        model = {"preset": "tiny-0.2m", "context": 32, "chat": False}
        # Every second of the 256 bytes ends a response; the others continue, until the limit truncates them.
        stop = [chr(byte) for byte in range(128)]
        return {"agents": [f"{name}_*"], "model": model, "generation": {"max_tokens": 2, "stop": stop}}

    def _build_collector(self, state: dict[str, object] | None = None) -> BatchCollector:
        return build_collector(self.config, self.env, self.team.agents, 0, 1, state)

    def _fit_exactly(self, number: int, learner: Learner) -> None:
        """Make the actor uniform, and the critics know the game's true values (zeros if the critic is fitted first)."""
        model, rules = learner.policy.rollout_model, self.rules
        fit_last_layer(model.actor, own_rows(rules), torch.zeros(STATE_COUNT * rules.agents, 2))
        if model.critics:
            exact = torch.tensor([self.values[state] for state in range(STATE_COUNT)])
            if spec_of(self.algorithm).critic_first:
                exact = torch.zeros_like(exact)
            rows = joint_rows(rules) if model.central else own_rows(rules)
            agents = rules.agents
            for critic, columns in ((model.critic, exact[:, :1]), (model.cost_critic, exact[:, 1:])):
                if critic is not None:
                    targets = columns.repeat(1, agents) if model.central else columns.repeat_interleave(agents, 0)
                    fit_last_layer(critic, rows, targets)
        write_back(learner)

    def _script(self, steps: int, mixed: bool) -> list[np.ndarray]:
        """Return the actions (copies, all agents) by step: the copies together play every path once."""
        copies = np.arange(self.config.train.env_copies)
        ahead = (copies >= self.paths).astype(np.int64) if mixed else np.zeros(len(copies), np.int64)
        script = []
        for step in range(steps):
            actions = np.zeros((len(copies), self.rules.count), np.int64)
            bit = 0
            for time in range(EPISODE_STEPS):
                for agent in self.rules.decisions(time):
                    now = step == time if self.has_whole_episodes else (step + ahead) % EPISODE_STEPS == time
                    actions[:, agent] += np.where(now, copies % self.paths >> bit & 1, 0)
                    bit += 1
            script.append(actions)
        return script

    @contextmanager
    def _playing_script(self, mixed: bool) -> Iterator[None]:
        """Make the policies play the script, within the block."""
        if not self.scripted:
            yield
            return
        steps = self._script(self.config.train.horizon * (self.iteration + 1), mixed)[-self.config.train.horizon :]
        distributions = [learner.policy.rollout_model.distribution for learner in self.learners]
        for number, learner in enumerate(self.learners):
            members = slice(number * self.rules.agents, (number + 1) * self.rules.agents)
            learner.policy.rollout_model.distribution = ScriptedCategorical([actions[:, members] for actions in steps])
        try:
            yield
        finally:
            for learner, distribution in zip(self.learners, distributions, strict=True):
                learner.policy.rollout_model.distribution = distribution

    def _state_ahead(self) -> dict[str, object]:
        """Return the state from which a collector continues with the second half of the copies one step ahead."""
        key = (self.rules, self.config.cost_signals)
        if key not in _COLLECTOR_STATES:
            collector = self._build_collector()
            with self._playing_script(mixed=False):
                collector.collect(self.team.players(), 0)
            state = collector.state()
            _COLLECTOR_STATES[key] = {number: saved for number, saved in state.items() if int(number) >= self.paths}
        return _COLLECTOR_STATES[key]

    def collect(self) -> dict[str, Trajectories]:
        """Return the next batch. `costs` then holds, by policy, the costs of the episodes that ended in it."""
        with self._playing_script(self.mixed):
            batch = self.collector.collect(self.team.players(), self.iteration)
        ended, running, _ = gather_episodes(self.config, batch, self.collector)
        self.costs = cost_stats(self.recent.add(ended, running), self.costs)
        return batch.trajectories

    def update(self, batches: dict[str, Trajectories]) -> dict[str, float]:
        """Update every policy on a batch and return its metrics."""
        metrics = update_team(self.config, self.team, batches, self.iteration, 0, self.costs)
        self.iteration += 1
        return metrics

    def skip(self) -> None:
        """Continue to the next iteration without an update."""
        self.iteration += 1

    def step(self) -> dict[str, float]:
        """Run one iteration and return its metrics."""
        return self.update(self.collect())

    def order_of(self, iteration: int) -> list[int]:
        """Return the numbers of the policies in the order in which an iteration updates them."""
        count = len(self.learners)
        sequential = spec_of(self.algorithm).order == "sequential"
        return team_order(self.config.seed, iteration, count) if sequential else list(range(count))

    @property
    def ended(self) -> int:
        """Number of episodes that ended in the last batch."""
        return self.costs[POLICY_NAMES[0]].episodes

    @property
    def means(self) -> tuple[float, ...] | None:
        """Mean costs of an episode, once any has ended; None before."""
        return self.costs[POLICY_NAMES[0]].means

    def tables(self) -> list[list[list[float]]]:
        """Return the action probabilities of the policies, by agent, state and action."""
        tables = []
        for learner in self.learners:
            with torch.no_grad():
                outputs = learner.policy.rollout_model.actor.infer(own_rows(self.rules)).double().softmax(-1)
            tables += outputs.reshape(STATE_COUNT, self.rules.agents, 2).transpose(0, 1).tolist()
        return tables

    def weight_gradient(self, number: int, by_logit: Sequence[Sequence[Sequence[float]]]) -> Tensor:
        """Return the gradient of a function by a policy's weights, flat.

        `by_logit` is the function's gradient by agent, state and action.
        """
        actor = copy.deepcopy(self.learners[number].policy.rollout_model.actor).requires_grad_(True)
        logits = actor(*actor.prepare(own_rows(self.rules))).double()
        first = number * self.rules.agents
        direction = torch.tensor(by_logit[first : first + self.rules.agents], dtype=torch.float64).transpose(0, 1)
        (logits * direction.reshape(-1, 2)).sum().backward()
        return torch.cat([cast(Tensor, p.grad).reshape(-1).double() for p in actor.parameters()])


def own_rows(rules: GameRules) -> Tensor:
    """Return the observations that an agent of a policy may have: (STATE_COUNT * agents, 2)."""
    pairs = [(state, number) for state in range(STATE_COUNT) for number in range(rules.agents)]
    return torch.tensor(pairs)


def joint_rows(rules: GameRules) -> Tensor:
    """Return the joint observations of all agents: (STATE_COUNT, 2 * all agents)."""
    rows = [
        [entry for _ in range(rules.policies) for k in range(rules.agents) for entry in (state, k)]
        for state in range(STATE_COUNT)
    ]
    return torch.tensor(rows)


@torch.no_grad()
def fit_last_layer(network: Network, rows: Tensor, targets: Tensor) -> None:
    """Make the network's output exactly `targets` (N, out) at `rows` (N, D), by its last layer alone."""
    features = network.rest[:-1](network.first(rows)).double()
    last = cast(nn.Linear, network.rest[-1])
    inputs = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    solution = torch.linalg.lstsq(inputs, targets.double(), driver="gelsd").solution
    last.weight.copy_(solution[:-1].T)
    last.bias.copy_(solution[-1])


@torch.no_grad()
def silence_critics(learner: Learner) -> None:
    """Make the critics of a language model output 0 everywhere."""
    for model in (learner.policy.rollout_model, learner.policy.model):
        for head in model.heads:
            for parameter in head.parameters():
                local_part(parameter).zero_()


@torch.no_grad()
def write_back(learner: Learner) -> None:
    """Copy the rollout copy's weights into the trained ones."""
    for plain, parameter in zip(
        learner.policy.rollout_model.parameters(), learner.policy.model.parameters(), strict=True
    ):
        local_part(parameter).copy_(plain)


def local_part(tensor: Any) -> Tensor:
    """Return this worker's part of a distributed tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
