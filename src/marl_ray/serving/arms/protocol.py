"""The protocols of arms: the requests they take and the answers they give, in this process or another one."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from marl_ray.policies.bundles.actor_critic import Bundle
from marl_ray.policies.engines.decoding.logit_bias import LogitBias
from marl_ray.serving.arms.external.model import ExternalModel

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from marl_ray.policies.bundles.language import TokenBundle

AnyBundle: TypeAlias = "Bundle | TokenBundle | ExternalModel"
ArraysByAgent = Mapping[str, np.ndarray]
"""Agent -> its observation, checked by `Bundle.check`, or its action mask."""
Answer = dict[str, tuple[np.ndarray, float]]
"""Agent -> action and its log-probability."""

Messages = tuple[Mapping[str, Any], ...]
"""Each is a `policies.prompting.prompts.Message`; importing that loads Jinja."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for one response."""

    agent: str
    prompt: str | Messages | tuple[int, ...]
    """A text is encoded as in training, messages by the tokenizer's chat template; token ids are taken as they are."""
    seed: int
    """The response is a function of this, the prompt and the settings (64 bits)."""
    greedy: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the bundle's GenerationConfig that the request sets itself."""
    hide_stop: bool = False
    """Leave the stop string, and what a token has behind it, out of the text."""
    names: bool = False
    """Tell every token's own text."""
    top: int = 0
    """The number of most likely tokens to list beside each token."""
    raw: bool = False
    """A text is encoded without the chat template."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the model may call, as OpenAI's API describes them; the chat template shows them."""
    must_call: tuple[str, ...] = ()
    """The response is one call of one of these tools; of none of them: as the model likes."""
    json_object: bool = False
    """The response is a JSON object, unless it is cut off by `max_tokens` or `stop`."""
    bias: LogitBias | None = None
    """Amounts added to the logits before a token is drawn."""
    streamed: bool = False
    """A piece as soon as there is a token; else a first one, and then few: every hand-over costs a share of a step."""
    logged: bool = False
    """Tell with the first piece what the response began with: it goes into the log."""


class NamedToken(NamedTuple):
    """A token as clients read it."""

    text: str
    """The token decoded alone."""
    utf8: list[int] | None
    """Its bytes (0 to 255); None where the tokenizer does not tell them."""


class Began(NamedTuple):
    """The prompt and the settings that a response began with."""

    prompt_ids: list[int]
    """The prompt as the model read it."""
    settings: dict[str, Any]
    """The settings in force: `temperature`, `top_p`, `top_k`, `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a response that was written since the last piece."""

    text: str
    """Whole characters only, and nothing that may turn out to be a hidden stop string: a later piece brings what is
    held back. The last piece has the rest."""
    ids: list[int]
    log_probs: list[float]
    """At the bundle's temperature where the request is greedy, else at its own; biases are not in them."""
    finish: Literal["stop", "length"] | None
    prompt_tokens: int
    names: list[NamedToken]
    tops: list[list[tuple[NamedToken, float]]] = field(default_factory=list)
    """Per token the most likely ones and their log-probabilities, where `top` asks for them."""
    began: Began | None = None
    """Set in the first piece, where the request asks for it and the arm knows."""
    untold: int = 0
    """Tokens that have no ids here; of external arms, with the last piece."""
    cost_usd: float | None = 0.0
    """The cost of the response in USD, in the last piece; None if the arm has a price and the server does not count
    tokens."""

    @property
    def tokens(self) -> int:
        """The number of tokens in this piece."""
        return len(self.ids) + self.untold


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal instead of a piece: the arm is not at fault, and no other arm is to be tried."""

    status: int
    field: str | None
    message: str
    retry_after_s: float | None = None
    too_long: bool = False
    """True if prompt and response do not fit the model's context together."""


class Reply(Protocol):
    """A response while it is written."""

    async def next(self) -> Piece | Refusal:
        """Wait for the next piece or a refusal; nothing comes after a refusal or a piece with a `finish`. ArmError if
        the arm fails."""

    def leave(self) -> None:
        """Give the response up or end it; whoever holds a reply calls this at the end in any case."""


class TextArm(Protocol):
    """An arm of language models: in this process (`TextBatcher`), in a deployment of its own (`RemoteTextArm`), or
    external (`ExternalArm`)."""

    @property
    def bundle(self) -> "TokenBundle | ExternalModel": ...

    def write(self, request: TextRequest) -> Reply: ...

    def close(self) -> None:
        """Let go of what the arm holds in this process; responses under way fail."""


class ScoringArm(TextArm, Protocol):
    """A text arm that names the beginnings of its responses (`Began`) and gives log-probabilities of other arms'
    responses."""

    async def score(self, agent: str, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, float]:
        """The number of tokens that another arm's response has here, and their log-probability together, at the
        bundle's own temperature. The tokens are `ids` where these spell `text` for this arm too, else its own tokens of
        `text`. ArmError if it fails."""


class Arm(Protocol):
    """An arm of actor-critics: in this process (`ArmBatcher`) or in a deployment of its own (`RemoteArm`)."""

    bundle: Bundle

    def act(
        self, observations: ArraysByAgent, greedy: bool, masks: ArraysByAgent | None = None
    ) -> Awaitable[Answer]: ...


def is_text(bundle: AnyBundle) -> "TypeIs[TokenBundle | ExternalModel]":
    """True if the bundle holds language models."""
    return bundle.manifest.family == "token"
