"""One language model of an arm, as its requests see it."""

from collections.abc import Sequence
from typing import Any

import torch

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.policies.engines.decoding.json_guide import OBJECT_START, GuideState, guides_of
from marl_ray.policies.engines.serving import served_engine
from marl_ray.policies.prompting.prompts import PromptTooLongError, encode_prompt, encode_text, uses_template
from marl_ray.policies.prompting.token_bytes import TokenBytes
from marl_ray.policies.prompting.tool_template import call_guide, encode_tool_chat
from marl_ray.serving.arms.errors import ArmError, new_pass_number
from marl_ray.serving.arms.protocol import Messages, NamedToken, TextRequest


class ServedModel:
    """Reads prompts, checks settings, names tokens and scores responses of other arms.

    Any thread may ask it, and nothing of it changes.
    """

    def __init__(self, policy: Any, engine: str):
        """`policy` is a TokenPolicy, whose responses `engine` writes.

        Raises MarlRayError if the engine does not serve.
        """
        self.policy = policy
        self.engine = engine
        self.server = served_engine(engine)
        self.tokenizer = policy.tokenizer
        self.generation = policy.generation
        self._token_bytes = TokenBytes(policy.tokenizer)

    def encode(self, request: TextRequest) -> list[int]:
        """Return the token ids of the request's prompt.

        Raises FieldError for a token id that the model does not know.
        """
        chat = self.policy.config.chat
        tokenizer = self.tokenizer
        prompt = request.prompt
        if isinstance(prompt, str):
            return encode_prompt(tokenizer, prompt, False if request.raw else chat)
        if isinstance(prompt[0], int):
            ids: list[int] = [*prompt]
            if max(ids) >= len(tokenizer):
                raise FieldError("prompt", f"expected token ids below {len(tokenizer)}, got {max(ids)}")
            return ids
        messages: Messages = (*prompt,)
        if not uses_template(tokenizer, chat) and not request.tools:
            return encode_prompt(tokenizer, "\n".join(message["content"] for message in messages), False)
        return encode_tool_chat(tokenizer, messages, request.tools, chat)

    def name_token(self, token: int) -> NamedToken:
        """Return the token as clients read it."""
        return NamedToken(self.tokenizer.decode([token]), self._token_bytes.bytes_of(token))

    def guide(self, request: TextRequest) -> GuideState | None:
        """Return the grammar that the response must follow, None without one.

        Raises FieldError if this tokenizer cannot write it.
        """
        if not request.is_json_object and not request.must_call:
            return None
        field = "response_format" if request.is_json_object else "tool_choice"
        if not self.server.takes_guides:
            raise FieldError(field, f"an arm with engine={self.engine} writes no JSON on demand")
        try:
            guides_of(self.tokenizer)
        except MarlRayError as error:
            raise FieldError(field, str(error)) from None
        if request.is_json_object:
            return OBJECT_START
        return call_guide(self.tokenizer, request.must_call)

    def check_bias(self, request: TextRequest) -> None:
        """Raise FieldError if the request biases a token that the model does not have, or if the engine takes no biases."""
        if request.bias is not None and not self.server.takes_biases:
            bias = request.bias
            biases = {"logit_bias": bias.tokens, "presence_penalty": bias.presence, "frequency_penalty": bias.frequency}
            field = next(name for name, value in biases.items() if value)
            raise FieldError(field, f"an arm with engine={self.engine} takes neither biases nor penalties")
        vocabulary = self.policy.lm.get_input_embeddings().weight.shape[0]
        largest = max((number for number, _ in request.bias.tokens), default=0) if request.bias is not None else 0
        if largest >= vocabulary:
            raise FieldError("logit_bias", f"expected token ids below {vocabulary}, got {largest}")

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, float]:
        """See `ScoringArm.score`; on the arm's scoring thread."""
        in_vocabulary = max(ids, default=0) < self.policy.lm.get_input_embeddings().weight.shape[0]
        decoded = ""
        if in_vocabulary:
            decoded = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text_ids = list(ids) if in_vocabulary and decoded.startswith(text) else encode_text(self.tokenizer, text)
        if not text_ids or len(prompt_ids) + len(text_ids) > self.policy.config.context:
            raise ArmError(f"a text of {len(text_ids)} tokens cannot be read here", new_pass_number())
        rows = [torch.tensor([sequence], device=self.policy.device) for sequence in (list(prompt_ids), text_ids)]
        with torch.no_grad():
            evaluated = self.policy.evaluate(*rows, torch.ones_like(rows[1], dtype=torch.bool), False)
        return len(text_ids), float(evaluated.log_probs.sum())

    def settings(self, request: TextRequest, prompt_tokens: int) -> GenerationConfig:
        """Return the settings for the request.

        Raises PromptTooLongError if prompt and response do not fit the context.
        """
        context = self.policy.config.context
        # A default may be shortened by a long prompt, what was asked for may not.
        default_tokens = max(1, min(self.generation.max_tokens, context - prompt_tokens))
        # The policy's own stop strings could end what a guide asks for too early.
        guided = {"stop": ()} if request.is_json_object or request.must_call else {}
        settings: GenerationConfig = self.generation.model_copy(
            update={"max_tokens": default_tokens, **guided, **request.changes}
        )
        if prompt_tokens + settings.max_tokens > context:
            raise PromptTooLongError(
                f"{prompt_tokens} tokens and max_tokens={settings.max_tokens} exceed the context of {context}"
            )
        return settings
