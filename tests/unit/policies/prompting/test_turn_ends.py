"""All tokens that end a response, whoever names them, end it everywhere; and models are taught to write them."""

import json

import pytest
import torch
from tokenizers import AddedToken
from toy_models.tokenizers import (
    BETWEEN,
    CHATML,
    GEMMA,
    GLM,
    LLAMA2,
    LLAMA3,
    OPENS,
    PARTS,
    PICKY,
    PIECES,
    THINKS,
    bytes_with,
    spacing_tokenizer,
)
from toy_serving.gateways import LINEAGE
from toys.texts import config
from transformers import AutoModelForCausalLM, BatchEncoding, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from marl_ray.config.run.model import GenerationConfig as Sampling
from marl_ray.config.run.model import ModelConfig
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.language.model_files import load_model
from marl_ray.policies.language.token_policy import TokenPolicy
from marl_ray.policies.prompting.tokenizers import load_tokenizer
from marl_ray.policies.prompting.turn_ends import end_tokens, turn_end
from marl_ray.training.texts.demonstrations import TextExample, encode_examples

TEMPLATES = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"), None, ("", "<|im_end|>")),
    "llama 3": (LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), None, ("", "<|eot_id|>")),
    "gemma": (GEMMA, ("<start_of_turn>", "<end_of_turn>"), None, ("", "<end_of_turn>")),
    "pieces": (PIECES, ("<|user|>", "<|assistant|>"), None, ("", "<|end|>")),
    "parts": (PARTS, ("<|im_start|>", "<|im_end|>"), None, ("", "<|im_end|>")),
    "thinks": (THINKS, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), None, ("", "<|im_end|>")),
    "glm": (GLM, ("<|user|>", "<|assistant|>"), ["<|end|>", "<|user|>"], ("", "<|user|>")),
    "not behind the last": (BETWEEN, ("<|im_start|>", "<|im_end|>"), None, ("", "<|im_end|>")),
    "opens only": (OPENS, ("<|user|>", "<|bot|>"), None, ("", "<|end|>")),
    "refuses": (PICKY, ("<|im_start|>", "<|im_end|>"), None, ("", "<|end|>")),
    "none": (None, ("<|im_end|>",), None, ("", "<|end|>")),
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def model(tokenizer, stated=None):
    torch.manual_seed(0)
    lm = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer) + 3, max_position_embeddings=64, **SMALL))
    lm.generation_config = GenerationConfig(eos_token_id=stated)
    return lm


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_says_where_a_turn_ends(name):
    template, special, stated, (between, end) = TEMPLATES[name]
    tokenizer = bytes_with(template, *special)
    lm = model(tokenizer, stated and tokenizer.convert_tokens_to_ids(stated))
    assert turn_end(lm, tokenizer) == (between, tokenizer.convert_tokens_to_ids(end))
    expected = {end, "<|end|>", *(stated or ())}
    assert end_tokens(lm, tokenizer) == {tokenizer.convert_tokens_to_ids(token) for token in expected}


def test_text_before_the_end_is_part_of_it():
    tokenizer = spacing_tokenizer(LLAMA2)
    assert turn_end(model(tokenizer), tokenizer) == (" ", tokenizer.eos_token_id)


@pytest.mark.parametrize("stated", [None, 65, [65, 66, 9999, -1]])
def test_the_models_own_end_tokens_count(stated):
    tokenizer = bytes_with(None)
    numbers = {65, 66} if isinstance(stated, list) else {stated} - {None}
    assert end_tokens(model(tokenizer, stated), tokenizer) == {tokenizer.eos_token_id, *numbers}


def policy_of(tokenizer, stated=None, **sampling):
    return TokenPolicy(
        model(tokenizer, stated), tokenizer, ModelConfig(preset="tiny-0.2m", context=64), Sampling(**sampling)
    )


@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_every_engine_ends_at_every_one_of_them(engine):
    """Ends are as likely as all other tokens, and half of all tokens are one."""
    tokenizer = bytes_with(CHATML, "<|im_start|>", "<|im_end|>")
    policy = policy_of(tokenizer, list(range(0, 256, 2)), max_tokens=8, engine=engine)
    assert policy.end_tokens == {
        *range(0, 256, 2),
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }
    answers = make_engine(policy).generate([Prompt((65,), stream) for stream in range(60)], 0)
    last = {answer.ids[-1] for answer in answers if answer.ended}
    assert len(last) > 10 and last <= policy.end_tokens
    assert all(not policy.end_tokens & set(answer.ids[:-1]) for answer in answers)
    assert all(answer.ended == (answer.ids[-1] in policy.end_tokens) for answer in answers)


def test_a_bundle_says_where_to_stop(tmp_path):
    """Whoever reads it: transformers, vLLM, and the next one who trains it."""
    tokenizer = bytes_with(CHATML, "<|im_start|>", "<|im_end|>")
    policy = policy_of(tokenizer, [65])
    ends = sorted({65, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")})
    folder = save_token_bundle(tmp_path, {"a": "p"}, {"p": policy}, LINEAGE) / "p"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == ends
    assert end_tokens(load_model(str(folder), torch.float32, 64), load_tokenizer(str(folder))) == set(ends)


def test_a_generation_config_that_transformers_would_not_save_again_is_no_trouble(tmp_path):
    tokenizer = bytes_with(CHATML, "<|im_start|>", "<|im_end|>")
    lm = model(tokenizer)
    lm.generation_config = GenerationConfig(do_sample=False, temperature=0.6, eos_token_id=7)
    policy = TokenPolicy(lm, tokenizer, ModelConfig(preset="tiny-0.2m", context=64), Sampling())
    policy.lm.save_pretrained(tmp_path)
    assert sorted(policy.end_tokens) == AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id


@pytest.mark.parametrize("chat", [None, False])
def test_demonstrations_end_as_turns_do(chat):
    tokenizer = bytes_with(CHATML, "<|im_start|>", "<|im_end|>")
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    sizes = "team.speaker.model.context=64", "team.speaker.generation.max_tokens=30"
    run_config = config(*sizes, f"team.speaker.model.chat={json.dumps(chat)}")
    start, end, think = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<think>"])
    demonstrations = [TextExample("", "q", "yes"), TextExample("", "q", "<think>a<|im_end|>\ud800")]
    first, other = encode_examples(demonstrations, model(tokenizer), tokenizer, run_config, "speaker")
    last = tokenizer.eos_token_id if chat is False else end
    assert first.response == [*b"yes", last]
    assert other.response == [think, *"a<|im_end|>\ufffd".encode(), last]
    if chat is None:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}], tokenize=False
        )
        assert tokenizer.decode([*first.prompt, *first.response]) + "\n" == rendered
        assert first.prompt[0] == start


@pytest.mark.parametrize("template", [LLAMA2, CHATML, GLM], ids=["llama 2", "chatml", "glm"])
@pytest.mark.parametrize("scheme", ["first", "always", "never", None])
def test_demonstrations_are_what_the_template_writes(template, scheme):
    """A response is not the begin of a text, so a tokenizer that puts a space before the first word changes nothing."""
    frame = "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"
    if scheme is None:
        tokenizer = bytes_with(template, "<s>", *frame, bos_token="<s>")
    else:
        tokenizer = spacing_tokenizer(template, scheme)
        tokenizer.add_special_tokens({"additional_special_tokens": list(frame)})
    sizes = "team.speaker.model.context=128", "team.speaker.generation.max_tokens=40"
    for response in ("yes", "a b", "x-y z"):
        [example] = encode_examples(
            [TextExample("", "q", response)], model(tokenizer), tokenizer, config(*sizes), "speaker"
        )
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": response}]
        encoding = tokenizer.apply_chat_template(messages)
        assert isinstance(encoding, BatchEncoding)
        complete = encoding["input_ids"]
        ids = [*example.prompt, *example.response]
        assert complete[: len(ids)] == (ids[: len(complete)] if template is GLM else ids)


def test_a_reply_without_a_template_goes_on_where_its_prompt_ends():
    tokenizer = spacing_tokenizer(LLAMA2)
    sizes = "team.speaker.model.context=64", "team.speaker.generation.max_tokens=30", "team.speaker.model.chat=false"
    [example] = encode_examples([TextExample("", "1+1=", "2")], model(tokenizer), tokenizer, config(*sizes), "speaker")
    assert tokenizer.convert_ids_to_tokens(example.response) == ["2", "</s>"]
