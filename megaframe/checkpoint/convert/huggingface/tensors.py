"""Maps each tensor of a Hugging Face model ("theirs") to boxes of megaframe's tensors ("ours").

A tensor of theirs is a matrix that stacks some of our boxes, each flattened to outputs x inputs.
Matrices may be transposed, several may be one tensor with a dim more, and the rows of rotary pairs,
or of gate and up, may be interleaved, i next to i + D/2, while ours keep the two halves apart.
Numbers may differ by a factor and an offset. Export and import both use this mapping, which follows
from the names of a family (`tensor_names.py`).

Shape legend: O rows, I columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.hash_table import DIGIT
from megaframe.architecture.spec import Box, ParamSpec
from megaframe.errors import UserError

ALL = slice(None)


@dataclass(frozen=True)
class TensorPart:
    """A box of one of our tensors, as a matrix of `rows` rows.

    Attributes:
        head: Rows of a head, if theirs interleaves rotary pairs, or of gate and up.
        rotated: Of these, how many first ones are pairs.
        last: Whether they are the last ones in theirs.
        columns: Whether they are columns.
        scale: Ours are theirs times this,
        offset: plus this.
    """

    spec: ParamSpec
    box: Box
    head: int = 0
    rotated: int = 0
    last: bool = False
    columns: bool = False
    scale: float = 1.0
    offset: float = 0.0

    @property
    def rows(self) -> int:
        """Number of rows of the matrix. A vector has one element per row."""
        outputs = self.box.shape[: len(self.box.shape) - self._inputs]
        return torch.Size(outputs).numel()

    @property
    def is_vector(self) -> bool:
        """Whether theirs has one dim."""
        return not self._inputs

    @property
    def _inputs(self) -> int:
        return self.spec.inputs if self.spec.role in ("matrix", "embedding", "head") else 0

    def to_hugging_face(self, tensor: Tensor) -> Tensor:
        """Convert the contents of the box to their layout: [O, I], or [O] for a vector."""
        flat = tensor.reshape(self.rows, -1) if self._inputs else tensor.reshape(-1)
        if self.rotated:
            flat = self._separate(flat)
        if self.offset:
            flat = flat - self.offset
        return flat / self.scale if self.scale != 1.0 else flat

    def from_hugging_face(self, tensor: Tensor) -> Tensor:
        """Convert rows in their layout to the contents of the box."""
        if self.scale != 1.0:
            tensor = tensor * self.scale
        if self.offset:
            tensor = tensor + self.offset
        if self.rotated:
            tensor = self._join(tensor)
        return tensor.reshape(self.box.shape)

    def _separate(self, rows: Tensor) -> Tensor:
        """Return rows, or columns, with the halves of our pairs next to each other."""
        heads = (rows.mT if self.columns else rows).unflatten(0, (-1, self.head))
        pairs = heads[:, : self.rotated].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        parts = [pairs, heads[:, self.rotated :]]
        joined = torch.cat(parts[::-1] if self.last else parts, 1).flatten(0, 1)
        return joined.mT if self.columns else joined

    def _join(self, rows: Tensor) -> Tensor:
        """Undo `_separate`."""
        heads = (rows.mT if self.columns else rows).unflatten(0, (-1, self.head))
        start = self.head - self.rotated if self.last else 0
        rotated = slice(start, start + self.rotated)
        pairs = heads[:, rotated].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        others = torch.cat((heads[:, :start], heads[:, rotated.stop :]), 1)
        joined = torch.cat((pairs, others), 1).flatten(0, 1)
        return joined.mT if self.columns else joined


@dataclass(frozen=True)
class HuggingFaceTensor:
    """A tensor of a Hugging Face model: the parts that are stacked in it.

    Attributes:
        transposed: Whether its matrices are.
        matrices: Number of matrices, each of as many parts, along a first dim that others do not
            have; 1 if a vector has one.
        zeros: Shape of a tensor of zeros, which has no parts: it is written, and what a folder has
            under this name is not read.
        constant: A number in place of these zeros, which a folder must have.
        inner: Dims after the first one of a tensor whose parts are vectors.
        unread: Rows of zeros before the parts, which are not read.
        experts: How many there are, if it has numbers of experts, of which ours has digits; else 0.
    """

    name: str
    parts: tuple[TensorPart, ...]
    transposed: bool = False
    matrices: int = 0
    zeros: tuple[int, ...] | None = None
    inner: tuple[int, ...] = ()
    unread: int = 0
    constant: float = 0.0
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        if self.zeros is not None:
            return self.zeros
        if self.experts:
            return self.parts[0].box.shape[:-1]
        rows = sum(part.rows for part in self.parts)
        if self.inner:
            return (rows // torch.Size(self.inner).numel(), *self.inner)
        columns = sum(part.box.size for part in self.parts) // rows
        rows = self.unread + rows // (self.matrices or 1)
        if self.parts[0].is_vector:
            return (self.matrices, rows) if self.matrices else (rows,)
        matrix = (columns, rows) if self.transposed else (rows, columns)
        return (self.matrices, *matrix) if self.matrices else matrix

    def join(self, boxes: Sequence[Tensor]) -> Tensor:
        """Build their tensor from the contents of our boxes, in the order of the parts."""
        if self.zeros is not None:
            return torch.full(self.zeros, self.constant)
        if self.experts:
            high, low = boxes[0].long().unbind(-1)
            return high * DIGIT + low
        rows = [part.to_hugging_face(box) for part, box in zip(self.parts, boxes, strict=True)]
        rows = [rows[0].new_zeros(self.unread, rows[0].shape[-1]), *rows] if self.unread else rows
        tensor = torch.cat(rows) if len(rows) > 1 else rows[0]
        if self.inner:
            tensor = tensor.unflatten(0, (-1, *self.inner))
        if self.matrices:
            tensor = tensor.unflatten(0, (self.matrices, -1))
        return (tensor.mT if self.transposed else tensor).contiguous()

    def split(self, tensor: Tensor) -> Iterator[tuple[TensorPart, Tensor]]:
        """Split their tensor into the contents of our boxes. Its number of rows must match the
        parts; otherwise torch raises RuntimeError."""
        if self.experts:
            yield self.parts[0], self._split_numbers(tensor)
            return
        rows = tensor.mT if self.transposed else tensor
        rows = rows.flatten() if self.inner else rows
        rows = rows.flatten(0, 1) if self.matrices else rows
        row_blocks = rows[self.unread :].split([part.rows for part in self.parts])
        for part, rows_of_part in zip(self.parts, row_blocks, strict=True):
            yield part, part.from_hugging_face(rows_of_part)

    def _split_numbers(self, numbers: Tensor) -> Tensor:
        low, high = numbers.aminmax()
        if low < 0 or high >= self.experts:
            wrong = int(low if low < 0 else high)
            raise UserError(
                f"{self.name} sends a token to expert {wrong}, and there are {self.experts}"
            )
        return torch.stack((numbers // DIGIT, numbers % DIGIT), -1)


def make_part(spec: ParamSpec, slices: Sequence[slice] = ()) -> TensorPart:
    """Return the part of a tensor that slices of its first dims select."""
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    for dim, where in enumerate(slices):
        start, stop, _ = where.indices(spec.shape[dim])
        offset[dim], shape[dim] = start, stop - start
    return TensorPart(spec, Box(tuple(offset), tuple(shape)))
