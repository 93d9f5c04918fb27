"""Bundles of actor-critics: folders with `bundle.json` and the weights of each policy.

Weights are safetensors, and nothing in a bundle is a pickle. A bundle is content-addressed: its digest is the sha256 of
`bundle.json` without the digest itself, and `bundle.json` holds the sha256 of every other file. Only actors are kept;
critics live in checkpoints. Bundles of language models are in `policies.bundles.language`; `policies.bundles.loading`
loads both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from safetensors.torch import load_file, save_file
from torch import Tensor

from marl_ray.config import NetworkConfig
from marl_ray.errors import FieldError, MarlRayError, did_you_mean
from marl_ray.policies.actor_critic.distributions import Distribution, distribution_of
from marl_ray.policies.actor_critic.networks import Network
from marl_ray.policies.actor_critic.spaces import consists_of, row_dtype, space_from_json, space_to_json, to_row
from marl_ray.policies.bundles.manifest import (
    BaseBundle,
    Lineage,
    Manifest,
    PolicyManifest,
    check_file,
    file_hash,
    publish,
)

MAX_ROWS = 1 << 16
"""Maximum number of rows of one forward pass."""
NUMBER_TYPES: set[type] = {bool, int, float}
"""Types that lists in requests may consist of."""

PolicyCall = Callable[[str, list[int], np.ndarray, np.ndarray | None, np.ndarray | None], tuple[np.ndarray, np.ndarray]]
"""A function that acts in place of `ServedPolicy.act`: (policy's name, number of each row's request, the arguments
of `act`) -> its result."""


@dataclass(frozen=True)
class PolicyParts:
    """The parts of a trained policy that a bundle holds.

    `weights` are the actor's, by parameter name, on any device.
    """

    network: NetworkConfig
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class ServedPolicy:
    """One policy of a loaded bundle."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    distribution: Distribution
    actor: Network

    def act(
        self,
        observations: np.ndarray,
        noise: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the actions for the environment (N, *shape) and their log-probabilities (N,).

        `observations` is (N, *observation shape); `noise` (N, distribution.noise) are uniforms in [0, 1); without them
        the policy takes the most likely action. `allowed` (N, actions) bool masks a Discrete action.
        """
        flat = to_row(self.observation_space, observations).reshape(len(observations), -1)
        rows = torch.as_tensor(flat.astype(row_dtype(self.observation_space), copy=False))
        permitted = None if allowed is None else torch.as_tensor(allowed)
        outputs = self.distribution.normalize(self.actor.infer(rows), permitted)
        if noise is None:
            actions = self.distribution.mode(outputs)
        else:
            actions = self.distribution.sample(outputs, torch.as_tensor(noise))
        return self.distribution.to_env(actions), self.distribution.log_prob(outputs, actions).numpy()


@dataclass(frozen=True)
class ActorCriticBundle(BaseBundle):
    """A team read from a bundle, ready to act on CPU."""

    manifest: Manifest
    policies: dict[str, ServedPolicy]

    @cached_property
    def _categories(self) -> dict[str, np.ndarray]:
        """Agent -> number of categories of each entry of its observation.

        The mapping has only the agents whose observation is a row of categories that count from zero.
        """
        categories = {}
        for agent, policy in self.agents.items():
            space = self.policies[policy].observation_space
            if not isinstance(space, spaces.MultiDiscrete) or space.nvec.ndim != 1:
                continue
            if space.nvec.max() < 256 and not np.any(space.start):
                categories[agent] = space.nvec.astype(np.uint8)
        return categories

    @cached_property
    def _bounds(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Agent -> least and greatest observation, float32, for Boxes with bounds."""
        bounds = {}
        for agent, policy in self.agents.items():
            space = self.policies[policy].observation_space
            if isinstance(space, spaces.Box) and np.isfinite([space.low, space.high]).any():
                bounds[agent] = space.low.astype(np.float32), space.high.astype(np.float32)
        return bounds

    def parse_observation(self, agent: str, observation: object) -> np.ndarray:
        """Convert one observation of a request to an array. Raises FieldError naming what the agent expects."""
        categories = self._categories.get(agent)
        if categories is not None and isinstance(observation, list):
            # This is the usual case: `bytes` checks in one call that all entries are small integers. An array of the
            # list would take three times as long.
            try:
                row = np.frombuffer(bytes(observation), np.uint8)
            except (TypeError, ValueError):
                row = np.empty(0, np.uint8)
            if len(row) == len(categories) and np.count_nonzero(row < categories) == len(row):
                return row
        field = f"observations.{agent}"
        if agent not in self.agents:
            raise FieldError(field, f"unknown agent{did_you_mean(agent, self.agents)}")
        space = self.policies[self.agents[agent]].observation_space
        expected = f"an array of shape {list(space.shape or ())}"
        if isinstance(space, spaces.MultiDiscrete | spaces.Discrete | spaces.MultiBinary):
            expected += " of integers within the space"
        try:
            if isinstance(observation, list) and not consists_of(observation, NUMBER_TYPES):
                raise ValueError
            array = np.asarray(observation)
            if array.dtype.kind not in "iufb":
                raise ValueError
        except ValueError:
            raise FieldError(field, f"expected {expected}") from None
        if array.shape != (space.shape or ()):
            raise FieldError(field, f"expected {expected}, got shape {list(array.shape)}")
        with np.errstate(over="ignore"):  # a number that is too large for float32 becomes infinite
            single = array.astype(np.float32)
        if not np.isfinite(single).all():
            raise FieldError(field, f"expected {expected}, got NaN or infinity")
        if agent in self._bounds:
            low, high = self._bounds[agent]
            outside = (single < low) | (single > high)
            if outside.any():
                index = tuple(np.argwhere(outside)[0].tolist())
                raise FieldError(
                    field,
                    f"expected {expected} within its bounds, got {single[index]:g} at {list(index)}, where they "
                    f"are {low[index]:g} and {high[index]:g}",
                )
        if isinstance(space, spaces.Box):
            if array.dtype.kind == "f" and np.issubdtype(space.dtype, np.integer) and (single % 1 != 0).any():
                raise FieldError(field, f"expected {expected} of integers, got fractional numbers")
        else:
            if array.dtype.kind == "f":
                raise FieldError(field, f"expected {expected}, got fractional numbers")
            if not space.contains(array.astype(space.dtype)) or (array != array.astype(space.dtype)).any():
                raise FieldError(field, f"expected {expected}, got a category out of range")
        return array

    def parse_mask(self, agent: str, mask: object) -> np.ndarray:
        """Convert one action mask of a request to a bool array. Raises FieldError naming what the agent expects."""
        space, field = self.policies[self.agents[agent]].action_space, f"action_masks.{agent}"
        if not isinstance(space, spaces.Discrete):
            raise FieldError(field, "expected none, the agent's actions are not Discrete")
        flags = mask if isinstance(mask, list) else []
        if len(flags) != space.n or not all(flag in (0, 1) for flag in flags) or not any(flags):
            raise FieldError(field, f"expected {space.n} numbers 0 or 1, at least one of them 1")
        return np.array(flags, bool)

    def act(
        self,
        requests: Sequence[Mapping[str, np.ndarray]],
        noise: np.random.Generator | None = None,
        masks: Sequence[Mapping[str, np.ndarray]] = (),
        act: PolicyCall | None = None,
    ) -> list[dict[str, tuple[np.ndarray, float]]]:
        """Return the actions and log-probabilities for many requests with one forward pass per policy.

        A request is agent -> observation. With a generator actions are sampled, without one they are the most likely.
        `masks` are each request's action masks (agent -> allowed actions), where there are any. `act` acts in place
        of the policies.
        """
        answers: list[dict[str, tuple[np.ndarray, float]]] = [{} for _ in requests]
        for name, policy in self.policies.items():
            acting = [
                (i, agent) for i, request in enumerate(requests) for agent in request if self.agents[agent] == name
            ]
            if not acting:
                continue
            rows = np.array([requests[i][agent] for i, agent in acting])  # faster than np.stack for few
            uniforms = noise.random((len(acting), policy.distribution.noise)) if noise is not None else None
            allowed = None
            if any(masks):
                everything = np.ones(policy.distribution.parameters, bool)
                allowed = np.stack([masks[i].get(agent, everything) for i, agent in acting])
            if act is None:
                actions, log_probs = policy.act(rows, uniforms, allowed)
            else:
                actions, log_probs = act(name, [i for i, _ in acting], rows, uniforms, allowed)
            for (i, agent), action, log_prob in zip(acting, actions, log_probs.tolist(), strict=True):
                answers[i][agent] = (action, log_prob)
        return answers

    def log_probs(self, policy: str, rows: Tensor, actions: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the natural log-probabilities with which a policy takes given actions, (N,).

        For continuous actions these are densities. The arguments have the form that `Trajectories` have: `rows` (N, D)
        flat observations, `actions` (N, *shape) with choices counted from zero, `allowed` (N, choices) bool. An action
        that is not allowed has about -1e9.
        """
        served = self.policies[policy]
        masks = repeat(None) if allowed is None else allowed.split(MAX_ROWS)
        parts = []
        for part, taken, permitted in zip(rows.split(MAX_ROWS), actions.split(MAX_ROWS), masks, strict=False):
            outputs = served.distribution.normalize(served.actor.infer(part), permitted)
            parts.append(served.distribution.log_prob(outputs, taken))
        return torch.cat(parts)


def save_bundle(
    folder: str | Path, agents: Mapping[str, str], policies: Mapping[str, PolicyParts], lineage: Lineage
) -> Path:
    """Write a bundle as `folder/DIGEST[:DIGEST_DIGITS]` and return that path.

    The folder is complete or absent, never half-written.
    """

    def write(work: Path) -> Manifest:
        parts = {name: _write_policy(work, name, policy) for name, policy in policies.items()}
        return Manifest(agents=dict(agents), policies=parts, lineage=lineage)

    return publish(folder, write)


def _write_policy(folder: Path, name: str, policy: PolicyParts) -> PolicyManifest:
    path = folder / f"{name}.safetensors"
    save_file({key: value.detach().cpu().contiguous() for key, value in policy.weights.items()}, path)
    return PolicyManifest(
        network=policy.network,
        observation_space=space_to_json(policy.observation_space),
        action_space=space_to_json(policy.action_space),
        weights=path.name,
        sha256=file_hash(path),
    )


def read_actor_critics(folder: Path, manifest: Manifest) -> ActorCriticBundle:
    """Return the bundle whose files are in `folder`. Raises MarlRayError if any is missing or differs from its hash."""
    return ActorCriticBundle(manifest, {name: _read_policy(folder, entry) for name, entry in manifest.policies.items()})


def _read_policy(folder: Path, part: PolicyManifest) -> ServedPolicy:
    if Path(part.weights).name != part.weights:
        raise MarlRayError(f"bundle {str(folder)!r}: weights {part.weights!r} must be a plain file name")
    path = check_file(folder, part.weights, part.sha256)
    observation_space, action_space = space_from_json(part.observation_space), space_from_json(part.action_space)
    distribution = distribution_of(action_space)
    actor = Network(observation_space, part.network, distribution.parameters, gain=0.01)
    actor.load_state_dict(load_file(path))
    return ServedPolicy(observation_space, action_space, distribution, actor.eval().requires_grad_(False))
