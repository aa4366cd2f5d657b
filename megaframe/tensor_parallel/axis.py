"""What layers that are divided over the tensor ranks need to know of the run, and of the rows that
each rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megaframe.distributed.collectives import ALONE, Group
from megaframe.ops.fp8 import Fp8Matmul
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.ops.matmul import multiply
from megaframe.parameters.parameter import Parameter


@dataclass(frozen=True)
class TensorParallel:
    """What a run fixes for its matrix products.

    Attributes:
        group: The ranks that divide matrices, and the rows between them.
        chunks: Number of parts in which rows travel between these ranks.
        symmetric: Whether the forward pass uses torch's fused products and transfers
            (`tensor_parallel/symmetric_memory.py`).
        recompute: Whether norms and activations before a product are recomputed in the backward
            pass instead of kept.
        kernels: Fast kernels that replace plain code.
        fp8: Multiplies in 8 bits in linears and experts; None if nothing does.
    """

    group: Group = ALONE
    chunks: int = 1
    symmetric: bool = False
    recompute: bool = False
    kernels: Kernels = NO_KERNELS
    fp8: Fp8Matmul | None = None

    def forward_product(self, x_TI: Tensor, matrix_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T plus the bias, [T, O].

        Args:
            x_TI: Rows.
            matrix_OI: The weight.
            bias_O: The bias; None for none.
        """
        if self.fp8 is None or not self.fp8.supports(*matrix_OI.shape):
            return multiply(x_TI, matrix_OI.t(), bias_O)
        y_TO = self.fp8.multiply(x_TI, matrix_OI, gradient=False, matrix=True)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def compute_input_gradient(self, dy_TO: Tensor, matrix_OI: Tensor) -> Tensor:
        """Return dy W, [T, I]."""
        if self.fp8 is None or not self.fp8.supports(*matrix_OI.shape):
            return multiply(dy_TO, matrix_OI)
        return self.fp8.multiply(dy_TO, matrix_OI.t(), gradient=True, matrix=True)

    def add_weight_gradient(
        self, weight: Parameter, dy_TO: Tensor, x_TI: Tensor, of: int | None = None
    ) -> None:
        """Add dy^T x to the gradient of a weight.

        Args:
            weight: The weight, [O, I] or several such matrices along dim 0.
            dy_TO: Gradient of the outputs, [T, O].
            x_TI: The inputs, [T, I].
            of: Index along dim 0 of the only matrix to add to; None if the weight is one matrix.
        """
        if self.fp8 is None or not self.fp8.supports(dy_TO.shape[1], x_TI.shape[1]):
            weight.add_product(dy_TO, x_TI, matrix=of)
        elif not weight.frozen:
            # Products in 8 bits return memory of their own, which is added to the gradient after.
            shape = weight.box.shape if of is None else weight.box.shape[1:]
            weight.add(self.fp8.compute_weight_gradient(dy_TO, x_TI).view(shape), of)


@dataclass(frozen=True)
class RowPartition:
    """Which rows of the residual stream this tensor rank has (sequence parallelism, Korthikanti et
    al. 2022).

    Outside of matrix products the stream is [rows, hidden]: the tokens of all samples, one sample
    after the other, divided over the tensor ranks in equal parts.

    Attributes:
        tokens: Tokens of the microbatch on this context rank.
        ranks: Number of tensor ranks.
        index: Index of this rank among them.
    """

    tokens: int
    ranks: int = 1
    index: int = 0

    @property
    def padded(self) -> int:
        """Rows of all tensor ranks together, including padding."""
        return count_rows_per_rank(self.tokens, self.ranks) * self.ranks

    def pad(self, x_T: Tensor, value: float = 0) -> Tensor:
        """Pad [tokens, ...] with `value` to [padded, ...]."""
        if self.ranks == 1:
            return x_T
        # The last rows are padding that nothing reads; they only make the parts equal.
        padding = self.padded - self.tokens
        if not padding:
            return x_T
        return F.pad(x_T, (0, 0) * (x_T.dim() - 1) + (0, padding), value=value)

    def remove_padding(self, x_T: Tensor) -> Tensor:
        """Return the rows [tokens, ...] of [padded, ...]."""
        # Without padding this is the tensor itself: the gradient of a slice would be copied into
        # zeros of the whole size.
        return x_T if len(x_T) == self.tokens else x_T[: self.tokens]

    def select(self, x_T: Tensor, value: float = 0) -> Tensor:
        """Return this rank's rows [rows, ...] of [tokens, ...], padded with `value`."""
        # Without communication: every tensor rank has the ids and labels of all tokens.
        return self.pad(x_T, value).chunk(self.ranks)[self.index]


def count_rows_per_rank(tokens: int, ranks: int) -> int:
    """Return how many rows each of `ranks` tensor ranks has of `tokens` tokens."""
    return -(-tokens // ranks)
