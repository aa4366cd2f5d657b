"""Activations in host memory come back as they were, in whatever order they are taken, and stay so
when others are stored in the memory that they had on the host."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megaframe.pipeline_parallel.activation_offload import ActivationOffload

SHAPES = st.sampled_from([(3,), (2, 4), (3, 1)])
TYPES = st.sampled_from([torch.float64, torch.bfloat16])


@given(st.lists(st.tuples(SHAPES, TYPES, st.booleans()), max_size=12))
def test_every_tensor_comes_back_in_any_order(tensors):
    """The third value says whether the oldest stored tensor is taken before the next is stored."""
    offload = ActivationOffload(torch.device("cpu"))
    stored, taken = [], []
    for number, (shape, dtype, takes) in enumerate(tensors):
        x = torch.full(shape, float(number), dtype=dtype)
        stored.append((x.clone(), offload.store(x)))
        if takes:
            expected, activation = stored.pop(0)
            taken.append((expected, activation.take()))
    for expected, activation in reversed(stored):
        activation.fetch()
        taken.append((expected, activation.take()))
    assert len(taken) == len(tensors)
    assert all(torch.equal(result, expected) for expected, result in taken)
