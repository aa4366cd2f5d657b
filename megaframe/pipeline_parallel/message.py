"""What one stage sends to the next: the stream alone, or with it what parts before hand to layers
after, as one flat tensor; and in the other direction their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from megaframe.architecture.cross_layer_tensors import HandedTensor
from megaframe.tensor_parallel.axis import count_rows_per_rank


class StageMessage:
    """The form of the messages between two stages.

    Attributes:
        tensors: What they have besides the stream.
    """

    def __init__(
        self, tensors: Sequence[HandedTensor], width: int, ranks: int, dtype: torch.dtype
    ) -> None:
        """Describe the messages.

        Args:
            tensors: What they have besides the stream.
            width: Of the stream, or of all streams.
            ranks: Tensor ranks.
            dtype: Of the stream.
        """
        self.tensors, self._dtype = tensors, dtype
        self._width, self._ranks = width, ranks

    @cached_property
    def gradients(self) -> StageMessage:
        """The form of the messages in the other direction."""
        differentiable = [tensor for tensor in self.tensors if not tensor.is_choice]
        return StageMessage(differentiable, self._width, self._ranks, self._dtype)

    def list_shapes(self, samples: int, tokens: int) -> list[tuple[int, ...]]:
        """Return the shapes of the stream and of all else on this rank.

        Args:
            samples: Of the microbatch.
            tokens: Of a sample on this context rank.
        """
        rows = count_rows_per_rank(samples * tokens, self._ranks)
        own = (tensor.find_shape(samples, tokens, rows, self._ranks) for tensor in self.tensors)
        return [(rows, self._width), *own]

    def find_shape(self, samples: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of a message. The arguments are those of `list_shapes`."""
        if not self.tensors:
            return self.list_shapes(samples, tokens)[0]
        return (sum(self._list_sizes(samples, tokens)),)

    def _list_sizes(self, samples: int, tokens: int) -> list[int]:
        """Return the elements of all parts in a message."""
        per_number = _count_per_number(self._dtype)
        kinds = [1, *(per_number if tensor.is_choice else 1 for tensor in self.tensors)]
        shapes = self.list_shapes(samples, tokens)
        return [torch.Size(shape).numel() * each for shape, each in zip(shapes, kinds, strict=True)]

    def pack(self, stream: Tensor, handed: Sequence[Tensor]) -> Tensor:
        """Return a message."""
        if not self.tensors:
            return stream
        parts = (
            part if part.is_floating_point() else _encode_numbers(part, self._dtype)
            for part in (stream, *handed)
        )
        return torch.cat([part.reshape(-1) for part in parts])

    def unpack(self, message: Tensor, samples: int, tokens: int) -> list[Tensor]:
        """Return the stream and all else. The other arguments are those of `list_shapes`."""
        if not self.tensors:
            return [message]
        parts = [*message.split(self._list_sizes(samples, tokens))]
        for place, tensor in enumerate(self.tensors, 1):
            if tensor.is_choice:
                parts[place] = _decode_numbers(parts[place])
        shapes = self.list_shapes(samples, tokens)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


_HALF = 14
"""Bits of half a number."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of whole numbers, by their bytes."""


def _count_per_number(dtype: torch.dtype) -> int:
    """Return how many elements of a type a number of up to 28 bits takes."""
    return 2 if dtype.itemsize == 2 else 1


def _encode_numbers(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of up to 28 bits as elements of a floating-point type with the same bits. In
    types of 16 bits a number is two halves. All elements are finite and less than 2, so that none
    is taken for one that is not finite."""
    if _count_per_number(dtype) == 2:
        numbers = torch.stack((numbers >> _HALF, numbers & (1 << _HALF) - 1), -1).flatten(-2)
    return numbers.to(_INTEGERS[dtype.itemsize]).view(dtype)


def _decode_numbers(elements: Tensor) -> Tensor:
    """Return the numbers of which these are the elements, int32."""
    numbers = elements.view(_INTEGERS[elements.dtype.itemsize]).int()
    if _count_per_number(elements.dtype) == 2:
        high, low = numbers.unflatten(-1, (-1, 2)).unbind(-1)
        numbers = (high << _HALF) + low
    return numbers
