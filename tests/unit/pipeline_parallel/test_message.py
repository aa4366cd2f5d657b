"""Messages between stages: the stream alone as it is, or all parts in one flat tensor."""

import pytest
import torch

from megaframe.architecture.cross_layer_tensors import HandedTensor
from megaframe.pipeline_parallel.message import StageMessage

HANDED = (HandedTensor("blocks.3.embedding", -1, 3, 5), HandedTensor("blocks.1.keys", 1, 4, 6, 2))


def test_what_is_packed_is_unpacked():
    """Seven tokens are four rows on each of two ranks, one of them padding."""
    form = StageMessage(HANDED, width=3, ranks=2, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (4, 5), (1, 7, 1, 6)]
    assert form.list_shapes(1, 7) == shapes
    parts = [torch.randn(shape, generator=draw) for shape in shapes]
    message = form.pack(parts[0], parts[1:])
    assert message.shape == form.find_shape(1, 7) == (4 * 3 + 4 * 5 + 7 * 6,)
    for part, unpacked in zip(parts, form.unpack(message, 1, 7), strict=True):
        assert torch.equal(part, unpacked)


def test_a_stream_alone_is_not_copied():
    form, x = StageMessage((), width=3, ranks=1, dtype=torch.float32), torch.randn(7, 3)
    assert form.pack(x, []) is x and form.unpack(x, 1, 7)[0] is x
    assert form.find_shape(1, 7) == (7, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_of_keys_are_finite_elements_without_gradients(dtype):
    """All numbers whose halves are at their bounds, and some between. In 16 bits they are two
    elements, and what has no gradient is not in the message back."""
    numbers = [0, 1, 127, 128, 2**14 - 1, 2**14, 2**17 - 1, 2**27, 2**28 - 1, 12_345_678]
    choice = torch.tensor(numbers, dtype=torch.int32).view(5, 2)
    forms = (HandedTensor("blocks.0.choice", 0, 3, 2, is_choice=True), HANDED[0])
    form = StageMessage(forms, width=3, ranks=1, dtype=dtype)
    parts = [torch.ones(5, 3, dtype=dtype), choice, torch.ones(5, 5, dtype=dtype)]
    message = form.pack(parts[0], parts[1:])
    elements = 5 * 3 + 10 * (2 if dtype.itemsize == 2 else 1) + 5 * 5
    assert message.shape == form.find_shape(1, 5) == (elements,) and message.dtype == dtype
    assert float(message.abs().max()) < 2
    for part, unpacked in zip(parts, form.unpack(message, 1, 5), strict=True):
        assert torch.equal(part, unpacked) and part.dtype == unpacked.dtype
    assert form.gradients.find_shape(1, 5) == (5 * 3 + 5 * 5,)
