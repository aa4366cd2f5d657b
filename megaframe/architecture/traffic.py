"""What a layer moves over the axes that divide samples and experts, pass by pass.

Tensor ranks divide every product, so what moves over the tensor axis follows from the products
(`megaframe.architecture.linear.TensorTraffic`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaframe.architecture.linear import Number


@dataclass(frozen=True)
class AxisTraffic:
    """What the tokens of a microbatch move over an axis: elements per token, summed over all ranks.

    Attributes:
        forward: In a forward pass, in the precision of the model. A recomputed block repeats it.
        backward: In a backward pass.
        wide_forward: In a forward pass, in at least fp32.
        wide_backward: In a backward pass.
        integer_bytes: Bytes of integers per token in a forward pass.
        count_bytes: Bytes in which each rank tells the others in a forward pass how many rows are
            coming, whatever their number.
    """

    forward: Number = 0
    backward: Number = 0
    wide_forward: Number = 0
    wide_backward: Number = 0
    integer_bytes: Number = 0
    count_bytes: Number = 0

    def __add__(self, other: AxisTraffic) -> AxisTraffic:
        return AxisTraffic(
            self.forward + other.forward,
            self.backward + other.backward,
            self.wide_forward + other.wide_forward,
            self.wide_backward + other.wide_backward,
            self.integer_bytes + other.integer_bytes,
            self.count_bytes + other.count_bytes,
        )

    def count_forward_bytes(self, width: int) -> Number:
        """Return the bytes per token of a forward pass, without the counts.

        Args:
            width: Bytes of a value.
        """
        return self.forward * width + self.wide_forward * max(4, width) + self.integer_bytes

    def count_backward_bytes(self, width: int) -> Number:
        """Return the bytes per token of a backward pass.

        Args:
            width: Bytes of a value.
        """
        return self.backward * width + self.wide_backward * max(4, width)


_SCALED_BLOCKS = {"fp16": 1024, "int8": 1024, "int4": 128}
"""Elements that share a scale of 4 bytes."""
_BITS = {"bf16": 16, "fp16": 16, "int8": 8, "int4": 4}


def count_message_bytes(compress: str, length: int, width: int, share: float) -> int:
    """Return the bytes of a message of `data_parallel.compression`.

    Args:
        compress: Name of the codec; `none` sends elements as they are.
        length: Elements of the span.
        width: Bytes of an element.
        share: Of the elements, for codecs that send some.
    """
    if compress == "none":
        return length * width
    if compress in _BITS:
        block = _SCALED_BLOCKS.get(compress)
        scales = 0 if block is None else 4 * math.ceil(length / block)
        return math.ceil(length * _BITS[compress] / 8) + scales
    count = min(length, max(1, math.ceil(share * length)))
    return 8 + count * width if compress == "randomk" else count * (4 + width)
