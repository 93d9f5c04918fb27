"""Tokenizers made in code with the chat templates of well-known models."""

import string
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marl_ray.policies.language.tiny_models import byte_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PIECES = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n'"
    " + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GLM = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BETWEEN = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}"
    "{% if messages[-1]['role'] == 'user' %}<|im_end|>{% endif %}"
)
OPENS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{% else %}<|bot|>{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)
THINKS = CHATML.replace(
    "+ m['content'] | trim",
    "+ ('<think>\n\n</think>\n\n' if loop.last and m['role'] == 'assistant' else '') + m['content']",
)
PICKY = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}" + CHATML


def bytes_with(
    template: str | None, *special: str, common: tuple[str, ...] = (), **names: str
) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with further tokens; `common` ones are added, but not special."""
    plain: Any = byte_tokenizer()
    core = Tokenizer.from_str(plain.backend_tokenizer.to_str())
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in common])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", **{"eos_token": "<|end|>", "chat_template": template} | names
    )


def spacing_tokenizer(template: str, scheme: str = "first") -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's, whose tokens are characters.

    `scheme` says where a space comes before a word: at the first one of a text, `always` or `never`.
    """
    words = {character: number for number, character in enumerate(["▁", *string.printable.replace(" ", "")])}
    core = Tokenizer(models.BPE(vocab=words, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template)


# Templates with tools, in the forms of three families.
QWEN = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% if m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ m.content }}{% endif %}"
    '{% for call in m.tool_calls %}{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA31 = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content }}"
    '{% for call in m.tool_calls %}{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}' }}{% endfor %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{% if tools %}{{ '[TOOLS] ' }}{{ tools | tojson }}{{ ' [/TOOLS]' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{{ ']</s>' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are these pieces of text.

    Encoding takes whole words only, so decoding and encoding again changes ids.
    """
    core = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False)
