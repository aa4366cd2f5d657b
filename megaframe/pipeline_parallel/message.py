"""What one stage sends to the next: the stream alone, or with it what parts before hand to layers
after, as one flat tensor; and in the other direction their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaframe.architecture.cross_layer_tensors import HandedTensor
from megaframe.tensor_parallel.axis import count_rows_per_rank


class StageMessage:
    """The form of the messages between two stages.

    Attributes:
        tensors: What they have besides the stream.
    """

    def __init__(self, tensors: Sequence[HandedTensor], hidden: int, ranks: int) -> None:
        """Describe the messages.

        Args:
            tensors: What they have besides the stream.
            hidden: Width of the stream.
            ranks: Tensor ranks.
        """
        self.tensors = tensors
        self._hidden, self._ranks = hidden, ranks

    def list_shapes(self, samples: int, tokens: int) -> list[tuple[int, ...]]:
        """Return the shapes of the stream and of all else on this rank.

        Args:
            samples: Of the microbatch.
            tokens: Of a sample on this context rank.
        """
        rows = count_rows_per_rank(samples * tokens, self._ranks)
        own = (tensor.find_shape(samples, tokens, rows, self._ranks) for tensor in self.tensors)
        return [(rows, self._hidden), *own]

    def find_shape(self, samples: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of a message. The arguments are those of `list_shapes`."""
        shapes = self.list_shapes(samples, tokens)
        return shapes[0] if len(shapes) == 1 else (sum(torch.Size(s).numel() for s in shapes),)

    def pack(self, stream: Tensor, handed: Sequence[Tensor]) -> Tensor:
        """Return a message."""
        if not self.tensors:
            return stream
        return torch.cat([part.reshape(-1) for part in (stream, *handed)])

    def unpack(self, message: Tensor, samples: int, tokens: int) -> list[Tensor]:
        """Return the stream and all else. The other arguments are those of `list_shapes`."""
        if not self.tensors:
            return [message]
        shapes = self.list_shapes(samples, tokens)
        parts = message.split([torch.Size(shape).numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
