"""Messages between stages: the stream alone as it is, or all parts in one flat tensor."""

import torch

from megaframe.architecture.cross_layer_tensors import HandedTensor
from megaframe.pipeline_parallel.message import StageMessage

HANDED = (HandedTensor("blocks.3.embedding", -1, 3, 5), HandedTensor("blocks.1.keys", 1, 4, 6, 2))


def test_what_is_packed_is_unpacked():
    """Seven tokens are four rows on each of two ranks, one of them padding."""
    form, draw = StageMessage(HANDED, hidden=3, ranks=2), torch.Generator().manual_seed(0)
    shapes = [(4, 3), (4, 5), (1, 7, 1, 6)]
    assert form.list_shapes(1, 7) == shapes
    parts = [torch.randn(shape, generator=draw) for shape in shapes]
    message = form.pack(parts[0], parts[1:])
    assert message.shape == form.find_shape(1, 7) == (4 * 3 + 4 * 5 + 7 * 6,)
    for part, unpacked in zip(parts, form.unpack(message, 1, 7), strict=True):
        assert torch.equal(part, unpacked)


def test_a_stream_alone_is_not_copied():
    form, x = StageMessage((), hidden=3, ranks=1), torch.randn(7, 3)
    assert form.pack(x, []) is x and form.unpack(x, 1, 7)[0] is x
    assert form.find_shape(1, 7) == (7, 3)
