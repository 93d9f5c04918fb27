"""No worker has a whole model where an engine has the weights itself; a run and its bundle are as they are otherwise."""

from pathlib import Path

import pytest
import torch
from processes.two_workers import two_workers
from safetensors.torch import load_file
from toy_models.small_llama import saved_llama
from toy_runs.runs import timeless
from toys import texts
from transformers import AutoModelForCausalLM

ELSEWHERE = "team.speaker.generation.engine=toys.engines:Apart"
EXACT = "hyper.adam_eps=1e-4"
"""Adam enlarges the rounding of small gradients by lr / eps, and processors round differently."""
RUNS = {
    "all weights": (),
    "a critic": ("algorithm=ppo",),
    "adapters": ("team.speaker.model.lora.rank=4",),
    "an untied layer of logits": (),
    "tensor": ("resources.parallel.tensor=2",),
    "context": ("resources.parallel.context=2",),
}


def last_bundle(folder: Path) -> Path:
    last = max(folder.glob("*/bundle"), key=lambda bundle: int(bundle.parent.name))
    return last / "speaker"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in ("all weights", "adapters"))) for name in RUNS]
)
def test_a_run_and_its_bundle_are_those_of_workers_with_whole_copies(tmp_path, name):
    model = saved_llama(tmp_path / "model", tied=name != "an untied layer of logits")
    overrides = [model, "hyper.minibatches=2", "train.micro_batch=3", "resources.workers=2", EXACT, *RUNS[name]]
    rows, folders = [], []
    for kind, more in (("whole", []), ("elsewhere", [ELSEWHERE])):
        folders.append(tmp_path / kind)
        rows.append(two_workers(texts.train_rows, str(folders[-1]), *overrides, *more))
    for usual, elsewhere in zip(*map(timeless, rows), strict=True):
        assert elsewhere.pop("engine/log_prob_gap", 0.0) < 1e-5
        assert elsewhere == pytest.approx(usual, abs=1e-5)
    expected, got = (last_bundle(folder) for folder in folders)
    assert sorted(path.relative_to(got) for path in got.rglob("*")) == sorted(
        path.relative_to(expected) for path in expected.rglob("*")
    )
    weights = [load_file(folder / "model.safetensors") for folder in (expected, got)]
    loaded = AutoModelForCausalLM.from_pretrained(got, dtype=torch.float32).state_dict()
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=1e-5, rtol=0, msg=key)
        assert torch.equal(loaded[key], weights[1][key])
    assert (got / "config.json").read_bytes() == (expected / "config.json").read_bytes()
    assert (got / "generation_config.json").read_bytes() == (expected / "generation_config.json").read_bytes()
