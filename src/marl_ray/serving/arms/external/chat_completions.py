"""Chat completions of OpenAI's API: our requests in its words, and its answers in ours."""

import json
from typing import Any

from marl_ray.json_types import JsonMapping
from marl_ray.policies.prompting.prompts import Message
from marl_ray.policies.prompting.tool_template import CLOSE_TAG, OPEN_TAG
from marl_ray.serving.arms.protocol import Messages, NamedToken, ResponseChunk, TextRequest

SEED_MASK = (1 << 31) - 1
"""The largest seed that every server accepts, of 31 bits."""


def chat_request(model: str, request: TextRequest) -> dict[str, object]:
    """Return the body of a request for a streamed chat completion."""
    prompt = request.prompt
    changes = request.changes
    messages: Messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt  # type: ignore[assignment]
    body: dict[str, object] = {
        "model": model,
        "messages": [_message(message) for message in messages],
        "seed": request.seed & SEED_MASK,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.greedy:
        body["temperature"] = 0
    body |= {name: changes[name] for name in ("temperature", "top_p") if name in changes}
    if "max_tokens" in changes:
        body["max_completion_tokens"] = changes["max_tokens"]
    if changes.get("stop"):
        body["stop"] = list(changes["stop"])
    if request.has_names:
        body |= {"logprobs": True, "top_logprobs": request.top}
    if request.tools:
        body["tools"] = list(request.tools)
    if len(request.must_call) == 1:
        body["tool_choice"] = {"type": "function", "function": {"name": request.must_call[0]}}
    elif request.must_call:
        body["tool_choice"] = "required"
    if request.bias is not None:
        body["logit_bias"] = {str(number): value for number, value in request.bias.tokens}
        body |= {"presence_penalty": request.bias.presence, "frequency_penalty": request.bias.frequency}
    if request.is_json_object:
        body["response_format"] = {"type": "json_object"}
    return body


def _message(message: Message) -> dict[str, object]:
    """Return the message with the arguments of its calls as texts.

    Chat templates want them as objects, OpenAI's API as texts.
    """
    sent = dict(message)
    if "tool_calls" in message:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return sent


def response_chunk(text: object, tokens: Any) -> ResponseChunk:
    """Return the chunk for a part of the text and the tokens that the server reports with it.

    Raises TypeError, KeyError or ValueError if they are not in the form of the API.
    """
    if not isinstance(text, str):
        raise TypeError("expected a text as content")
    tops = [[(_named_token(top), float(top["logprob"])) for top in token.get("top_logprobs") or ()] for token in tokens]
    return ResponseChunk(
        text,
        [],
        [float(token["logprob"]) for token in tokens],
        None,
        0,
        [_named_token(token) for token in tokens],
        tops if any(tops) else [],
    )


def _named_token(token: JsonMapping) -> NamedToken:
    """Return a token in the form that clients read, with its bytes if the server names them."""
    utf8 = token.get("bytes")
    is_bytes = isinstance(utf8, list) and all(type(byte) is int and 0 <= byte < 256 for byte in utf8)
    return NamedToken(str(token["token"]), utf8 if is_bytes else None)


def note_calls(calls: dict[int, list[str]], parts: Any) -> None:
    """Add the parts of calls to the calls so far.

    The name of a call comes first, then its arguments piece by piece. Where a server leaves the index out, a name
    begins a call.
    """
    for part in parts:
        function = part.get("function") or {}
        index = part.get("index")
        if index is None:
            index = len(calls) if function.get("name") or not calls else max(calls)
        call = calls.setdefault(int(index), ["", ""])
        call[0] += function.get("name") or ""
        call[1] += function.get("arguments") or ""


def write_call(name: str, arguments: str) -> str:
    """Write a call as text, in the form in which our own models write calls."""
    # The closing mark must occur only once, and arguments may contain it.
    content = json.dumps({"name": name, "arguments": arguments or "{}"}).replace("<", "\\u003c")
    return f"{OPEN_TAG}\n{content}\n{CLOSE_TAG}"


def token_count(value: object) -> int | None:
    """Return a number of tokens, or None if the server names none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
