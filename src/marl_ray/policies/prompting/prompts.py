"""Encode texts as prompts of token ids, in the frame of the model's chat template.

Only the template writes special tokens. If a text spells one out, such as `<|im_end|>`, the model reads its characters.
So no text of an agent or a client can end a turn or begin another one.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from marl_ray.errors import FieldError, MarlRayError, one_line
from marl_ray.json_types import JsonMapping
from marl_ray.policies.prompting.protocol import Tokenizer

Message = JsonMapping
"""`role` and `content`; an assistant's may have `tool_calls`, a tool's has `tool_call_id` and may have `name`."""
MIN_SHARE_LEFT = 0.5
"""Minimum share of a text that must remain if its middle is left out."""
ELLIPSIS = "…"
"""The mark that stands for what was left out."""
_BREAK, _UNKNOWN = "\ufdd0", "\ufffd"
"""A code point that Unicode reserves for use inside of programs, and the mark for text that cannot be encoded."""
PROBE_TEXT = "Zq7"
"""A text that no template changes."""


class PromptTooLongError(FieldError):
    """A prompt, with the response to it, does not fit the model's context."""

    def __init__(self, message: str):
        super().__init__("prompt", message)

    def __reduce__(self) -> tuple[type["PromptTooLongError"], tuple[str]]:
        return PromptTooLongError, (self.message,)  # it may cross processes by pickle


@dataclass(frozen=True)
class _TokenizerFacts:
    """Properties of a tokenizer, which are computed once."""

    special_pattern: re.Pattern[str]
    """Matches the text of every special token, and of every added token that the template writes."""
    normalizer: Any
    """The normaliser that the tokenizer applies to texts before it looks for special tokens; None if it has none."""
    start_ids: list[int]
    """Tokens that stand before a text without a template."""
    newline_ids: list[int]
    max_token_length: float
    """Maximum number of characters that one token may stand for; infinite where one stands for any number of unknown
    characters."""
    takes_parts: bool | None
    """True if the template reads contents as lists of parts; None if it shows them neither way, or there is no template."""
    dropped_roles: frozenset[str]
    """The roles, of `system` and `developer`, whose messages the template drops without an error."""
    refused_roles: frozenset[str]
    """The roles, of the same two, whose messages the template refuses."""


_FACTS_OF: WeakKeyDictionary[Tokenizer, _TokenizerFacts] = WeakKeyDictionary()


def uses_template(tokenizer: Tokenizer, chat: bool | None) -> bool:
    """Return True if prompts are wrapped in the chat template.

    `chat` is `model.chat`, where None means: if there is a template. Raises MarlRayError if `chat` is true and there
    is no template.
    """
    template = tokenizer.chat_template is not None
    if chat and not template:
        raise MarlRayError(f"model.chat: tokenizer {tokenizer.name_or_path!r} has no chat template")
    return template if chat is None else chat


def encode_prompt(tokenizer: Tokenizer, text: str, chat: bool | None) -> list[int]:
    """Return the token ids of a prompt, at least one.

    With `chat` the prompt is one user message in the tokenizer's chat template, up to where the reply begins; None
    means: with the template if there is one. Raises MarlRayError if `chat` is true and there is no template. Raises
    FieldError if the prompt has no token.
    """
    ids = _prompt_ids(tokenizer, text, chat)
    if not ids:
        raise FieldError("prompt", "expected at least one token, got an empty text and no chat template")
    return ids


def _prompt_ids(tokenizer: Tokenizer, text: str, chat: bool | None) -> list[int]:
    if uses_template(tokenizer, chat):
        return encode_chat(tokenizer, [{"role": "user", "content": text}])
    return [*_facts(tokenizer).start_ids, *encode_text(tokenizer, text)]


def encode_reply(tokenizer: Tokenizer, prompt: str, reply: str, chat: bool | None) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt, as `encode_prompt` gives them, and of a reply to it.

    The reply is encoded as the middle of a text. Alone, it would be encoded as the beginning of a text, where many
    tokenizers put a space before the first word.
    """
    facts, ids = _facts(tokenizer), encode_prompt(tokenizer, prompt, chat)
    if uses_template(tokenizer, chat):
        before, start = _frame_messages(tokenizer, [{"role": "user", "content": prompt}]), []
    else:
        before, start = _break_special_tokens(facts, prompt), facts.start_ids
    marked = _break_special_tokens(facts, reply)
    both = [*start, *_encode_marked(tokenizer, facts, before + marked)]
    if both[: len(ids)] == ids:
        return ids, both[len(ids) :]
    # The tokenizer would join the reply's first characters with the prompt's last token.
    return ids, _encode_marked(tokenizer, facts, _BREAK + marked)


def fit_prompt(tokenizer: Tokenizer, text: str, chat: bool | None, room: int) -> tuple[list[int], bool]:
    """Encode as `encode_prompt` does, in at most `room` tokens.

    Returns the ids, and True if the middle of the text was left out. The template's frame is never shortened. A text without
    tokens, which is empty or has only characters that the tokenizer does not know, becomes the token with which texts
    begin. Raises PromptTooLongError where less than MIN_SHARE_LEFT of the text would be left.
    """
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    max_characters = room * _facts(tokenizer).max_token_length
    if len(text) <= max_characters:
        ids = _prompt_ids(tokenizer, text, chat) or [begin]
        if len(ids) <= room:
            return ids, False
    kept_characters, too_many = int(MIN_SHARE_LEFT * len(text)), int(min(len(text), max_characters + 1))
    if (
        kept_characters > max_characters
        or len(fitting := _prompt_ids(tokenizer, _leave_out_middle(text, kept_characters), chat) or [begin]) > room
    ):
        raise PromptTooLongError(f"expected at most {room} tokens when half of its {len(text)} characters are left out")
    while too_many - kept_characters > 1 + kept_characters // 64:  # the search need not find the exact last character
        middle = (kept_characters + too_many) // 2
        ids = _prompt_ids(tokenizer, _leave_out_middle(text, middle), chat) or [begin]
        if len(ids) <= room:
            kept_characters, fitting = middle, ids
        else:
            too_many = middle
    return fitting, True


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[JsonMapping] = ()) -> list[int]:
    """Return the token ids of messages (`role`, `content`) in the chat template, up to where the reply begins.

    The template is given `tools` too, if there are any. For templates that do not know the role `developer`, it becomes
    `system`. Raises MarlRayError if the template refuses these messages, and FieldError if it would leave one out.
    """
    facts = _facts(tokenizer)
    if "developer" in facts.dropped_roles | facts.refused_roles:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    for message in messages:
        if message["role"] in facts.dropped_roles:
            raise FieldError("prompt", f"the chat template leaves out what the role {message['role']} says")
    return _encode_marked(tokenizer, facts, _frame_messages(tokenizer, messages, tools))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text alone, without the tokens that begin or end texts."""
    facts = _facts(tokenizer)
    return _encode_marked(tokenizer, facts, _break_special_tokens(facts, text))


def _frame_messages(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[JsonMapping] = ()) -> str:
    """Mark the messages and render them in the chat template, up to where the reply begins."""
    facts = _facts(tokenizer)
    if facts.takes_parts is None:
        raise MarlRayError(
            f"model.chat: the chat template of {tokenizer.name_or_path!r} does not show what a user says; expected one that "
            "does, or chat: false"
        )
    marked = _mark_texts(facts, list(messages))
    more = {"tools": _mark_texts(facts, list(tools))} if tools else {}
    return _render(tokenizer, marked, facts.takes_parts, add_generation_prompt=True, **more)


def _render(tokenizer: Tokenizer, messages: Sequence[Message], takes_parts: bool = False, **settings: Any) -> str:
    """Return the messages in the chat template, as text."""
    if takes_parts:
        template_messages: Sequence[Any] = [
            {**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages
        ]
    else:
        template_messages = messages
    try:
        text: str = tokenizer.apply_chat_template(template_messages, tokenize=False, **settings)
    except (TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FieldError("prompt", f"the chat template refuses these messages: {one_line(error)}") from error
    return text


def render_messages(tokenizer: Tokenizer, messages: Sequence[Message], **settings: Any) -> str:
    """Return the messages in the chat template, as text; empty if the template refuses them."""
    return _render_or_empty(tokenizer, messages, bool(_facts(tokenizer).takes_parts), **settings)


def check_fits(ids: Sequence[int], max_tokens: int, context: int, whose: str = "prompt") -> None:
    """Raise MarlRayError if a prompt and a response after it may be longer than the context."""
    least = len(ids) + max_tokens
    if least > context:
        raise MarlRayError(
            f"{whose}: {len(ids)} tokens and generation.max_tokens={max_tokens} exceed model.context={context}; "
            f"expected model.context={least} or more"
        )


def _leave_out_middle(text: str, length: int) -> str:
    """Return `length` characters of the text, half of its beginning and half of its end, around an ellipsis."""
    head = (length + 1) // 2
    return f"{text[:head]}{ELLIPSIS}{text[len(text) - (length - head) :]}"


def _break_special_tokens(facts: _TokenizerFacts, text: str) -> str:
    """Return the text with a break in everything that a tokenizer would take for a special token."""
    # The halves of surrogate pairs are joined; a single half cannot be encoded.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace(_BREAK, _UNKNOWN)
    if facts.normalizer is not None and facts.special_pattern.search(normal := facts.normalizer.normalize_str(text)):
        text = normal
    while facts.special_pattern.search(text):  # the text after a break may spell another special token
        text = facts.special_pattern.sub(lambda match: f"{match[0][0]}{_BREAK}{match[0][1:]}", text)
    return text


def _mark_texts(facts: _TokenizerFacts, value: Any) -> Any:
    """Mark every text in lists and objects."""
    if isinstance(value, str):
        return _break_special_tokens(facts, value)
    if isinstance(value, Mapping):
        return {_break_special_tokens(facts, key): _mark_texts(facts, part) for key, part in value.items()}
    return [_mark_texts(facts, part) for part in value] if isinstance(value, list | tuple) else value


def _encode_marked(tokenizer: Tokenizer, facts: _TokenizerFacts, text: str) -> list[int]:
    first, *rest = text.split(_BREAK)
    ids: list[int] = tokenizer.encode(first, add_special_tokens=False, verbose=False)
    if rest:
        # The token is encoded after a line break, because some tokenizers put a space before the first word of a text.
        behind = tokenizer([f"\n{piece}" for piece in rest], add_special_tokens=False, verbose=False)["input_ids"]
        for piece, piece_ids in zip(rest, behind, strict=True):
            if piece_ids[: len(facts.newline_ids)] == facts.newline_ids:
                ids += piece_ids[len(facts.newline_ids) :]
            else:
                ids += tokenizer.encode(piece, add_special_tokens=False, verbose=False)
    return ids


def _facts(tokenizer: Tokenizer) -> _TokenizerFacts:
    if tokenizer not in _FACTS_OF:
        _FACTS_OF[tokenizer] = _inspect_tokenizer(tokenizer)
    return _FACTS_OF[tokenizer]


def _inspect_tokenizer(tokenizer: Tokenizer) -> _TokenizerFacts:
    plain = tokenizer.encode("a", add_special_tokens=False, verbose=False)
    encoded = tokenizer.encode("a", add_special_tokens=True)
    before = next((at for at in range(len(encoded)) if encoded[at : at + len(plain)] == plain), 0)
    takes_parts, written = _inspect_template(tokenizer) if tokenizer.chat_template is not None else (None, set())
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special), *written}
    names = {added[number].content for number in special & added.keys()} | set(tokenizer.all_special_tokens)
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if not any(added[number].normalized for number in special & added.keys()):
        normalizer = None
    if normalizer is not None:
        names |= {normalizer.normalize_str(name) for name in names}
    # A break cannot part a single character, and blanks are a part of ordinary texts.
    longest_first = sorted(
        (re.escape(name) for name in names if len(name) > 1 and not name.isspace()), key=len, reverse=True
    )
    shown = (
        {role: _shows_role(tokenizer, role, takes_parts) for role in ("system", "developer")}
        if takes_parts is not None
        else {}
    )
    return _TokenizerFacts(
        re.compile("|".join(longest_first) or "(?!)"),
        normalizer,
        encoded[:before],
        tokenizer.encode("\n", add_special_tokens=False, verbose=False),
        _max_token_length(tokenizer),
        takes_parts,
        frozenset(role for role, there in shown.items() if there is False),
        frozenset(role for role, there in shown.items() if there is None),
    )


def _max_token_length(tokenizer: Tokenizer) -> float:
    """Return the maximum number of characters that one token may stand for; infinity if there is none."""
    max_token_length = max(map(len, tokenizer.get_vocab()))
    # Of private use, so that no vocabulary has them.
    unknown = "".join(map(chr, range(0xE000, 0xE100)))
    tokens = len(tokenizer.encode(unknown, add_special_tokens=False, verbose=False))
    return max_token_length if tokens * max_token_length >= len(unknown) else math.inf


def _shows_role(tokenizer: Tokenizer, role: str, takes_parts: bool) -> bool | None:
    """Return True if the template shows a role's message before the user's; None if it refuses such a message."""
    text = _render_or_empty(
        tokenizer, [{"role": role, "content": PROBE_TEXT}, {"role": "user", "content": "a"}], takes_parts
    )
    return PROBE_TEXT in text if text else None


def _inspect_template(tokenizer: Tokenizer) -> tuple[bool | None, set[int]]:
    """Return True if contents are lists of parts, and the added tokens that the template writes around contents.

    The first is None if the template shows contents neither way.
    """
    user = [{"role": "user", "content": PROBE_TEXT}]
    ways = [
        takes_parts for takes_parts in (False, True) if PROBE_TEXT in _render_or_empty(tokenizer, user, takes_parts)
    ]
    if not ways:
        return None, set()
    system = [{"role": "system", "content": PROBE_TEXT}]
    answered = [*user, {"role": "assistant", "content": PROBE_TEXT}, *user]
    texts = [_render_or_empty(tokenizer, messages, ways[0]) for messages in (user, answered, [*system, *user])]
    numbers = {number for text in texts for number in tokenizer.encode(text, add_special_tokens=False, verbose=False)}
    return ways[0], numbers & tokenizer.added_tokens_decoder.keys()


def _render_or_empty(tokenizer: Tokenizer, messages: Sequence[Message], takes_parts: bool, **settings: Any) -> str:
    """Render as `_render` does, or return an empty text if the template refuses."""
    try:
        return _render(tokenizer, messages, takes_parts, **settings)
    except MarlRayError:  # many templates do not know the role `system`
        return ""
