"""A decoder that lets vLLM write, with the methods of the built-in `Decoder`.

Rows join and leave between steps.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from marl_ray.config.run.model import GenerationConfig
from marl_ray.policies.engines.base import EngineLostError, Prompt, Token
from marl_ray.policies.engines.decoding.stop_strings import StopStrings
from marl_ray.policies.engines.vllm.process.child import VllmProcess
from marl_ray.policies.engines.vllm.process.decoder_ports import DecoderPort
from marl_ray.policies.engines.vllm.process.messages import SampledToken, VllmRequest
from marl_ray.policies.language.philox import token_uniforms
from marl_ray.policies.prompting.protocol import Tokenizer


@dataclass
class _Row:
    generation: GenerationConfig
    ids: list[int] = field(default_factory=list)


class VllmDecoder:
    """Responses that one version of the weights writes. It takes no prompts with a guide or a bias."""

    def __init__(
        self,
        process: VllmProcess | DecoderPort,
        tokenizer: Tokenizer,
        ends: AbstractSet[int],
        version: int,
        adapter: int = 0,
    ) -> None:
        """Use the weights of `version`, the process's or those of its `adapter`. `ends` are tokens that end a response."""
        self._process = process
        self._tokenizer = tokenizer
        self._version = version
        self._adapter = adapter
        self._ends = tuple(sorted(ends))
        self._rows: dict[int, _Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig) -> list[int]:
        """Begin responses to `prompts` and return a handle per prompt."""
        numbers = token_uniforms(seed, [prompt.stream for prompt in prompts], 1)[:, 0]
        handles = [next(self._process.handles) for _ in prompts]
        requests = [
            VllmRequest(
                handle,
                prompt.ids,
                0.0 if prompt.greedy else generation.temperature,
                generation.top_k,
                generation.top_p,
                generation.max_tokens,
                self._ends,
                int(number * 2**52),
                self._adapter,
                prompt.top,
            )
            for handle, prompt, number in zip(handles, prompts, numbers, strict=True)
        ]
        self._process.ask("add", requests)
        self._rows.update((handle, _Row(generation)) for handle in handles)
        return handles

    def step(self, not_finite: list[int] | None = None) -> list[Token]:
        """Return the next token of every row. Rows whose token is their last are removed.

        A row whose logits are not finite is removed, and its handle is appended to `not_finite`. Raises EngineLostError if
        the process dies, does not answer, or samples with another version.
        """
        sampled: list[SampledToken] = self._process.ask("step") if self._rows else []
        for token in sampled:
            if token.version != self._version:
                raise EngineLostError(
                    f"generation.engine=vllm: it samples with version {token.version} of the weights, expected "
                    f"{self._version}"
                )
            self._rows[token.handle].ids.append(token.id)
        stopped = self._stopped_rows([token.handle for token in sampled])
        tokens, given_up = [], []
        for token in sampled:
            row = self._rows[token.handle]
            by_itself, is_truncated = token.id in self._ends, len(row.ids) == row.generation.max_tokens
            bad = token.log_prob != token.log_prob
            if bad and not_finite is not None:
                not_finite.append(token.handle)
            else:
                ended = by_itself or token.handle in stopped
                finish: Literal["stop", "length"] | None = None
                if ended:
                    finish = "stop"
                elif is_truncated:
                    finish = "length"
                tokens.append(Token(token.handle, token.id, token.log_prob, finish, token.top))
            if by_itself or is_truncated:
                del self._rows[token.handle]  # vLLM itself has ended this response
            elif bad or token.handle in stopped:
                given_up.append(token.handle)
        self._give_up(given_up)
        return tokens

    def remove(self, handle: int) -> None:
        """Remove a row before its end. Raises KeyError if no row has this handle."""
        self._give_up([handle])

    def clear(self) -> None:
        """Remove all rows."""
        self._give_up(list(self._rows))

    def _give_up(self, handles: Sequence[int]) -> None:
        for handle in handles:
            del self._rows[handle]
        if handles:
            self._process.ask("remove", handles)

    def _stopped_rows(self, handles: Sequence[int]) -> set[int]:
        """Return the rows whose newest token completes a stop string."""
        by_stops: dict[tuple[str, ...], list[int]] = {}
        for handle in handles:
            if stops := self._rows[handle].generation.stop:
                by_stops.setdefault(stops, []).append(handle)
        return {
            handle
            for stops, rows in by_stops.items()
            for handle, held in zip(
                rows,
                StopStrings(self._tokenizer, stops).completes_stop([self._rows[row].ids for row in rows]),
                strict=True,
            )
            if held
        }
