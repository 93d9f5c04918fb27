"""Batched decoding with a key-value cache; rows join and leave between steps."""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Prompt, Token
from marl_ray.policies.engines.decoding.json_guide import GuideState, guides_of
from marl_ray.policies.engines.decoding.key_values import KeyValues
from marl_ray.policies.engines.decoding.sampling import draw
from marl_ray.policies.engines.decoding.stop_strings import StopStrings
from marl_ray.policies.engines.models.cached_forward import CachedModel
from marl_ray.policies.language.philox import token_uniforms
from marl_ray.policies.prompting.protocol import Tokenizer

MAX_PREFILL_TOKENS = 8192
"""Maximum number of tokens, padding included, of one forward over prompts."""
MAX_STOPS = 64
"""Maximum number of sets of stop strings whose tokens are kept."""


_DrawnToken = tuple[int, float, tuple[tuple[int, float], ...]]
"""(token, its log-probability, the most likely tokens with theirs)."""


@dataclass
class _Row:
    handle: int
    prompt: Prompt
    generation: GenerationConfig
    uniforms: np.ndarray
    """(max_tokens,)."""
    ids: list[int] = field(default_factory=list)
    state: GuideState | None = None
    """The state of the row's guide."""
    added: Tensor | None = None
    """(V,) the numbers that its prompt's bias adds to the next logits; set at the first step."""

    @property
    def newest(self) -> int:
        """The token that the next step feeds to the model."""
        return self.ids[-1] if self.ids else self.prompt.ids[-1]


class Decoder:
    """A batch of responses, written one token per row and step.

    A response depends only on its prompt, stream, seed and generation, and not on the other rows (up to rounding of
    logits). The cache holds all tokens of a row but the newest, which the next step feeds to the model. A new row
    starts with its prompt's last token as the newest, so new and old rows take the same step.
    """

    def __init__(self, model: CachedModel, tokenizer: Tokenizer, ends: AbstractSet[int], rows: int = 1) -> None:
        """Begin without rows; the tokens `ends` end a response.

        `rows` is the number of rows that the cache has room for at first; it grows for more.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._ends = ends
        self.cache = KeyValues(model.shape, rows)
        self._rows: list[_Row] = []
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._next_handle = 0

    def __len__(self) -> int:
        return len(self._rows)

    @torch.inference_mode()
    def add(self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig) -> list[int]:
        """Begin responses to `prompts`; the model reads equal prompts once. Returns a handle per prompt."""
        handles = list(range(self._next_handle, self._next_handle + len(prompts)))
        self._next_handle += len(prompts)
        uniforms = token_uniforms(seed, [prompt.stream for prompt in prompts], generation.max_tokens)
        rows = [
            _Row(handle, prompt, generation, drawn, state=prompt.guide)
            for handle, prompt, drawn in zip(handles, prompts, uniforms, strict=True)
        ]
        # Sorted by length, so that prompts of one forward pass need little padding.
        rows.sort(key=lambda row: (len(row.prompt.ids), row.prompt.ids))
        distinct = list(dict.fromkeys(row.prompt.ids for row in rows))
        for part in _divide_prompts(distinct):
            number = {ids: index for index, ids in enumerate(part)}
            members = [row for row in rows if row.prompt.ids in number]
            lengths = [len(ids) - 1 for ids in part]
            padded = np.zeros((len(part), max(lengths)), np.int64)
            for index, ids in enumerate(part):
                padded[index, : len(ids) - 1] = ids[:-1]
            self._rows += members
            self.cache.add(self._prefill(padded), lengths, [number[row.prompt.ids] for row in members], self._room())
        return handles

    @torch.inference_mode()
    def step(self, not_finite: list[int] | None = None) -> list[Token]:
        """Take one step: returns the next token of every row. Rows that end with it are removed.

        A row whose logits are not finite is removed, and its handle is appended to `not_finite`. Without that list such
        a row raises MarlRayError, and the decoder cannot be used any more.
        """
        if not self._rows:
            return []
        positions = self._device(self.cache.positions)
        cache, hidden = self.cache.column(self._room())
        logits = self._model.decode(self._device([row.newest for row in self._rows]), positions, cache, hidden)
        drawn = self._draw(logits)
        for row, (token, log_prob, _) in zip(self._rows, drawn, strict=True):
            if row.prompt.bias is not None and row.added is not None:
                row.prompt.bias.penalize(row.added, token, token not in row.ids)
            row.ids.append(token)
            if row.state is not None and not math.isnan(log_prob):
                row.state = guides_of(self._tokenizer).next_state(row.state, token)
        stopped = self._stopped_rows()
        tokens = []
        # In falling order, because the last row moves to the place of a row that leaves.
        for number in range(len(self._rows) - 1, -1, -1):
            row, (token, log_prob, top) = self._rows[number], drawn[number]
            if math.isnan(log_prob):
                if not_finite is None:
                    raise MarlRayError("the language model's logits are not finite")
                not_finite.append(row.handle)
                self.cache.clear(number)
                self._remove(number)
                continue
            by_itself = token in self._ends or number in stopped or (row.state is not None and row.state.mode == "done")
            is_truncated = len(row.ids) == row.generation.max_tokens
            finish: Literal["stop", "length"] | None = None
            if by_itself:
                finish = "stop"
            elif is_truncated:
                finish = "length"
            tokens.append(Token(row.handle, token, log_prob, finish, top))
            if by_itself or is_truncated:
                self._remove(number)
        return tokens

    @torch.inference_mode()
    def remove(self, handle: int) -> None:
        """Remove a row before its end. Raises KeyError if no row has this handle."""
        for number, row in enumerate(self._rows):
            if row.handle == handle:
                return self._remove(number)
        raise KeyError(handle)

    def _remove(self, number: int) -> None:
        self.cache.remove(number)
        self._rows[number] = self._rows[-1]
        self._rows.pop()

    def _prefill(self, ids: np.ndarray) -> Tensor:
        if not ids.size:  # prompts of one token have nothing to read before the first step
            shape = self._model.shape
            return torch.empty(len(ids), shape.layers, 2, shape.heads, 0, shape.width)
        return self._model.prefill(torch.from_numpy(ids).to(self._model.shape.device))

    def _draw(self, logits: Tensor) -> list[_DrawnToken]:
        """Return the token, log-probability and the most likely tokens per row.

        Rows with the same settings are drawn together.
        """
        settings: dict[tuple[float, int, float], list[int]] = {}
        for number, row in enumerate(self._rows):
            config = row.generation
            settings.setdefault((config.temperature, config.top_k, config.top_p), []).append(number)
        drawn: list[_DrawnToken] = [(0, 0.0, ())] * len(self._rows)
        for setting, numbers in settings.items():
            rows = [self._rows[number] for number in numbers]
            scores = logits if len(settings) == 1 else logits[numbers]
            uniforms = self._device([row.uniforms[len(row.ids)] for row in rows], torch.float64)
            flags = [row.prompt.greedy for row in rows]
            greedy = self._device(flags, torch.bool) if any(flags) else None
            tokens, log_probs = draw(
                scores, uniforms, greedy, *setting, self._allowed_tokens(rows, scores), _bias_rows(rows, scores)
            )
            tops = _most_likely(rows, scores, setting[0])
            for number, token, log_prob, top in zip(numbers, tokens.tolist(), log_probs.tolist(), tops, strict=True):
                drawn[number] = (token, log_prob, top)
        return drawn

    def _allowed_tokens(self, rows: list[_Row], logits: Tensor) -> Tensor | None:
        """Return (R, V) bool, True for the tokens that each row's guide allows next.

        Returns None if no row has a guide.
        """
        if all(row.state is None for row in rows):
            return None
        masks = np.ones(logits.shape, bool)
        for mask, row in zip(masks, rows, strict=True):
            if row.state is not None:
                mask[:] = guides_of(self._tokenizer).allowed_tokens(row.state, len(mask))
                mask[list(self._ends)] = False
        return torch.from_numpy(masks).to(logits.device)

    def _stopped_rows(self) -> set[int]:
        """Return the numbers of the rows whose newest token completes a stop string."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for number, row in enumerate(self._rows):
            if row.generation.stop:
                groups.setdefault(row.generation.stop, []).append(number)
        stopped: set[int] = set()
        for stops, numbers in groups.items():
            if stops not in self._stops:
                # They are limited, because clients of a long-running server keep sending new stop strings.
                if len(self._stops) >= MAX_STOPS:
                    self._stops.clear()
                self._stops[stops] = StopStrings(self._tokenizer, stops)
            completed = self._stops[stops].completes_stop([self._rows[number].ids for number in numbers])
            stopped.update(number for number, hit in zip(numbers, completed, strict=True) if hit)
        return stopped

    def _room(self) -> int:
        """Return the greatest number of tokens that a row may still get."""
        return max(row.generation.max_tokens - len(row.ids) for row in self._rows)

    def _device(self, values: Sequence[object], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._model.shape.device)


def _bias_rows(rows: list[_Row], logits: Tensor) -> Tensor | None:
    """Return the numbers (R, V) that the rows' biases add to the logits; None if no row has a bias."""
    if all(row.prompt.bias is None for row in rows):
        return None
    added = torch.zeros_like(logits, dtype=torch.float32)
    for bias, row in zip(added, rows, strict=True):
        if row.prompt.bias is not None:
            if row.added is None:
                row.added = row.prompt.bias.initial(logits.shape[-1], logits.device)
            bias += row.added
    return added


def _most_likely(rows: list[_Row], logits: Tensor, temperature: float) -> list[tuple[tuple[int, float], ...]]:
    """Return the most likely tokens of each row, with the log-probabilities that `draw` uses.

    A row has as many tokens as its prompt asks for by `top`.
    """
    max_top = max(row.prompt.top for row in rows)
    if not max_top:
        return [()] * len(rows)
    likeliest = torch.log_softmax(logits.float() / temperature, -1).topk(min(max_top, logits.shape[-1]))
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), rows, strict=True)
    return [tuple(zip(ids, values, strict=True))[: row.prompt.top] for ids, values, row in pairs]


def _divide_prompts(prompts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Divide prompts, which are sorted by length, into parts of at most MAX_PREFILL_TOKENS tokens, padding included."""
    parts: list[list[tuple[int, ...]]] = []
    for ids in prompts:
        if not parts or len(ids) * (len(parts[-1]) + 1) > MAX_PREFILL_TOKENS:
            parts.append([])
        parts[-1].append(ids)
    return parts
