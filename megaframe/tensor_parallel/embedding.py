"""Token and learned position embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.embedding import TableDescription
from megaframe.distributed.collectives import Group, all_gather, reduce_scatter
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.axis import RowPartition


class EmbeddingTable(Module):
    """A table whose rows are looked up by number. The backward pass adds rows directly to the
    gradient bucket."""

    def __init__(self, name: str, description: TableDescription, tensor: Group) -> None:
        """Make the table.

        Args:
            name: Of the table in the model.
            description: What it declares.
            tensor: The tensor ranks.
        """
        (self.weight,) = map(Parameter, description.declare_parameters(name))
        self.split, self.tensor = description.split, tensor

    def __call__(self, index_T: Tensor, rows: RowPartition) -> Tensor:
        """Look up the rows of all tokens.

        If the table is split, each rank looks up all tokens in its own part, and the sum is
        reduce-scattered. If every rank has the whole table, each looks up its own rows only.

        Args:
            index_T: Row numbers, int64 [tokens].
            rows: Which rows of the result this rank has.

        Returns:
            This rank's rows, [rows, width].
        """
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        if self.split and self.tensor.size > 1:
            return _SplitLookup.apply(anchor, rows.pad(index_T), self.weight, self.tensor)
        return _Lookup.apply(anchor, rows.select(index_T), self.weight)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, index: Tensor, weight: Parameter) -> Tensor:
        # `anchor` is an empty tensor that requires a gradient. Without it autograd would not call
        # backward, because it tracks neither the index nor the weight.
        ctx.save_for_backward(index)
        ctx.weight = weight
        return F.embedding(index, weight.value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (index,) = ctx.saved_tensors
        ctx.weight.add_rows(index.reshape(-1), gradients[0].reshape(-1, gradients[0].shape[-1]))
        return None, None, None


class _SplitLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, index: Tensor, weight: Parameter, tensor: Group
    ) -> Tensor:
        local = index - weight.box.offset[0]
        outside = (local < 0) | (local >= weight.value.shape[0])
        local = local.masked_fill(outside, 0)
        ctx.save_for_backward(local, outside)
        ctx.weight, ctx.tensor = weight, tensor
        # Exactly one rank has the row of a token and all others add zeros, so the sum rounds
        # nothing.
        part = F.embedding(local, weight.value).masked_fill_(outside[:, None], 0)
        return reduce_scatter(part, tensor).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        local, outside = ctx.saved_tensors
        rows = all_gather(gradients[0], ctx.tensor).wait()
        # Other ranks' rows add zeros. Leaving them out would make the host wait for their number.
        ctx.weight.add_rows(local, rows.masked_fill(outside[:, None], 0))
        return None, None, None, None
