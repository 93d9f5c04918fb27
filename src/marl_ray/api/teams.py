"""`marl_ray.load`: a bundle's team, ready to act in this process."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from marl_ray.api.calls import named_arguments, short_repr
from marl_ray.closing import close_all
from marl_ray.config import GenerationConfig, resolve_tracking_uri
from marl_ray.errors import FieldError, did_you_mean

if TYPE_CHECKING:
    from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
    from marl_ray.policies.bundles.language import TokenBundle
    from marl_ray.policies.engines.base import Engine
    from marl_ray.policies.language.token_policy import TokenPolicy


@named_arguments
def load(bundle: str | Path, tracking_uri: str | None = None) -> "LoadedTeam":
    """Load a bundle and check its digests.

    `bundle` is a folder, `models:/NAME/VERSION` or `models:/NAME@ALIAS`; `tracking_uri` is the URI of the MLflow that
    has the latter, by default that of MLFLOW_TRACKING_URI or `runs/mlflow.db`. Raises MarlRayError if the bundle is
    missing or damaged, and a FieldError that names an argument of a wrong type.
    """
    if not isinstance(bundle, str | Path):
        expected = "a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS"
        raise FieldError("bundle", f"expected {expected}, got {short_repr(bundle)}")
    if not isinstance(tracking_uri, str | None):
        raise FieldError("tracking_uri", f"expected a URI, got {short_repr(tracking_uri)}")
    from marl_ray.policies.bundles.loading import load_bundle

    return LoadedTeam(load_bundle(bundle, resolve_tracking_uri(tracking_uri)), str(bundle))


class LoadedTeam:
    """The policies of a bundle, ready to act for its agents. Not safe to use from several threads at once."""

    def __init__(self, bundle: "ActorCriticBundle | TokenBundle", source: str):
        """Hold a bundle, which `source` names as the user did: by its folder, or its name in MLflow."""
        self.bundle = bundle
        self.source = source
        self._engines: dict[str, Engine] = {}

    @property
    def agents(self) -> dict[str, str]:
        """Agent -> the policy that plays it."""
        return self.bundle.agents

    def __repr__(self) -> str:
        algorithms = self.bundle.manifest.lineage.algorithm
        agents = ", ".join(
            f"{agent}: {policy} ({algorithms.get(policy, 'not trained')})" for agent, policy in self.agents.items()
        )
        return f"<LoadedTeam {agents}; from {self.source}>"

    @named_arguments
    def act(
        self,
        observations: Mapping[str, Any],
        *,
        greedy: bool = False,
        seed: int | None = None,
        action_masks: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return agent -> action for each agent whose observation is given.

        An actor-critic's observation is what its environment gives (an array of the observation space's shape), and the
        action is one that `env.step` takes. A language model's observation is a prompt and its action is the response,
        both texts. Actions are drawn, with `seed` the same ones each time, or are the most likely if `greedy` is true.
        `action_masks` are for actor-critics (agent -> one flag for each Discrete action), `generation` changes keys of
        the policies' `generation` (such as `max_tokens`) for language models.

        Raises FieldError, whose field names the argument and the agent.
        """
        from marl_ray.policies.bundles.actor_critic import ActorCriticBundle

        if not isinstance(observations, Mapping):
            raise FieldError("observations", f"expected agent -> observation, got {type(observations).__name__}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0):
            raise FieldError("seed", f"expected a whole number of 0 or more, got {short_repr(seed)}")
        if not isinstance(action_masks, Mapping | None):
            raise FieldError("action_masks", f"expected agent -> mask, got {type(action_masks).__name__}")
        if not isinstance(generation, Mapping | None):
            raise FieldError("generation", f"expected settings by name, got {type(generation).__name__}")
        if isinstance(self.bundle, ActorCriticBundle):
            if generation is not None:
                raise FieldError("generation", "expected none, the bundle holds actor-critics")
            return _choose_actions(self.bundle, observations, greedy, seed, action_masks or {})
        if action_masks is not None:
            raise FieldError("action_masks", "expected none, the bundle holds language models")
        return self._write_texts(self.bundle, observations, greedy, seed, generation or {})

    def close(self) -> None:
        """Release what language models hold besides their weights, such as a process of vLLM."""
        engines = list(self._engines.values())
        self._engines.clear()
        close_all(engine.close for engine in engines)

    def _write_texts(
        self,
        bundle: "TokenBundle",
        prompts: Mapping[str, object],
        greedy: bool,
        seed: int | None,
        changes: Mapping[str, object],
    ) -> dict[str, str]:
        from marl_ray.policies.engines.base import Prompt
        from marl_ray.policies.prompting.prompts import encode_prompt

        sampling_seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)  # an int64 for vLLM
        texts = {}
        for number, (agent, text) in enumerate(prompts.items()):
            if agent not in bundle.agents:
                raise FieldError(f"observations.{agent}", f"unknown agent{did_you_mean(agent, bundle.agents)}")
            if not isinstance(text, str):
                raise FieldError(f"observations.{agent}", f"expected a text, got {type(text).__name__}")
            name = bundle.agents[agent]
            policy = bundle.policies[name]
            prompt = Prompt(tuple(encode_prompt(policy.tokenizer, text, policy.config.chat)), number, greedy)
            (completion,) = self._engine(name, policy).generate(
                [prompt], sampling_seed, _change_generation(policy.generation, changes)
            )
            texts[agent] = policy.tokenizer.decode(completion.ids, skip_special_tokens=True)
        return texts

    def _engine(self, name: str, policy: "TokenPolicy") -> "Engine":
        if name not in self._engines:
            from marl_ray.policies.engines.choice import make_engine

            self._engines[name] = make_engine(policy)
        return self._engines[name]


def _change_generation(generation: GenerationConfig, changes: Mapping[str, object]) -> GenerationConfig:
    from marl_ray.config import parse_config

    return parse_config(GenerationConfig, generation.model_dump(mode="json") | dict(changes), source="generation")


def _choose_actions(
    bundle: "ActorCriticBundle",
    observations: Mapping[str, object],
    greedy: bool,
    seed: int | None,
    masks: Mapping[str, object],
) -> dict[str, object]:
    rows = {agent: bundle.parse_observation(agent, observation) for agent, observation in observations.items()}
    if unknown := [agent for agent in masks if agent not in rows]:
        raise FieldError(f"action_masks.{unknown[0]}", "expected an observation of this agent too")
    allowed = {agent: bundle.parse_mask(agent, np.asarray(mask).tolist()) for agent, mask in masks.items()}
    noise = None if greedy else np.random.default_rng(seed)
    (answer,) = bundle.act([rows], noise, [allowed] if allowed else ())
    return {agent: action for agent, (action, _) in answer.items()}
