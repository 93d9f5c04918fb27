"""Weights in memory that two processes share."""

import gc
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.vllm.process.weight_memory import SharedWeights, read_tensors

TYPES = (torch.float32, torch.bfloat16, torch.int64)
SHAPES = st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(1, 5), max_size=3)), min_size=1, max_size=6)


@given(shapes=SHAPES)
def test_a_reader_gets_what_was_written_version_by_version(shapes):
    tensors = {f"layer.{n}": torch.zeros(shape, dtype=dtype) for n, (dtype, shape) in enumerate(shapes)}
    shared = SharedWeights(tensors)
    for version in (1, 2):
        tensors = {name: tensor + version for name, tensor in tensors.items()}
        shared.write(version, tensors)
        arrived = dict(read_tensors(shared.layout, version))
        assert arrived.keys() == tensors.keys()
        assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
        assert all(arrived[name].dtype == tensor.dtype for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "tensors",
    [{}, {"a": torch.zeros(3)}, {"a": torch.zeros(2, dtype=torch.bfloat16)}],
    ids=["missing", "another shape", "another type"],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_ones_stay(tensors):
    shared = SharedWeights({"a": torch.zeros(2)})
    shared.write(1, {"a": torch.ones(2)})
    with pytest.raises(MarlRayError, match=r"weights: expected a torch.float32 \[2\], got"):
        shared.write(2, tensors)
    assert dict(read_tensors(shared.layout, 1))["a"].tolist() == [1, 1]


def test_a_version_that_is_not_whole_is_refused():
    shared = SharedWeights({"a": torch.zeros(2)})
    with pytest.raises(MarlRayError, match=r"^weights: expected version 1, got 0 and a part of 0$"):
        list(read_tensors(shared.layout, 1))
    shared.write(1, {"a": torch.ones(2)})
    with pytest.raises(MarlRayError, match=r"^weights: expected a torch\.float32 \[2\], got none$"):
        shared.fill(2, [])  # a writer that begins, and does not end
    with pytest.raises(MarlRayError, match=r"^weights: expected version 2, got 1 and a part of 2$"):
        list(read_tensors(shared.layout, 2))


def test_the_memory_goes_with_its_writer():
    shared = SharedWeights({"a": torch.zeros(2)})
    memory = os.stat(shared.layout.path)
    path = shared.layout.path
    del shared
    gc.collect()
    # The number of the file may be another file's by now.
    assert not os.path.exists(path) or not os.path.samestat(os.stat(path), memory)
