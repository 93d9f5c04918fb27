"""The functions of an engine that an arm needs.

Responses of many clients join and leave between two tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from marl_ray.config.run.engines import engine_spec
from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.extensions import import_reference
from marl_ray.policies.engines.base import Prompt, Token

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy


class RowDecoder(Protocol):
    """A batch of responses, a row each, which are written token by token."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def add(self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig) -> list[int]:
        """Begin responses to `prompts` and return a handle per prompt."""

    def step(self, not_finite: list[int] | None = None) -> list[Token]:
        """Return the next token of every row. Rows that end with it are removed.

        A row whose logits are not finite is removed, and its handle is appended to `not_finite`.
        """

    def remove(self, handle: int) -> None:
        """Remove a row before its end. Raises KeyError if no row has this handle."""


class ServedEngine(Protocol):
    """Writes the responses of one policy of an arm, whose weights never change.

    The object is made from the policy, ready when that returns, and raises MarlRayError for a policy that it cannot
    write for. Only one thread at a time uses it, but any may call `close`.
    """

    takes_guides: ClassVar[bool] = False
    """True if responses can follow the grammar of their prompt (`Prompt.guide`)."""
    takes_biases: ClassVar[bool] = False
    """True if it adds the numbers of a prompt (`Prompt.bias`) to the logits."""
    loads_adapters: ClassVar[bool] = False
    """True if it takes an adapter beside its base model; other engines get the policy with the adapter merged."""
    bytes_per_row: int = 0
    """Bytes that a response of the greatest length needs of the memory that the arm counts; 0 if the engine counts it."""

    def __init__(self, policy: "TokenPolicy") -> None: ...

    def decoder(self) -> RowDecoder:
        """Return the decoder of the unfinished responses. Raises MarlRayError if the engine cannot start."""

    def abandon(self) -> None:
        """End all responses of this policy; those of other policies continue."""

    def close(self) -> None:
        """Release everything that the engine holds besides the policy; a second call does nothing."""


def served_engine(engine: str) -> type[ServedEngine]:
    """Return the class that writes an arm's responses by an engine.

    Raises MarlRayError if the engine does not serve.
    """
    server = engine_spec(engine).server
    if server is None:
        raise MarlRayError(f"engine={engine} does not serve")
    server_class: type[ServedEngine] = import_reference(server)
    return server_class
