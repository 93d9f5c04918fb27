"""Agents of a bundle: a language model reads the page, or an actor-critic chooses an element of it."""

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from marl_ray.envs.web.elements import action_count, row_size
from marl_ray.envs.web.miniwob_elements import DEFAULT_ELEMENTS, ElementReader
from marl_ray.errors import FieldError
from marl_ray.evaluation.data_files import SHORT_DIGEST
from marl_ray.evaluation.web_agents.protocol import WebAgent, WebAnswer, WebTurn
from marl_ray.evaluation.web_agents.scripted import turn_generator
from marl_ray.evaluation.writing.authors import SamplingOverrides, WriterPolicies, generation_of
from marl_ray.json_types import JsonMapping
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.prompting.prompts import PromptTooLongError, fit_prompt
from marl_ray.rollout.rng import EVALUATION_STREAMS, response_stream, task_number


class LanguageAgent(WebAgent):
    """A language model that reads the text of each turn and writes an action."""

    def __init__(self, authors: WriterPolicies, agent: str, overrides: SamplingOverrides, seed: int, greedy: bool):
        """`agent` names the policy of the bundle that plays. Raises FieldError naming the option that does not fit."""
        name = authors.agents[agent]
        self.policy = authors.policies[name]
        self.digest = authors.digest
        self.seed = seed
        self.greedy = greedy
        self.generation = generation_of(self.policy, overrides)
        self.engine = authors.engine(name)

    @override
    def manifest(self) -> JsonMapping:
        drawn = "greedy" if self.greedy else f"temperature {self.generation.temperature:g}, seed {self.seed}"
        return {
            "agent": f"a language model of bundle {self.digest[:SHORT_DIGEST]}, {drawn}",
            "bundle": self.digest,
            "seed": self.seed,
            "greedy": self.greedy,
            "generation": self.generation.model_dump(mode="json"),
        }

    def act(self, turns: Sequence[WebTurn]) -> list[WebAnswer]:
        """Answer in one call of the engine. A prompt of which less than half would fit is answered with nothing."""
        answers = [WebAnswer("", 0) for _ in turns]
        prompts: dict[int, Prompt] = {}
        room = self.policy.config.context - self.generation.max_tokens
        for k, turn in enumerate(turns):
            try:
                ids, _ = fit_prompt(self.policy.tokenizer, turn.prompt, self.policy.config.chat, room)
            except PromptTooLongError:
                continue
            stream = response_stream(EVALUATION_STREAMS, task_number(turn.task_id), turn.sample, 0, 0, turn.number)
            prompts[k] = Prompt(tuple(ids), stream, self.greedy)
        if prompts:
            completions = self.engine.generate(list(prompts.values()), self.seed, self.generation)
            for k, completion in zip(prompts, completions, strict=True):
                text = self.policy.tokenizer.decode(
                    completion.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                answers[k] = WebAnswer(text, len(completion.ids))
        return answers


class ElementAgent(WebAgent):
    """An actor-critic that was trained on `miniwob_elements`: it chooses an element of the page."""

    def __init__(self, bundle: ActorCriticBundle, agent: str, seed: int, greedy: bool):
        """`agent` names the policy of the bundle that plays. Raises FieldError for one that was trained on anything else."""
        self.policy, self.digest = bundle.policies[bundle.agents[agent]], bundle.digest
        self.seed, self.greedy = seed, greedy
        self.elements = int(bundle.manifest.lineage.env.get("kwargs", {}).get("elements", DEFAULT_ELEMENTS))
        shape, actions = self.policy.observation_space.shape, getattr(self.policy.action_space, "n", 0)
        if shape != (row_size(self.elements),) or actions != action_count(self.elements):
            env = bundle.manifest.lineage.env.get("id")
            raise FieldError(
                "policy", f"expected language models, or actor-critics of miniwob_elements, not those of {env}"
            )
        self._readers: dict[int, ElementReader] = {}

    @override
    def manifest(self) -> JsonMapping:
        drawn = "greedy" if self.greedy else f"seed {self.seed}"
        facts = {"bundle": self.digest, "seed": self.seed, "greedy": self.greedy}
        return {"agent": f"an actor-critic of bundle {self.digest[:SHORT_DIGEST]}, {drawn}", **facts}

    @override
    def act(self, turns: Sequence[WebTurn]) -> list[WebAnswer]:
        for turn in turns:
            if turn.number == 0:
                self._readers[id(turn.env)] = ElementReader(self.elements)
        readers = [self._readers[id(turn.env)] for turn in turns]
        rows = [reader.read(turn.env) for reader, turn in zip(readers, turns, strict=True)]
        noise = None
        if not self.greedy:
            size = self.policy.distribution.noise
            noise = np.stack([turn_generator(self.seed, turn).random(size) for turn in turns])
        values, allowed = np.stack([row.values for row in rows]), np.stack([row.allowed for row in rows])
        actions, _ = self.policy.act(values, noise, allowed)
        return [WebAnswer(reader.action(int(action))) for reader, action in zip(readers, actions, strict=True)]
