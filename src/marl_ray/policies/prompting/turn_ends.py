"""Find the tokens that begin and end a response, and the text that the chat template writes there."""

import re
from typing import Any

from marl_ray.policies.prompting.prompts import PROBE_TEXT, render_messages
from marl_ray.policies.prompting.protocol import Tokenizer

USER_MESSAGE, ASSISTANT_MESSAGE = {"role": "user", "content": PROBE_TEXT}, {"role": "assistant", "content": PROBE_TEXT}


def end_tokens(lm: object, tokenizer: Tokenizer) -> frozenset[int]:
    """Return all tokens that end a response.

    These are the tokens of the model's generation config, the tokenizer's end token, and the token with which the chat
    template ends an assistant's turn.
    """
    stated = _stated_ends(lm, tokenizer)
    return stated | {_turn_end(tokenizer, stated)[1]}


def turn_begin(tokenizer: Tokenizer) -> str:
    """Return the blanks that the chat template writes before an assistant's content where a reply begins.

    The blanks are Llama 2's space or GLM-4's line break, for example. Other text that it writes there, such as an empty
    thought, is no part of a reply.
    """
    question = render_messages(tokenizer, [USER_MESSAGE], add_generation_prompt=True)
    dialogue = render_messages(tokenizer, [USER_MESSAGE, ASSISTANT_MESSAGE])
    between = dialogue[len(question) :].partition(PROBE_TEXT)[0] if question and dialogue.startswith(question) else ""
    return between if between.isspace() else ""


def turn_end(lm: object, tokenizer: Tokenizer) -> tuple[str, int]:
    """Return the text, if any, and then the token that follow a complete response.

    Both are what the chat template writes after an assistant's content. If it writes no token there, the token is the
    one that begins the next turn, provided that the model's config has it as an end of responses (as GLM-4's
    `<|user|>`). Otherwise, and without a template, it is the tokenizer's end token.
    """
    return _turn_end(tokenizer, _stated_ends(lm, tokenizer))


def write_end_tokens(lm: Any, ends: frozenset[int]) -> None:
    """Write the tokens into the model's generation config, so that other programs stop at them too.

    The config is saved with the model.
    """
    config = getattr(lm, "generation_config", None)
    listed = sorted(ends) if len(ends) > 1 else next(iter(ends))
    if config is None or config.eos_token_id == listed:
        return
    config.eos_token_id = listed
    try:
        config.validate(strict=True)
    except ValueError:
        # Transformers saves a changed config only if all of it is valid, and some published ones are not.
        token_ids = {name: getattr(config, name) for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
        lm.generation_config = type(config)(**token_ids)


def _stated_ends(lm: Any, tokenizer: Tokenizer) -> frozenset[int]:
    stated = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    several = stated if isinstance(stated, list | tuple) else [stated]
    embedded = lm.get_input_embeddings().weight.shape[0]  # the defaults of a config may belong to another vocabulary
    return frozenset(
        number for number in (*several, tokenizer.eos_token_id) if number is not None and 0 <= number < embedded
    )


def _turn_end(tokenizer: Tokenizer, stated: frozenset[int]) -> tuple[str, int]:
    nothing = "", tokenizer.eos_token_id
    if tokenizer.chat_template is None:
        return nothing
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    names = ((tokenizer.convert_ids_to_tokens(number), number) for number in stated)
    added |= {name: number for name, number in names if name is not None}  # a model may have more numbers than tokens
    longest = sorted((re.escape(name) for name in added if not name.isspace()), key=len, reverse=True)
    token = re.compile("|".join(longest))

    def token_after(text: str, count: int) -> re.Match[str] | None:
        """Return the first token after the content of message `count`, from 1; None if no token follows it."""
        parts = text.split(PROBE_TEXT)
        return token.search(parts[count]) if len(parts) > count else None

    if match := token_after(render_messages(tokenizer, [USER_MESSAGE, ASSISTANT_MESSAGE]), 2):
        return match.string[: match.start()], added[match[0]]
    match = token_after(render_messages(tokenizer, [USER_MESSAGE, ASSISTANT_MESSAGE, USER_MESSAGE]), 2)
    closed = token_after(render_messages(tokenizer, [USER_MESSAGE]), 1)
    # The token closes turns if it also follows the user's content; otherwise it may be the one that begins the user's
    # turn.
    if match and (added[match[0]] in stated or (closed and closed[0] == match[0])):
        return match.string[: match.start()], added[match[0]]
    return nothing
