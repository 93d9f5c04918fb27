"""Encode texts as prompts of token ids, in the frame of the model's chat template.

Text is text. Special tokens are written by the template alone: where a text spells one out, such as `<|im_end|>`, the model
reads its characters. So nothing that an agent or a client writes can end a turn or begin another's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from marl_ray.errors import FieldError, MarlRayError, one_line

Message = Mapping[str, Any]
"""`role` and `content`; an assistant's may have `tool_calls`, a tool's has `tool_call_id` and may have `name`."""
LEAST_LEFT = 0.5
"""Share of a text that must be left of it where it is cut."""
LEFT_OUT = "…"
"""The mark that stands where a text was cut."""
_BREAK, _UNKNOWN = "\ufdd0", "\ufffd"
"""A code point that is no character, for use inside of programs; and the mark for text that cannot be encoded."""
SHOWN = "Zq7"
"""A text that no template changes."""


class PromptTooLong(MarlRayError):
    """A prompt does not fit, and less than LEAST_LEFT of its text would."""


@dataclass(frozen=True)
class _Facts:
    """Properties of a tokenizer, which are computed once."""

    spelled: re.Pattern[str]
    """Matches the text of every special token, and of every added token that the template writes."""
    normalizer: Any
    """The normaliser that texts pass before special tokens are looked for in them; None if there is none."""
    start: list[int]
    """Tokens before a text without a template."""
    newline: list[int]
    longest: int
    """Most characters of one token."""
    parts: bool | None
    """True if the template reads contents as lists of parts; None if it shows them neither way, or there is no template."""
    left_out: frozenset[str]
    """Those of the roles `system` and `developer` whose messages the template drops without an error."""
    refused: frozenset[str]
    """Those of the two roles whose messages the template refuses."""


_FACTS: WeakKeyDictionary[Any, _Facts] = WeakKeyDictionary()


def uses_template(tokenizer: Any, chat: bool | None) -> bool:
    """True if prompts are wrapped in the chat template, for `model.chat`, of which None means: if there is one.

    Raises MarlRayError if there must be one and is none.
    """
    template = tokenizer.chat_template is not None
    if chat and not template:
        raise MarlRayError(f"model.chat: tokenizer {tokenizer.name_or_path!r} has no chat template")
    return template if chat is None else chat


def encode_prompt(tokenizer: Any, text: str, chat: bool | None) -> list[int]:
    """Token ids of a prompt, at least one.

    With `chat` it is one user message in the tokenizer's chat template, up to where the reply begins; None means with the
    template if there is one. Raises MarlRayError if there must be one and is none, or if nothing is left to condition on.
    """
    ids = _read(tokenizer, text, chat)
    if not ids:
        raise FieldError("prompt", "expected at least one token, got an empty text and no chat template")
    return ids


def _read(tokenizer: Any, text: str, chat: bool | None) -> list[int]:
    if uses_template(tokenizer, chat):
        return encode_chat(tokenizer, [{"role": "user", "content": text}])
    return [*_facts(tokenizer).start, *encode_text(tokenizer, text)]


def encode_reply(tokenizer: Any, prompt: str, reply: str, chat: bool | None) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, as of `encode_prompt`, and of a reply to it, as they are in the middle of a text.

    By itself a reply would begin as texts do: many tokenizers put a space before the first word of one.
    """
    facts, ids = _facts(tokenizer), encode_prompt(tokenizer, prompt, chat)
    if uses_template(tokenizer, chat):
        before, start = _framed(tokenizer, [{"role": "user", "content": prompt}]), []
    else:
        before, start = _marked(facts, prompt), facts.start
    marked = _marked(facts, reply)
    both = [*start, *_encode_marked(tokenizer, facts, before + marked)]
    if both[: len(ids)] == ids:
        return ids, both[len(ids) :]
    return ids, _encode_marked(tokenizer, facts, _BREAK + marked)  # its first token would be one with the prompt's last


def fit_prompt(tokenizer: Any, text: str, chat: bool | None, room: int) -> tuple[list[int], bool]:
    """Encode as `encode_prompt` does, in at most `room` tokens; also True if the text lost its middle for that.

    The template's frame is never cut. A text without tokens becomes the one with which texts begin: an empty text, or one of
    characters that the tokenizer does not know. Raises PromptTooLong where less than LEAST_LEFT of the text would be left.
    """
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    most = room * _facts(tokenizer).longest
    if len(text) <= most:
        ids = _read(tokenizer, text, chat) or [begin]
        if len(ids) <= room:
            return ids, False
    least, too_many = int(LEAST_LEFT * len(text)), min(len(text), most + 1)
    if least > most or len(fitting := _read(tokenizer, _cut(text, least), chat) or [begin]) > room:
        raise PromptTooLong(
            f"prompt: expected at most {room} tokens when half of its {len(text)} characters are left out"
        )
    while too_many - least > 1 + least // 64:  # no search for the last character
        middle = (least + too_many) // 2
        ids = _read(tokenizer, _cut(text, middle), chat) or [begin]
        if len(ids) <= room:
            least, fitting = middle, ids
        else:
            too_many = middle
    return fitting, True


def encode_chat(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Token ids of messages (`role`, `content`) in the chat template, up to where the reply begins; the template is given
    `tools` too, if there are any.

    A `developer` is the `system` of templates that know none. Raises MarlRayError where the template refuses these messages,
    or would leave one out.
    """
    facts = _facts(tokenizer)
    if "developer" in facts.left_out | facts.refused:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    for message in messages:
        if message["role"] in facts.left_out:
            raise FieldError("prompt", f"the chat template leaves out what the role {message['role']} says")
    return _encode_marked(tokenizer, facts, _framed(tokenizer, messages, tools))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text by itself, without those that begin or end one."""
    facts = _facts(tokenizer)
    return _encode_marked(tokenizer, facts, _marked(facts, text))


def _framed(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Messages, marked, in the chat template, up to where the reply begins."""
    facts = _facts(tokenizer)
    if facts.parts is None:
        raise MarlRayError(
            f"model.chat: the chat template of {tokenizer.name_or_path!r} does not show what a user says; expected one that "
            "does, or chat: false"
        )
    marked = _all_marked(facts, list(messages))
    more = {"tools": _all_marked(facts, list(tools))} if tools else {}
    return _render(tokenizer, marked, facts.parts, add_generation_prompt=True, **more)


def _render(tokenizer: Any, messages: Sequence[Message], parts: bool = False, **settings: Any) -> str:
    """Messages in the chat template, as text."""
    if parts:
        given: Sequence[Any] = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    else:
        given = messages
    try:
        text: str = tokenizer.apply_chat_template(given, tokenize=False, **settings)
    except (TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FieldError("prompt", f"the chat template refuses these messages: {one_line(error)}") from error
    return text


def rendered(tokenizer: Any, messages: Sequence[Message], **settings: Any) -> str:
    """Messages in the chat template, as text; nothing where the template refuses them."""
    return _rendered(tokenizer, messages, bool(_facts(tokenizer).parts), **settings)


def check_fits(ids: Sequence[int], max_tokens: int, context: int, whose: str = "prompt") -> None:
    """Raise MarlRayError if a prompt and a response after it may be longer than the context."""
    if len(ids) + max_tokens > context:
        raise MarlRayError(
            f"{whose}: {len(ids)} tokens and generation.max_tokens={max_tokens} exceed model.context={context}"
        )


def _cut(text: str, kept: int) -> str:
    head = (kept + 1) // 2
    return f"{text[:head]}{LEFT_OUT}{text[len(text) - (kept - head) :]}"


def _marked(facts: _Facts, text: str) -> str:
    """The text with a break in everything that a tokenizer would take for a special token."""
    # Halves of surrogate pairs are put together; a half without its other cannot be encoded.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace(_BREAK, _UNKNOWN)
    if facts.normalizer is not None and facts.spelled.search(normal := facts.normalizer.normalize_str(text)):
        text = normal
    while facts.spelled.search(text):  # the text behind a break may spell another one
        text = facts.spelled.sub(lambda match: f"{match[0][0]}{_BREAK}{match[0][1:]}", text)
    return text


def _all_marked(facts: _Facts, value: Any) -> Any:
    """Lists and objects with every text in them marked."""
    if isinstance(value, str):
        return _marked(facts, value)
    if isinstance(value, Mapping):
        return {_marked(facts, key): _all_marked(facts, part) for key, part in value.items()}
    return [_all_marked(facts, part) for part in value] if isinstance(value, list | tuple) else value


def _encode_marked(tokenizer: Any, facts: _Facts, text: str) -> list[int]:
    first, *rest = text.split(_BREAK)
    ids: list[int] = tokenizer.encode(first, add_special_tokens=False, verbose=False)
    if rest:
        # Behind a line break, because some tokenizers put a space before the first word of a text.
        behind = tokenizer([f"\n{piece}" for piece in rest], add_special_tokens=False, verbose=False)["input_ids"]
        for piece, own in zip(rest, behind, strict=True):
            if own[: len(facts.newline)] == facts.newline:
                ids += own[len(facts.newline) :]
            else:
                ids += tokenizer.encode(piece, add_special_tokens=False, verbose=False)
    return ids


def _facts(tokenizer: Any) -> _Facts:
    if tokenizer not in _FACTS:
        _FACTS[tokenizer] = _inspected(tokenizer)
    return _FACTS[tokenizer]


def _inspected(tokenizer: Any) -> _Facts:
    plain = tokenizer.encode("a", add_special_tokens=False, verbose=False)
    encoded = tokenizer.encode("a", add_special_tokens=True)
    before = next((at for at in range(len(encoded)) if encoded[at : at + len(plain)] == plain), 0)
    parts, written = _frame(tokenizer) if tokenizer.chat_template is not None else (None, set())
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special), *written}
    names = {added[number].content for number in special & added.keys()} | set(tokenizer.all_special_tokens)
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if not any(added[number].normalized for number in special & added.keys()):
        normalizer = None
    if normalizer is not None:
        names |= {normalizer.normalize_str(name) for name in names}
    # One character cannot be broken; a blank is what texts are made of.
    longest = sorted((re.escape(name) for name in names if len(name) > 1 and not name.isspace()), key=len, reverse=True)
    shown = {role: _shows(tokenizer, role, parts) for role in ("system", "developer")} if parts is not None else {}
    return _Facts(
        re.compile("|".join(longest) or "(?!)"),
        normalizer,
        encoded[:before],
        tokenizer.encode("\n", add_special_tokens=False, verbose=False),
        max(map(len, tokenizer.get_vocab())),
        parts,
        frozenset(role for role, there in shown.items() if there is False),
        frozenset(role for role, there in shown.items() if there is None),
    )


def _shows(tokenizer: Any, role: str, parts: bool) -> bool | None:
    """True if the template shows a role's message before the user's; None if it refuses one."""
    text = _rendered(tokenizer, [{"role": role, "content": SHOWN}, {"role": "user", "content": "a"}], parts)
    return SHOWN in text if text else None


def _frame(tokenizer: Any) -> tuple[bool | None, set[int]]:
    """Return True if contents are lists of parts, and the added tokens that the template writes around contents."""
    user = [{"role": "user", "content": SHOWN}]
    ways = [parts for parts in (False, True) if SHOWN in _rendered(tokenizer, user, parts)]
    if not ways:
        return None, set()
    system = [{"role": "system", "content": SHOWN}]
    answered = [*user, {"role": "assistant", "content": SHOWN}, *user]
    texts = [_rendered(tokenizer, messages, ways[0]) for messages in (user, answered, [*system, *user])]
    numbers = {number for text in texts for number in tokenizer.encode(text, add_special_tokens=False, verbose=False)}
    return ways[0], numbers & tokenizer.added_tokens_decoder.keys()


def _rendered(tokenizer: Any, messages: Sequence[Message], parts: bool, **settings: Any) -> str:
    """Render as `_render` does; returns an empty text if the template refuses."""
    try:
        return _render(tokenizer, messages, parts, **settings)
    except MarlRayError:  # many know no system
        return ""
