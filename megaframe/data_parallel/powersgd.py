"""PowerSGD: matrices travel as two thin factors (Vogels, Karimireddy and Jaggi 2019).

Factors are summed like any gradient, so every rank ends with the same sum. What is compressed are
the boxes that a span has of each matrix: the boundary of a rank's part cuts a matrix into whole
rows, whose matrix rank is no higher than that of the whole. It therefore works at every ZeRO stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaframe.data_parallel.gradient_reducer import GradientReducer, Transfers
from megaframe.distributed.collectives import Group, all_reduce

Views = Callable[[Tensor], Sequence[Tensor]]
"""Returns what a flat span has of each parameter, in boxes, as views."""


class PowerSGDReducer(GradientReducer):
    """Sends two factors of `rank` columns for each box that becomes smaller by this, and other
    boxes unchanged.

    Each sum does one power iteration, which starts from the factor of the previous sum, so that it
    follows the directions of the gradients over the steps.
    """

    def __init__(self, group: Group, residual: Tensor, views: Views, rank: int) -> None:
        """Draw the first factors, equal on all ranks.

        Args:
            group: The ranks that sum.
            residual: Zeros, as long as the span.
            views: Returns what a span has of each parameter.
            rank: Columns of a factor.
        """
        super().__init__(group)
        self._residual, self._views, self._rank = residual, views, rank
        columns = [rank * matrix.shape[1] for matrix in self._split(residual)[0]]
        # The same seed everywhere: P = M Q can be summed over ranks only if all have the same Q.
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(sum(columns), generator=generator, dtype=torch.float64)
        directions = directions.to(residual)
        # Views of `directions`, so that a checkpoint holds one tensor, which later steps change in
        # place.
        self._right = [flat.view(-1, rank) for flat in directions.split(columns)]
        self.state["residual"] = residual
        if columns:
            self.state["directions"] = directions

    def sum(self, flat: Tensor) -> Transfers:
        # Error feedback: this step sends what is new plus what earlier steps left out.
        self._residual.add_(flat)
        (owed, owed_plain), (sums, sums_plain) = self._split(self._residual), self._split(flat)
        # P = M Q of each matrix. Boxes that factors would not make smaller travel whole along with
        # P.
        left_factors = [matrix @ right for matrix, right in zip(owed, self._right, strict=True)]
        first = _Packed([*left_factors, *owed_plain], flat)
        yield all_reduce(first.flat, self.group)
        # All ranks orthogonalise the same sum, so they get the same basis.
        bases = [torch.linalg.qr(factor).Q for factor in first.parts[: len(left_factors)]]
        own_right = [matrix.t() @ base for matrix, base in zip(owed, bases, strict=True)]
        second = _Packed(own_right, flat)
        if own_right:
            yield all_reduce(second.flat, self.group)
        for target, residual, total in zip(
            sums_plain, owed_plain, first.parts[len(left_factors) :], strict=True
        ):
            target.copy_(total)
            residual.zero_()
        for number, base in enumerate(bases):
            right = second.parts[number]
            torch.mm(base, right.t(), out=sums[number])
            # Minus this rank's own projection, not minus the mean: the sum of what is kept is the
            # same, and the residuals stay small.
            owed[number].sub_(base @ own_right[number].t())
            # A step that is not finite is skipped, and its directions must not be kept.
            next_right = torch.where(right.isfinite().all(), right, self._right[number])
            self._right[number].copy_(next_right)
        # A skipped step must not pass on what is not finite.
        self._residual.nan_to_num_(0.0, 0.0, 0.0)

    def sum_part(self, flat: Tensor) -> Transfers:
        yield from self.sum(flat)

    def _split(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the boxes of a span that are compressed, as matrices, and the others."""
        matrices = [as_matrix(box) for box in self._views(flat)]
        uncompressed = [is_sent_uncompressed(matrix.shape, self._rank) for matrix in matrices]
        return (
            [matrix for matrix, plain in zip(matrices, uncompressed, strict=True) if not plain],
            [matrix for matrix, plain in zip(matrices, uncompressed, strict=True) if plain],
        )


class _Packed:
    """Copies of tensors in one flat buffer, on the device of `like`. parts: views of it in the
    shapes of the tensors."""

    def __init__(self, tensors: Sequence[Tensor], like: Tensor) -> None:
        flat = [tensor.flatten() for tensor in tensors]
        self.flat = torch.cat(flat) if flat else like.new_empty(0)
        split = self.flat.split([tensor.numel() for tensor in tensors])
        self.parts = [x.view(tensor.shape) for x, tensor in zip(split, tensors, strict=False)]


def as_matrix(box: Tensor) -> Tensor:
    """View a box as a matrix, with its dims split where rows plus columns are fewest: for a weight,
    between the dims of its outputs and those of its inputs."""
    shape = box.shape
    splits = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(len(shape) + 1)]
    return box.view(min(splits, key=sum))


def is_sent_uncompressed(shape: Sequence[int], rank: int) -> bool:
    """Return whether two factors of `rank` columns are no smaller than a matrix of this shape."""
    rows, columns = shape
    return rank * (rows + columns) >= rows * columns
