"""The base class of engines, and their inputs and outputs: token ids only, because an engine never encodes text."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from marl_ray.config.run.engines import EngineSpec
from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.decoding.json_guide import GuideState
from marl_ray.policies.engines.decoding.logit_bias import LogitBias
from marl_ray.policies.prompting.prompts import check_fits

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy


class EngineLostError(MarlRayError):
    """An engine's process has died or does not answer; a new process may work."""


class EngineRefusedError(MarlRayError):
    """An engine's process has answered with an error, which would come again."""


@dataclass(frozen=True)
class Prompt:
    """The prompt of one response, and how to sample it."""

    ids: tuple[int, ...]
    """Token ids, at least one."""
    stream: int
    """Number of the response's stream of random numbers (64 bits)."""
    greedy: bool = False
    """True if the response takes the most likely token each time."""
    guide: GuideState | None = None
    """The grammar that the response must follow, for engines that serve and take guides (`ServedEngine`)."""
    top: int = 0
    """Number of the most likely tokens that are returned beside each token, for engines that serve."""
    bias: LogitBias | None = None
    """Numbers that are added to the logits before a token is drawn, for engines that serve and take biases."""


@dataclass(frozen=True)
class Token:
    """One sampled token of one row of a batch."""

    handle: int
    """The handle that `RowDecoder.add` returned for the row."""
    id: int
    log_prob: float
    """Log-probability at the generation's temperature, without biases, and not renormalised after top-k and top-p."""
    finish: Literal["stop", "length"] | None
    """`stop`: an end token, a stop string or its guide has ended the response; `length`: it has max_tokens tokens."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at this place and their log-probabilities, the most likely first."""


@dataclass(frozen=True)
class Completion:
    """One response."""

    ids: list[int]
    """The sampled tokens, the end token included."""
    log_probs: list[float]
    ended: bool
    """True if an end token or a stop string has ended the response; False if `max_tokens` has ended it."""
    version: int = 0
    """`TokenPolicy.version` of the weights that sampled all of its tokens."""


class Engine(ABC):
    """Samples responses. A completion is a function of (weights, prompt, seed, generation), up to rounding of logits."""

    spec: ClassVar[EngineSpec] = EngineSpec()

    @staticmethod
    def has_weights(generation: GenerationConfig) -> bool:
        """Return True if an engine for `generation` has the policy's weights itself.

        The policy that it is made from may then be an empty copy, whose `sampling_weights` it takes in `update_weights`.
        """
        return False

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        """Write one completion per prompt, in order, by the policy's `generation` unless one is given.

        Raises MarlRayError if a prompt is empty, or too long for its response to fit the model's context.
        """

    @abstractmethod
    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        """Yield the tokens of `generate([prompt], seed, generation)` as soon as each is sampled."""

    def start(self) -> None:
        """Start what sampling needs.

        Every worker calls this before the training. Raises MarlRayError if it cannot start.
        """
        return

    def update_weights(self) -> None:
        """Take over the policy's current weights.

        Every worker calls this before it asks for a batch of responses.
        """
        return

    def sleep(self) -> None:
        """Release memory that only sampling needs, so that the learner can use it until the next response is asked for."""
        return

    def close(self) -> None:
        """Release everything that the engine holds besides the policy."""
        return


def tokens_of(completion: Completion) -> Iterator[Token]:
    """Yield the tokens of a complete response."""
    last = len(completion.ids) - 1
    finish: Literal["stop", "length"] = "stop" if completion.ended else "length"
    for place, (token, log_prob) in enumerate(zip(completion.ids, completion.log_probs, strict=True)):
        yield Token(0, token, log_prob, finish if place == last else None)


def checked_generation(
    policy: "TokenPolicy", prompts: Sequence[Prompt], generation: GenerationConfig | None
) -> GenerationConfig:
    """Return the settings with which these prompts are answered.

    The settings are the policy's, unless others are given. Raises MarlRayError for a prompt that cannot be answered.
    """
    settings = generation or policy.generation
    for prompt in prompts:
        if not prompt.ids:
            raise MarlRayError("prompt: expected at least one token")
        check_fits(prompt.ids, settings.max_tokens, policy.config.context)
    return settings
