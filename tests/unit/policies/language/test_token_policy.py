"""Language models as policies: what is scored, however the rows are divided, adapted, sharded and copied."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from toy_models.tokens import LORA, responses, tiny

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.language import token_policy
from marl_ray.policies.language.lora import add_adapters, merged_weights
from marl_ray.policies.language.sampling_copy import frozen_copy, plain_copy, refresh
from marl_ray.policies.language.sharding.gather_shards import full_tensors
from marl_ray.policies.language.sharding.shard import shard
from marl_ray.policies.language.sharding.tensor_parallel import decoder_layers
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy, adopt_weights, build_token_policy
from marl_ray.training.single_process import process_group


def naive(policy, prompts, answers, mask):
    """Log-probabilities, entropies and values row by row, from whole sequences and all their logits."""
    log_probs, entropy, values = (torch.zeros(mask.shape) for _ in range(3))
    for row in range(len(mask)):
        prompt = prompts[row][prompts[row] >= 0]
        count = int(mask[row].sum())
        outputs = policy.lm(torch.cat([prompt, answers[row, :count]])[None], output_hidden_states=True)
        log_p = (outputs.logits[0].float() / policy.generation.temperature).log_softmax(-1)
        for step in range(count):
            at = len(prompt) + step - 1
            log_probs[row, step] = log_p[at, answers[row, step]]
            entropy[row, step] = torch.distributions.Categorical(logits=log_p[at]).entropy()
            if policy.value_head is not None:
                values[row, step] = policy.value_head(outputs.hidden_states[-1][0, at])
    return log_probs, entropy, values


def close(first, other, tolerance=1e-5):
    torch.testing.assert_close(first, other, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def policy():
    return tiny()


def test_scores_are_those_of_whole_sequences(policy):
    rows = responses()
    outputs = policy.evaluate(*rows)
    log_probs, entropy, values = naive(policy, *rows)
    close(outputs.log_probs, log_probs)
    close(outputs.entropy, entropy)
    close(outputs.values, values)
    assert outputs.cost_values.shape == (4, 6, 2)
    assert not outputs.cost_values[~rows[2]].any()
    assert torch.equal(policy.evaluate(*rows, need_entropy=False).log_probs, outputs.log_probs)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Llama", {"num_key_value_heads": 1}),
        ("GPT2", {}),
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 16}),
        ("Gemma2", {"num_key_value_heads": 1, "head_dim": 8, "final_logit_softcapping": 2.0}),
        ("Cohere", {"num_key_value_heads": 1}),
        ("Granite", {"num_key_value_heads": 1, "logits_scaling": 8.0}),
    ],
)
def test_other_architectures_are_scored_likewise(architecture, settings):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "initializer_range": 0.3,
    }
    config = getattr(transformers, f"{architecture}Config")(**sizes | settings)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    policy = TokenPolicy(lm, byte_tokenizer(), ModelConfig(preset="tiny-1m"), GenerationConfig(temperature=0.5))
    rows = responses(vocabulary=40)
    log_probs, entropy, _ = naive(policy, *rows)
    outputs = policy.evaluate(*rows)
    close(outputs.log_probs, log_probs, 1e-4)
    close(outputs.entropy, entropy, 1e-4)
    assert len(decoder_layers(lm)) == 2


def test_scores_depend_neither_on_padding_nor_on_the_division_nor_on_chunks(policy, monkeypatch):
    prompts, answers, mask = responses(6)
    at_once = policy.evaluate(prompts, answers, mask).log_probs
    padded = policy.evaluate(
        torch.nn.functional.pad(prompts, (3, 0), value=-1),
        torch.nn.functional.pad(answers, (0, 2)),
        torch.nn.functional.pad(mask, (0, 2)),
    )
    close(padded.log_probs[:, :6], at_once)
    parts = [
        policy.evaluate(*(tensor[part] for tensor in (prompts, answers, mask))) for part in (slice(2), slice(2, 6))
    ]
    close(torch.cat([part.log_probs for part in parts]), at_once)
    policy.zero_grad()
    at_once.sum().backward()
    expected = [parameter.grad.clone() for parameter in policy.actor_parameters()]
    monkeypatch.setattr(token_policy, "MAX_LOGITS", 259 * 4)
    policy.zero_grad()
    chunked = policy.evaluate(prompts, answers, mask).log_probs
    close(chunked, at_once)
    chunked.sum().backward()
    for parameter, gradient in zip(policy.actor_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-4)


def nodes(tensor):
    """Names of all operations behind a tensor."""
    seen, rest = set(), [tensor.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None and node not in seen:
            seen.add(node)
            rest += [following for following, _ in node.next_functions]
    return {node.name() for node in seen}


@pytest.mark.parametrize("chunk", [None, 4])
def test_an_entropy_that_is_not_learned_has_no_gradient_and_changes_none(policy, monkeypatch, chunk):
    if chunk:
        monkeypatch.setattr(token_policy, "MAX_LOGITS", 259 * chunk)
    gradients, entropies, saved = [], [], []
    for learn_entropy in (True, False):
        policy.zero_grad()
        sizes: list[int] = []

        def note_size(saved_tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(saved_tensor.nbytes)
            return saved_tensor

        with torch.autograd.graph.saved_tensors_hooks(note_size, lambda x: x):
            outputs = policy.evaluate(*responses(6), learn_entropy=learn_entropy)
        assert ("ExpBackward0" in nodes(outputs.log_probs.sum() + outputs.entropy.sum())) == learn_entropy
        assert outputs.entropy.requires_grad == learn_entropy
        (outputs.log_probs.sum() - 0.0 * outputs.entropy.sum()).backward()
        gradients.append([parameter.grad.clone() for parameter in policy.actor_parameters()])
        entropies.append(outputs.entropy.detach())
        saved.append(sum(sizes))
    assert torch.equal(*entropies) and entropies[0].any()
    assert all(torch.equal(first, other) for first, other in zip(*gradients, strict=True))
    assert chunk or saved[1] < saved[0]


def test_no_rows_are_no_trouble(policy):
    policy.zero_grad()
    outputs = policy.evaluate(*(tensor[:0] for tensor in responses()))
    assert outputs.log_probs.shape == (0, 6)
    (outputs.log_probs.sum() + outputs.values.sum()).backward()
    assert all(parameter.grad is not None for parameter in policy.actor_parameters())


def test_workers_begin_equal_and_critics_near_zero():
    first, other = (
        build_token_policy(ModelConfig(preset="tiny-0.2m", lora=LORA), GenerationConfig(), 3, True, 1) for _ in range(2)
    )
    torch.manual_seed(5)
    for a, b in zip(first.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.evaluate(*responses()).values.abs().max() < 0.1
    critics = [parameter for head in first.heads for parameter in head.parameters()]
    assert {id(p) for p in first.actor_parameters()} & {id(p) for p in critics} == set()
    assert len(critics) == 4


def test_presets_have_the_sizes_they_are_named_by():
    for preset, size in (("tiny-0.2m", 0.2e6), ("tiny-1m", 1e6), ("tiny-6m", 6e6)):
        policy = build_token_policy(ModelConfig(preset=preset), GenerationConfig(), 0, False, 0)
        assert sum(parameter.numel() for parameter in policy.parameters()) == pytest.approx(size, rel=0.15)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_adapters_leave_the_base_and_stay_apart_from_it_in_a_copy(targets):
    bare, policy = tiny(), tiny(lora=LORA | {"targets": targets})
    adopt_weights(policy, plain_copy(bare))
    rows = responses()
    close(policy.reference_evaluate(*rows), bare.evaluate(*rows).log_probs)
    trained = policy.evaluate(*rows).log_probs
    assert (trained - policy.reference_evaluate(*rows)).abs().max() > 0.01
    trained.sum().backward()
    names = {name for name, parameter in policy.lm.named_parameters() if parameter.requires_grad}
    assert names
    assert all("lora_" in name for name in names)
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in policy.lm.parameters())
    plain = plain_copy(policy)
    close(plain.evaluate(*rows).log_probs, trained)
    assert {name for name, _ in plain.named_parameters()} == {name for name, _ in policy.named_parameters()}
    merged = merged_weights(plain.lm)
    assert set(merged) == set(bare.lm.state_dict())
    bare.lm.load_state_dict(merged)
    close(bare.evaluate(*rows).log_probs, trained)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_gpt2_keeps_its_weights_transposed_and_merges_all_the_same(dtype, tolerance):
    torch.manual_seed(0)  # of some weights bfloat16 leaves more than the tolerance
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, initializer_range=0.3)
    model = ModelConfig(preset="tiny-1m", lora=LORA, dtype=dtype)
    policy = TokenPolicy(transformers.GPT2LMHeadModel(config), byte_tokenizer(), model, GenerationConfig())
    add_adapters(policy.lm, model.lora)
    for parameter in policy.actor_parameters():
        parameter.data.normal_(0, 0.3)
    rows, plain = responses(vocabulary=40), plain_copy(policy)
    close(plain.evaluate(*rows).log_probs, policy.evaluate(*rows).log_probs, tolerance)
    merged = transformers.GPT2LMHeadModel(config)
    merged.load_state_dict(merged_weights(plain.lm))
    bare = TokenPolicy(merged, byte_tokenizer(), ModelConfig(preset="tiny-1m"), GenerationConfig())
    close(bare.evaluate(*rows).log_probs, policy.evaluate(*rows).log_probs, tolerance)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("nope",), "model.lora.targets: no linear layer is named 'nope'"),
        (("q_proj", "embed_tokens"), "model.lora.targets: no linear layer is named 'embed_tokens'"),
        (("lm_head",), "model.lora.targets: 'lm_head' shares its weights with the embedding"),
    ],
)
def test_targets_that_cannot_be_adapted_are_named(targets, message):
    with pytest.raises(MarlRayError, match=message):
        tiny(lora={"targets": targets})


def test_activation_checkpointing_gives_equal_gradients():
    gradients = []
    with process_group():
        mesh = init_device_mesh("cpu", (1,))
        for checkpointing in (False, True):
            policy = tiny(activation_checkpointing=checkpointing)
            shard(policy, mesh, False)
            policy.evaluate(*responses()).log_probs.sum().backward()
            gradients.append(list(full_tensors(parameter.grad for parameter in policy.actor_parameters())))
    for first, other in zip(*gradients, strict=True):
        assert torch.equal(first, other)


def test_a_sharded_policy_scores_and_refreshes_like_a_plain_one():
    policy = tiny(lora=LORA)
    plain, expected = plain_copy(policy), policy.evaluate(*responses()).log_probs
    reference = policy.reference_evaluate(*responses())
    with process_group():
        shard(policy, init_device_mesh("cpu", (1,)), False)
        close(policy.reference_evaluate(*responses()), reference)
        close(policy.evaluate(*responses()).log_probs, expected)
        policy.evaluate(*responses()).log_probs.sum().backward()
        assert all(parameter.grad is not None for parameter in policy.actor_parameters())
        optimizer = torch.optim.SGD(policy.actor_parameters(), 0.01)
        optimizer.step()
        refresh(plain, policy)
        close(plain.evaluate(*responses()).log_probs, policy.evaluate(*responses()).log_probs)
        assert (plain.evaluate(*responses()).log_probs - expected).abs().max() > 0.01


def test_copies_are_frozen_and_keep_their_weights():
    policy = tiny(dtype="bf16")
    frozen, plain = frozen_copy(policy), plain_copy(policy)
    before = policy.evaluate(*responses()).log_probs.detach()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    close(frozen.evaluate(*responses()).log_probs, before)
    for copy, dtype in ((frozen, torch.float32), (plain, torch.bfloat16)):
        assert not copy.actor_parameters()
        assert {parameter.dtype for parameter in copy.parameters()} == {dtype}
        assert copy.lm.get_input_embeddings().weight is copy.lm.get_output_embeddings().weight
        assert copy.tokenizer is policy.tokenizer
    assert plain.evaluate(*responses()).log_probs.dtype == torch.float32
    refresh(plain, policy)
    assert not any(parameter.any() for parameter in plain.parameters())


def test_a_folder_is_read_as_it_is_and_what_is_none_is_named(tmp_path):
    policy = tiny(critic=False, signals=0)
    policy.lm.save_pretrained(tmp_path)
    with pytest.raises(MarlRayError, match=rf"model.path '{tmp_path}' has no tokenizer"):
        build_token_policy(ModelConfig(path=str(tmp_path), context=64), GenerationConfig(), 0)
    byte_tokenizer().save_pretrained(tmp_path)
    again = build_token_policy(ModelConfig(path=str(tmp_path), context=64), policy.generation, 9)
    assert torch.equal(again.evaluate(*responses()).log_probs, policy.evaluate(*responses()).log_probs)
    again.tokenizer.add_tokens(["<|more|>"])  # type: ignore[attr-defined]  # transformers'
    again.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(MarlRayError, match="its tokenizer has 260 tokens, it has 259"):
        build_token_policy(ModelConfig(path=str(tmp_path), context=64), GenerationConfig(), 0)
    with pytest.raises(MarlRayError, match=r"model.context=65: '.*' has positions for 64 tokens"):
        build_token_policy(ModelConfig(path=str(tmp_path), context=65), GenerationConfig(), 0)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MarlRayError, match=r"lacks 1 weights of its model, such as model\.norm\.weight"):
        build_token_policy(ModelConfig(path=str(tmp_path), context=64), GenerationConfig(), 0)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    for path, message in ((tmp_path, "is no causal language model"), (tmp_path / "none", "is no folder")):
        with pytest.raises(MarlRayError, match=rf"model.path '{path}' {message}") as caught:
            build_token_policy(ModelConfig(path=str(path), context=64), GenerationConfig(), 0)
        assert "\n" not in str(caught.value)


def test_another_shape_is_not_adopted():
    other = build_token_policy(ModelConfig(preset="tiny-1m"), GenerationConfig(), 0)
    with pytest.raises(
        MarlRayError,
        match=r"^bundle: holds a language model of another shape: model\.embed_tokens\.weight is \[259, 192\]$",
    ):
        adopt_weights(tiny(), other)
