"""Workers that share one set of weights, and groups of them that have one each, do what one process does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes.two_workers import workers
from safetensors.torch import load_file
from toys import texts as toy_texts
from toys.runs import timeless

from marl_ray.training.single_process import process_group, train_alone

RUN = [
    "train.group_size=2",
    "hyper.minibatches=2",
    "hyper.kl_coef=0.1",
    "hyper.max_grad_norm=0.05",
    "train.micro_batch=3",
]
"""Three iterations of two updates, whose gradients are clipped."""
OFFLOAD = "team.speaker.model.cpu_offload=true"
MESHES = {
    "two groups of one": (2, "resources.parallel.replicate=2"),
    "offload": (2, OFFLOAD),
    "two groups of two": (4, "resources.parallel={shard: 2, replicate: 2}"),
    "four, offload": (4, OFFLOAD, "resources.parallel.shard=4"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[tuple[list, Path]]:
    folder = tmp_path_factory.mktemp("alone")
    with process_group():
        yield toy_texts.trained(str(folder), *RUN), folder


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_the_same_as_one_process(alone, tmp_path, mesh):
    single, folder = alone
    count, *overrides = MESHES[mesh]
    several = workers(count, toy_texts.trained, str(tmp_path), *RUN, f"resources.workers={count}", *overrides)
    assert len(single) == len(several) == 3
    for one, other in zip(timeless(single), timeless(several), strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    expected, got = weights(folder), weights(tmp_path)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=0, msg=name)
    # One process goes on from the checkpoint of several, which has each shard once.
    more = toy_texts.config(*RUN, "train.total_steps=32")
    expected_row, row = (timeless(train_alone(more, resume=place / "3"))[-1] for place in (folder, tmp_path))
    assert row == pytest.approx(expected_row, abs=1e-5)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's last bundle."""
    last = max(folder.glob("*/bundle"), key=lambda bundle: int(bundle.parent.name))
    (path,) = last.rglob("*.safetensors")
    return load_file(path)
