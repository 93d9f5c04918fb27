"""What an arm is: what goes into it and what comes out, in this process or another one."""

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
Observations = Mapping[str, np.ndarray]
"""Agent -> observation, checked by `Bundle.check`."""
Answer = dict[str, tuple[np.ndarray, float]]
"""Agent -> action and its log-probability."""

Message = Mapping[str, Any]
"""`role` and `content`; an assistant's may have `tool_calls`, a tool's has `tool_call_id` and may have `name`."""
Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One response that is asked for."""

    agent: str
    prompt: str | Messages | tuple[int, ...]
    """A text is encoded as in training, messages by the tokenizer's chat template; token ids are taken as they are."""
    seed: int
    """The response is a function of this, the prompt and the settings (64 bits)."""
    greedy: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the bundle's GenerationConfig."""
    hide_stop: bool = False
    """Leave the stop string, and what a token has behind it, out of the text."""
    names: bool = False
    """Tell every token's own text."""
    top: int = 0
    """How many of the most likely tokens to tell beside each."""
    raw: bool = False
    """A text is encoded without the chat template."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the model may call, as OpenAI's API describes it: the chat template is given these."""
    must_call: tuple[str, ...] = ()
    """The response is one call of one of these tools; of none of them: as the model likes."""
    json_object: bool = False
    """The response is a JSON object, unless it is cut off by `max_tokens` or `stop`."""
    bias: LogitBias | None = None
    """What is added to the logits before a token is drawn."""
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
    """What a response began with."""

    prompt_ids: list[int]
    """The prompt as the model read it."""
    settings: dict[str, Any]
    """In force: `temperature`, `top_p`, `top_k`, `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What has been written since the last piece."""

    text: str
    """Of whole characters only, and nothing that may turn out to be a hidden stop string: what is held back comes with a
    later piece. The last piece has the rest."""
    ids: list[int]
    log_probs: list[float]
    """At the bundle's temperature where the request is greedy, else at its own; biases are not in them."""
    finish: Literal["stop", "length"] | None
    prompt_tokens: int
    names: list[NamedToken]
    tops: list[list[tuple[NamedToken, float]]] = field(default_factory=list)
    """Per token the most likely ones and their log-probabilities, where `top` asks for them."""
    began: Began | None = None
    """Of the first piece, where the request asks for it and the arm knows."""
    untold: int = 0
    """Tokens that have no ids here; of external arms, with the last piece."""
    cost_usd: float | None = 0.0
    """What the response costs in USD, with the last piece; None if the arm has a price and the other side does not count
    tokens."""

    @property
    def tokens(self) -> int:
        """How many were written."""
        return len(self.ids) + self.untold


@dataclass(frozen=True, slots=True)
class Refusal:
    """Instead of a piece: no fault of the arm, and not to be tried with another one."""

    status: int
    field: str | None
    message: str
    retry_after_s: float | None = None


class Reply(Protocol):
    """One response on its way."""

    async def next(self) -> Piece | Refusal:
        """What comes next; nothing after a refusal or a piece with a `finish`. ArmError if the arm fails."""

    def leave(self) -> None:
        """Nobody waits for it any more; to be called at the end in any case."""


class TextArm(Protocol):
    """Language models: in this process (`TextBatcher`), in a deployment of their own (`RemoteTextArm`), or somebody else's
    (`ExternalArm`)."""

    @property
    def bundle(self) -> "TokenBundle | ExternalModel": ...

    def write(self, request: TextRequest) -> Reply: ...

    def close(self) -> None:
        """Let go of what it holds in this process; what is on its way fails."""


class ScoringArm(TextArm, Protocol):
    """A text arm that tells what its responses began with (`Began`), and what it thinks of other responses."""

    async def score(self, agent: str, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, float]:
        """How many tokens a response of another arm has here, and their log-probability together, at the bundle's own
        temperature: `ids` where they are this arm's words for `text`, else its own. ArmError if it fails."""


class Arm(Protocol):
    """Actor-critics: in this process (`ArmBatcher`) or in a deployment of their own (`RemoteArm`)."""

    bundle: Bundle

    def act(self, observations: Observations, greedy: bool, masks: Observations | None = None) -> Awaitable[Answer]: ...


def is_text(bundle: AnyBundle) -> "TypeIs[TokenBundle | ExternalModel]":
    """Whether it holds language models."""
    return bundle.manifest.family == "token"
