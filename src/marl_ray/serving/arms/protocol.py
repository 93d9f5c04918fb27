"""The protocols of arms: the requests that they take and the answers that they give.

An arm is in this process or in another one.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from marl_ray.json_types import JsonMapping
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.policies.engines.decoding.logit_bias import LogitBias
from marl_ray.serving.arms.external.model import ExternalModel

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from marl_ray.policies.bundles.language import TokenBundle

AnyBundle: TypeAlias = "ActorCriticBundle | TokenBundle | ExternalModel"
ArraysByAgent = Mapping[str, np.ndarray]
"""Agent -> its observation, parsed by `ActorCriticBundle.parse_observation`, or its action mask."""
Answer = dict[str, tuple[np.ndarray, float]]
"""Agent -> action and its log-probability."""

Messages = tuple[JsonMapping, ...]
"""Items are `policies.prompting.prompts.Message`, whose import would load Jinja."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for one response."""

    agent: str
    """The agent that writes."""
    prompt: str | Messages | tuple[int, ...]
    """A string is encoded as in training, messages by the tokenizer's chat template, and token ids are taken unchanged."""
    seed: int
    """64 bits; this seed, the prompt and the settings determine the response."""
    greedy: bool = False
    changes: JsonMapping = field(default_factory=dict)
    """Fields of the bundle's GenerationConfig that the request overrides."""
    is_stop_hidden: bool = False
    """True if the response lacks the stop string, and the text that its last token has behind it."""
    has_names: bool = False
    """True if every token comes with its own text."""
    top: int = 0
    """Number of the most likely tokens to list beside each token."""
    raw: bool = False
    """True if a string is encoded without the chat template."""
    tools: tuple[Mapping[str, object], ...] = ()
    """Tools that the model may call, as OpenAI's API describes them; the chat template shows them."""
    must_call: tuple[str, ...] = ()
    """Tools one of which the response must call once; if empty, the model decides."""
    is_json_object: bool = False
    """True if the response must be a JSON object, unless `max_tokens` or `stop` truncates it."""
    bias: LogitBias | None = None
    """Amounts added to the logits before a token is drawn."""
    streamed: bool = False
    """True if every token is sent in a chunk of its own. Otherwise a few chunks are sent: each hand-over costs a part of a
    step."""
    logged: bool = False
    """True if the first chunk names what the response began with (`ResponseStart`), for the log."""


class NamedToken(NamedTuple):
    """A token as clients read it."""

    text: str
    """The token decoded alone."""
    utf8: list[int] | None
    """Its bytes (0 to 255); None if the tokenizer does not know them."""


class ResponseStart(NamedTuple):
    """The prompt and the settings that a response began with."""

    prompt_ids: list[int]
    """The prompt as the model read it."""
    settings: dict[str, object]
    """The settings in force: `temperature`, `top_p`, `top_k`, `max_tokens`."""


@dataclass(frozen=True, slots=True)
class ResponseChunk:
    """The part of a response that was written since the last chunk."""

    text: str
    """Whole characters only. Text that may become a hidden stop string is held back for a later chunk; the last chunk
    has the rest."""
    ids: list[int]
    """The tokens of this part; empty if the arm reports none."""
    log_probs: list[float]
    """The log-probability of each token, without biases.

    Log-probabilities are at the temperature of the request, or at the bundle's if the request is greedy."""
    finish: Literal["stop", "length"] | None
    """The reason why the response ends with this chunk; None if it goes on."""
    prompt_tokens: int
    """Number of tokens of the prompt; external arms report it in the last chunk alone."""
    names: list[NamedToken]
    """Each token's own text, if the request sets `has_names`."""
    tops: list[list[tuple[NamedToken, float]]] = field(default_factory=list)
    """Per token the most likely tokens and their log-probabilities, if the request sets `top`."""
    start: ResponseStart | None = None
    """Set in the first chunk if the request asks for it and the arm knows it."""
    tokens_without_ids: int = 0
    """Number of tokens without ids, which only external arms report, in the last chunk."""
    cost_usd: float | None = 0.0
    """Cost of the response in USD, in the last chunk; None if the arm has a price and the server reports no tokens."""

    @property
    def tokens(self) -> int:
        """The number of tokens in this chunk."""
        return len(self.ids) + self.tokens_without_ids


class Reply(Protocol):
    """A response while it is written."""

    async def next(self) -> ResponseChunk:
        """Wait for the next chunk.

        Nothing comes after an error or a chunk with a `finish`. Raises ServingError if the request is refused, and
        ArmError if the arm fails.
        """

    def leave(self) -> None:
        """End the response, whether or not it is complete.

        Whoever holds a reply must call this once it is done.
        """


class TextArm(Protocol):
    """An arm of language models.

    Such an arm is in this process (`TextBatcher`), in its own deployment (`RemoteTextArm`), or external (`ExternalArm`).
    """

    @property
    def bundle(self) -> "TokenBundle | ExternalModel":
        """The bundle whose policies write, or the external model."""

    def write(self, request: TextRequest) -> Reply:
        """Begin a response on the event loop, and return it at once.

        Waiting and errors come with its first chunk.
        """

    def close(self) -> None:
        """Release what the arm holds in this process, from any thread. Responses under way fail."""


@runtime_checkable
class ScoringArm(TextArm, Protocol):
    """A text arm that computes log-probabilities of other arms' responses.

    It also names what its own responses began with (`ResponseStart`).
    """

    async def score(self, agent: str, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, float]:
        """Return the number of tokens of another arm's response, and the sum of their log-probabilities.

        The tokens are of this arm's vocabulary: `ids` if these decode to `text` here too, else this arm's own encoding
        of `text`. The log-probabilities are at this bundle's temperature. Raises ArmError if it fails.
        """


class Arm(Protocol):
    """An arm of actor-critics.

    Such an arm is in this process (`ArmBatcher`) or in its own deployment (`RemoteArm`).
    """

    bundle: ActorCriticBundle

    def act(self, observations: ArraysByAgent, greedy: bool, masks: ArraysByAgent | None = None) -> Awaitable[Answer]:
        """Return the actions and log-probabilities of one request.

        `masks` has the allowed actions of those agents that gave any. Raises ArmError if the arm fails.
        """

    def close(self) -> None:
        """Release what the arm holds in this process, from any thread.

        Requests under way are still answered.
        """


def is_text(bundle: AnyBundle) -> "TypeIs[TokenBundle | ExternalModel]":
    """Return True if the bundle holds language models."""
    return bundle.manifest.family == "token"
