"""An automaton over characters that restricts a response to a JSON object (RFC 8259).

A `GuideState` is the automaton's state after a text. `advance` reads one more character, and `Guides` finds the tokens
whose complete text the automaton can read from a state, as Willard and Louf do with the states of regular expressions
(arXiv 2307.09702). The automaton allows JSON with three limits: an object is at most MAX_DEPTH levels deep, at most
MAX_SPACES blanks stand together, and strings have no `\\u` escapes, because every character can be written as itself.
"""

from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from marl_ray.errors import MarlRayError
from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.policies.prompting.tokenizers import special_tokens

MAX_DEPTH, MAX_SPACES = 32, 64
"""Maximum depth of objects and arrays, and number of blanks in a row: a model that repeats itself comes to an end."""
MAX_MASKS = 256
"""Maximum number of states of a tokenizer whose allowed tokens are kept; each takes a byte per token of the vocabulary."""
NEEDED_CHARACTERS = frozenset(map(chr, range(0x20, 0x7F)))
"""Characters that must each be a token, so that every state can reach the end of a text."""
_BLANKS = frozenset(" \t\n\r")
_DIGITS = frozenset("0123456789")
_NUMBERS = {
    "minus": {"0": "zero", **dict.fromkeys("123456789", "integer")},
    "zero": {".": "point", "e": "e", "E": "e"},
    "integer": {**dict.fromkeys(_DIGITS, "integer"), ".": "point", "e": "e", "E": "e"},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {**dict.fromkeys(_DIGITS, "fraction"), "e": "e", "E": "e"},
    "e": {"+": "sign", "-": "sign", **dict.fromkeys(_DIGITS, "exponent")},
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
"""Part of a number -> character -> the part that follows."""
_COMPLETE_PARTS = frozenset({"zero", "integer", "fraction", "exponent"})
"""Parts with which a number may end."""
_WORD_ENDS = {"t": "rue", "f": "alse", "n": "ull"}


class GuideState(NamedTuple):
    """The state of the automaton after a text."""

    mode: str = "start"
    """The part of the grammar that comes next; `done` if nothing may follow."""
    stack: str = ""
    """Open objects and arrays, `{` and `[`, the innermost last."""
    texts: tuple[str, ...] = ()
    """The strings of which one must be written exactly, in the modes `before`, `word` and `after`."""
    behind: str = ""
    """The text that must follow the object."""
    spaces: int = 0
    """Number of blanks just before this state."""


OBJECT_START = GuideState()
"""The whole response is a JSON object."""


def frame_guide(before: tuple[str, ...], behind: str) -> GuideState:
    """Return a guide to a response that is one of the texts `before`, then a JSON object, then the text `behind`.

    No text of `before` may be the beginning of another.
    """
    return GuideState("before", texts=before, behind=behind)


def advance(state: GuideState, character: str) -> GuideState | None:
    """Return the state after one more character, or None if the character is not allowed."""
    mode = state.mode
    if mode in ("before", "word", "after"):
        return _read_text(state, character)
    if mode in ("text", "key_text"):
        if character == "\\":
            return state._replace(mode="escape" if mode == "text" else "key_escape")
        if character == '"':
            return state._replace(mode="next" if mode == "text" else "colon")
        return state if character >= " " else None
    if mode in ("escape", "key_escape"):
        kind = "text" if mode == "escape" else "key_text"
        return state._replace(mode=kind) if character in '"\\/bfnrt' else None
    if mode in _NUMBERS:
        after = _NUMBERS[mode].get(character)
        if after is not None:
            return state._replace(mode=after)
        return advance(state._replace(mode="next"), character) if mode in _COMPLETE_PARTS else None
    if character in _BLANKS:
        return state._replace(spaces=state.spaces + 1) if mode != "done" and state.spaces < MAX_SPACES else None
    return _read_structure(state._replace(spaces=0), character)


def _read_text(state: GuideState, character: str) -> GuideState | None:
    """Return the state after one more character of one of the state's `texts`; None if it is in none of them."""
    endings = tuple(text[1:] for text in state.texts if text[0] == character)
    if not endings:
        return None
    if "" not in endings:
        return state._replace(texts=endings)
    ended = {"before": "start", "word": "next", "after": "done"}[state.mode]
    return state._replace(mode=ended, texts=())


def _read_structure(state: GuideState, character: str) -> GuideState | None:
    """Return the state after a brace, bracket, colon, comma or quote; None if it is not allowed here."""
    mode, stack = state.mode, state.stack
    if mode == "start":
        return state._replace(mode="first_key", stack="{") if character == "{" else None
    if mode in ("first_key", "key") and character == '"':
        return state._replace(mode="key_text")
    if mode == "colon":
        return state._replace(mode="value") if character == ":" else None
    if mode == "next" and character == ",":
        return state._replace(mode="key" if stack[-1] == "{" else "value")
    if (character == "}" and mode in ("first_key", "next") and stack[-1] == "{") or (
        character == "]" and mode in ("first_value", "next") and stack[-1] == "["
    ):
        if len(stack) > 1:
            return state._replace(mode="next", stack=stack[:-1])
        if state.behind:
            return state._replace(mode="after", stack="", texts=(state.behind,))
        return state._replace(mode="done", stack="")
    return _begin_value(state, character) if mode in ("value", "first_value") else None


def _begin_value(state: GuideState, character: str) -> GuideState | None:
    """Return the state after the first character of a value; None if no value begins with it."""
    if character in "{[":
        mode = "first_key" if character == "{" else "first_value"
        return state._replace(mode=mode, stack=state.stack + character) if len(state.stack) < MAX_DEPTH else None
    if character == '"':
        return state._replace(mode="text")
    if character in _WORD_ENDS:
        return state._replace(mode="word", texts=(_WORD_ENDS[character],))
    number = "minus" if character == "-" else _NUMBERS["minus"].get(character)
    return None if number is None else state._replace(mode=number)


class Guides:
    """The automaton over the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        """Raise MarlRayError if some printable character of ASCII is no token of the tokenizer."""
        size = 1 + max(tokenizer.get_vocab().values())
        # Each token is decoded after another one, because some tokenizers leave out the blank before a text's first
        # word.
        [anchor] = tokenizer.encode("\n", add_special_tokens=False, verbose=False)[-1:]
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        start = len(tokenizer.decode([anchor], **options))
        text_tokens = sorted(set(tokenizer.get_vocab().values()) - set(special_tokens(tokenizer)))
        decoded = tokenizer.batch_decode([[anchor, token] for token in text_tokens], **options)
        self._texts: list[str] = [""] * size
        self._by_first: dict[str, list[int]] = {}
        self._plain = np.zeros(size, bool)
        self._marked: list[int] = []
        """Tokens with a quote, a backslash or a control character; all others may stand anywhere in a string."""
        for token, full in zip(text_tokens, decoded, strict=True):
            text = self._texts[token] = full[start:]
            if text:
                self._by_first.setdefault(text[0], []).append(token)
                if '"' in text or "\\" in text or min(text) < " ":
                    self._marked.append(token)
                else:
                    self._plain[token] = True
        if missing := sorted(NEEDED_CHARACTERS - {text for text in self._texts if len(text) == 1}):
            raise MarlRayError(f"the tokenizer has no token for {missing[0]!r} alone, which JSON may need")
        self._masks: dict[GuideState, np.ndarray] = {}
        self._lock = Lock()

    def next_state(self, state: GuideState, token: int) -> GuideState:
        """Return the state after an allowed token."""
        after = self._read(state, token)
        assert after is not None
        return after

    def allowed_tokens(self, state: GuideState, size: int) -> np.ndarray:
        """Return (size,) bool: True for the tokens that are allowed next.

        `size` is the number of the model's tokens.
        """
        with self._lock:
            mask = self._masks.get(state)
            if mask is None:
                mask = self._allowed_tokens(state)
                if len(self._masks) >= MAX_MASKS:
                    del self._masks[next(iter(self._masks))]
                self._masks[state] = mask
        return np.pad(mask, (0, size - len(mask))) if size > len(mask) else mask

    def _allowed_tokens(self, state: GuideState) -> np.ndarray:
        if state.mode in ("text", "key_text"):
            mask, some = self._plain.copy(), self._marked
        else:
            mask = np.zeros(len(self._texts), bool)
            firsts = [first for first in self._by_first if advance(state, first) is not None]
            some = [token for first in firsts for token in self._by_first[first]]
        for token in some:
            mask[token] = self._read(state, token) is not None
        return mask

    def _read(self, state: GuideState | None, token: int) -> GuideState | None:
        """Return the state after a token's text; None if the token is not allowed."""
        for character in self._texts[token]:
            if state is None:
                break
            state = advance(state, character)
        return state


_GUIDES: WeakKeyDictionary[Tokenizer, Guides] = WeakKeyDictionary()
_making = Lock()


def guides_of(tokenizer: Tokenizer) -> Guides:
    """Return the guides of the tokenizer, which are made once, in about a second for 150,000 tokens.

    Raises MarlRayError as `Guides` does.
    """
    with _making:
        if tokenizer not in _GUIDES:
            _GUIDES[tokenizer] = Guides(tokenizer)
        return _GUIDES[tokenizer]
