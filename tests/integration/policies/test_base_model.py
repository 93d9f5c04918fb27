"""The model below an adapter: it comes back out of merged weights, its digest names it, and several adapters share it."""

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from toy_models.tokens import LORA, responses, tiny

from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.language import ADAPTER_FOLDER, Models, save_token_bundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.policies.language.base_model import base_sha256, known_base, share_base, unmerge_adapter
from marl_ray.policies.language.lora import adapted_layers, bare_weights, save_adapters
from marl_ray.policies.language.model_files import load_model
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.token_policy import TokenPolicy, save_merged

LINEAGE = Lineage(run="r", algorithm={}, config_hash="c", code_version="0", seed=0, env={}, steps=1, metrics={})


def make_policy(adapter: int, dtype: str = "fp32", **lora: object) -> TokenPolicy:
    """A sampling copy; all have one base model, and an adapter that this number names."""
    trained = tiny(critic=False, signals=0, lora=LORA | lora, dtype=dtype)
    generator = torch.Generator().manual_seed(adapter)
    with torch.no_grad():
        for parameter in trained.actor_parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return plain_copy(trained)


def write_bundle(folder: Path, plain: TokenPolicy) -> Models:
    """Save a bundle of the policy, and load its models."""
    bundle = load_bundle(save_token_bundle(folder, {"a": "p"}, {"p": plain}, LINEAGE))
    assert isinstance(bundle.policies, Models)
    return bundle.policies


def test_an_adapter_comes_out_of_the_weights_that_it_is_merged_into(tmp_path):
    trained = make_policy(1)
    models = write_bundle(tmp_path, trained)
    apart, merged = models.load_unmerged("p"), models["p"]
    assert apart is models.load_unmerged("p") is not merged
    assert apart.config.lora is not None and apart.config.lora.rank == LORA["rank"]
    for (name, layer), (other_name, other) in zip(adapted_layers(apart.lm), adapted_layers(trained.lm), strict=True):
        assert name == other_name and layer.scale == other.scale
        assert torch.equal(layer.down, other.down) and torch.equal(layer.up, other.up)
    base = bare_weights(trained.lm)
    for name, tensor in bare_weights(apart.lm).items():
        torch.testing.assert_close(tensor, base[name], atol=1e-6, rtol=0)
    for reference in (trained, merged):
        torch.testing.assert_close(
            apart.evaluate(*responses()).log_probs, reference.evaluate(*responses()).log_probs, atol=1e-5, rtol=0
        )
    assert not any(parameter.requires_grad for parameter in apart.parameters())


def test_bfloat16_gives_weights_back_whose_adapter_is_small(tmp_path):
    """Such an adapter is rounded away where it is merged, and is there again where it stands apart."""
    trained = make_policy(1, "bf16")
    with torch.no_grad():
        for _, layer in adapted_layers(trained.lm):
            layer.up.mul_(1e-3)
    apart = write_bundle(tmp_path, trained).load_unmerged("p")
    base = bare_weights(trained.lm)
    differing = [(tensor != base[name].float()).float().mean() for name, tensor in bare_weights(apart.lm).items()]
    assert max(differing) < 0.01
    for (_, layer), (_, other) in zip(adapted_layers(apart.lm), adapted_layers(trained.lm), strict=True):
        assert torch.equal(layer.up, other.up.float())


def test_a_digest_is_of_the_base_model_alone(tmp_path):
    first, second = make_policy(1), make_policy(2)
    digest = base_sha256(first.lm)
    assert base_sha256(second.lm) == digest == write_bundle(tmp_path, second).load_unmerged("p").base_sha256
    assert base_sha256(make_policy(1, "bf16").lm) != digest
    weight = bare_weights(second.lm)["model.norm.weight"]
    weight[3] += 1e-6
    assert base_sha256(second.lm) != digest
    first.lm.config.rms_norm_eps *= 2
    assert base_sha256(first.lm) != digest


def test_policies_of_one_base_have_its_weights_once(tmp_path):
    first, second = (write_bundle(tmp_path, make_policy(number)).load_unmerged("p") for number in (1, 2))
    before = second.evaluate(*responses()).log_probs
    share_base(second.lm, first.lm)
    weights, others = bare_weights(second.lm), bare_weights(first.lm)
    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == {
        name: tensor.data_ptr() for name, tensor in others.items()
    }
    torch.testing.assert_close(second.evaluate(*responses()).log_probs, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_base_with_other_weights_is_not_shared(dtype):
    first, second = make_policy(1, dtype), make_policy(2, dtype)
    name = "model.layers.0.mlp.up_proj.weight"
    bare_weights(second.lm)[name].mul_(1.5)
    held = bare_weights(second.lm)[name].data_ptr()
    bound = {"fp32": "8e-07", "bf16": "0.053"}[dtype]
    with pytest.raises(MarlRayError, match=rf"^{re.escape(name)} differs by 0\.21, expected at most {bound}$"):
        share_base(second.lm, first.lm)
    assert bare_weights(second.lm)[name].data_ptr() == held
    wide = plain_copy(tiny(critic=False, signals=0, lora=LORA, preset="tiny-1m"))
    with pytest.raises(MarlRayError, match=r"^model\.layers\.2\.input_layernorm\.weight is in one of them only$"):
        share_base(wide.lm, first.lm)


def test_an_adapter_of_a_model_with_more_layers_is_refused_by_the_layer_that_is_missing(tmp_path):
    wide = plain_copy(tiny(critic=False, signals=0, lora=LORA, preset="tiny-1m"))
    save_merged(make_policy(1), tmp_path / "model")
    assert wide.config.lora is not None
    save_adapters(wide.lm, wide.config.lora, None, tmp_path / ADAPTER_FOLDER)
    assert known_base(tmp_path / ADAPTER_FOLDER) is None is known_base(tmp_path / "none")
    message = r"^model\.lora\.targets: no linear layer is named 'model\.layers\.2\.mlp\.down_proj'$"
    with pytest.raises(MarlRayError, match=message):
        unmerge_adapter(load_model(str(tmp_path / "model"), torch.float32, 64), tmp_path / ADAPTER_FOLDER)


def test_a_policy_without_an_adapter_has_no_base_model(tmp_path):
    models = write_bundle(tmp_path, plain_copy(tiny()))
    assert models.load_unmerged("p") is models["p"] and models["p"].base_sha256 is None


def test_peft_reads_an_adapter_that_tells_its_base(tmp_path):
    trained = make_policy(1)
    folder = save_token_bundle(tmp_path, {"a": "p"}, {"p": trained}, LINEAGE)
    bare = tiny(critic=False, signals=0, lora=LORA)
    assert known_base(folder / "p" / ADAPTER_FOLDER) == base_sha256(trained.lm) == base_sha256(bare.lm)
    unadapted = load_model(str(folder / "p"), torch.float32, 64)
    PeftModel.from_pretrained(unadapted, str(folder / "p" / ADAPTER_FOLDER))
