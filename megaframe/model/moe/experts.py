"""Experts: many MLPs as one module, each over its own rows.

Rows lie expert after expert, so each expert multiplies a slice of them; on a GPU all experts are
one grouped product. An expert without rows only gives a gradient of zero.

Shape legend: A rows as they arrive, N rows of all experts of this rank, n rows of a piece, I
inputs, O outputs, F inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.moe import MoEDescription
from megaframe.expert_parallel.transfer import ExpertRows, LocalStep
from megaframe.model.activation import activate, recompute_activation
from megaframe.model.layer_inputs import LayerSetup
from megaframe.model.moe.expert_adapters import (
    get_matrices,
    iterate_matrices,
    make_expert_adapters,
)
from megaframe.model.pass_state import PassState
from megaframe.ops.fp8 import Fp8Matmul
from megaframe.ops.matmul import multiply_into
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.axis import TensorParallel


class Experts(Module):
    """hidden -> width -> hidden in each expert."""

    def __init__(self, name: str, description: MoEDescription, setup: LayerSetup) -> None:
        """Make the matrices of all experts, which are two parameters, and two of their biases.

        Args:
            name: Of the experts in the model.
            description: What the layer declares.
            setup: How products are computed, and of how many rows.
        """
        self.tensor, self.activation = setup.tensor, description.activation
        self.scales_inputs = description.moe.scale_inputs
        self.get_row_multiple = setup.routines.get_row_multiple
        specs = description.experts
        self.up, *up_bias = map(Parameter, specs.up.declare_own_parameters(f"{name}.up"))
        self.up_adapters = make_expert_adapters(f"{name}.up", specs.up)
        self.down, *down_bias = map(Parameter, specs.down.declare_own_parameters(f"{name}.down"))
        self.down_adapters = make_expert_adapters(f"{name}.down", specs.down)
        self.up_bias: Parameter | None = up_bias[0] if up_bias else None
        self.down_bias: Parameter | None = down_bias[0] if down_bias else None

    def __call__(
        self,
        x_AH: Tensor,
        gates_N: Tensor,
        last: LocalStep,
        expert_rows: ExpertRows,
        state: PassState,
    ) -> Tensor:
        """Apply the experts.

        Args:
            x_AH: Rows as they arrive, [A, hidden].
            gates_N: Weights of the rows of each expert.
            last: Brings the rows to their experts, and sums them on the way back.
            expert_rows: Which rows each expert has.
            state: Of the microbatch's pass.

        Returns:
            The outputs times the gates, or those of the inputs times the gates, summed over the
            experts of each arriving row, [A, hidden].
        """
        return _Experts.apply(x_AH, gates_N, self, last, expert_rows, state)


class _Experts(torch.autograd.Function):
    """Computes slice by slice, from the rows of a slice to the gradients of its matrices. Keeps
    only the results of the first product, from which the backward pass computes the rest again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_AH: Tensor,
        gates_N: Tensor,
        experts: Experts,
        last: LocalStep,
        expert_rows: ExpertRows,
        state: PassState,
    ) -> Tensor:
        up_EOH, down_EHF = get_matrices(experts.up), get_matrices(experts.down)
        slices, scaled = (
            _divide(x_AH, up_EOH, down_EHF, expert_rows, experts),
            experts.scales_inputs,
        )
        y_NH, ups = _allocate_rows(slices, gates_N, x_AH, state), []
        # Slice by slice, so that intermediate results stay in cache.
        for piece in slices:
            gates_n1, out_nH = piece.select_gates(gates_N), y_NH[piece.computed_rows]
            x_nH = last.forward_slice(x_AH, piece.rows, piece.copies)
            x_nH = x_nH.mul_(gates_n1) if scaled else x_nH
            up = piece.multiply(x_nH, up_EOH[piece.experts])
            if experts.up_bias is not None:
                up += piece.select_bias(experts.up_bias, len(up))
            for adapter in experts.up_adapters:
                adapter.add_to(up, x_nH, piece)
            active = activate(experts.activation, up, experts.tensor.kernels)
            # Gates are multiplied in before the second product. The outputs of experts then only
            # have to be summed, and are not kept.
            active = active if scaled else active.mul_(gates_n1)
            piece.multiply_into(out_nH, active, down_EHF[piece.experts])
            for adapter in experts.down_adapters:
                adapter.add_to(out_nH, active, piece)
            if experts.down_bias is not None:
                columns = _find_columns(experts.down_bias)
                bias = piece.select_bias(experts.down_bias, len(out_nH))
                weights_n1 = torch.ones_like(gates_n1) if scaled else gates_n1
                out_nH[:, columns].addcmul_(weights_n1, bias)
            ups.append(up)
        ctx.save_for_backward(x_AH, gates_N, *ups)
        ctx.experts, ctx.last, ctx.state, ctx.slices = experts, last, state, slices
        return last.transpose(y_NH[: len(gates_N)]).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_AH, gates_N, *ups), dy_AH = ctx.saved_tensors, gradients[0]
        experts, last, state = ctx.experts, ctx.last, ctx.state
        scaled = experts.scales_inputs
        up_EOH, down_EHF = get_matrices(experts.up), get_matrices(experts.down)
        dx_NH = _allocate_rows(ctx.slices, gates_N, x_AH, state)
        dgates_N = torch.empty_like(gates_N)
        for piece, up in zip(ctx.slices, ups, strict=True):
            dy_nH = last.forward_slice(dy_AH, piece.rows, piece.copies)
            if scaled:  # elsewhere gates of zero keep copies out of all gradients
                dy_nH[len(dy_nH) - piece.copies :] = 0
            d_inner = piece.compute_input_gradient(dy_nH, down_EHF[piece.experts])
            d_lows = [a.add_input_gradient(d_inner, dy_nH, piece) for a in experts.down_adapters]
            active, activation_backward = recompute_activation(
                experts.activation, up, experts.tensor.kernels
            )
            gates_n1, dx_nH = piece.select_gates(gates_N), dx_NH[piece.computed_rows]
            if not scaled:
                # `d_inner` is not yet times the gates: its product with the output is their
                # gradient.
                piece.write_gate_gradient(dgates_N, d_inner, active)
            if experts.down_bias is not None:
                dy_nO = dy_nH[:, _find_columns(experts.down_bias)]
                bias = piece.select_bias(experts.down_bias, len(dy_nO))
                if not scaled:
                    piece.add_gate_gradient(dgates_N, dy_nO, bias)
                piece.add_bias_gradient(experts.down_bias, dy_nO if scaled else dy_nO * gates_n1)
            # In place: the gradient of the gates has been computed from `d_inner` above.
            d_up = activation_backward(d_inner if scaled else d_inner.mul_(gates_n1))
            if experts.up_bias is not None:
                piece.add_bias_gradient(experts.up_bias, d_up)
            inner = active if scaled else active.mul_(gates_n1)
            for adapter, d_low in zip(experts.down_adapters, d_lows, strict=True):
                adapter.add_weight_gradients(dy_nH, d_low, inner, piece, state.deferred)
            piece.write_input_gradient(dx_nH, d_up, up_EOH[piece.experts])
            d_lows = [a.add_input_gradient(dx_nH, d_up, piece) for a in experts.up_adapters]
            # Selected again: x is kept once, as it arrived, and not once per choice.
            x_nH = last.forward_slice(x_AH, piece.rows, piece.copies)
            if scaled:
                piece.write_gate_gradient(dgates_N, dx_nH, x_nH)
                dx_nH.mul_(gates_n1)
                x_nH.mul_(gates_n1)
            for adapter, d_low in zip(experts.up_adapters, d_lows, strict=True):
                adapter.add_weight_gradients(d_up, d_low, x_nH, piece, state.deferred)
            state.deferred.add(partial(piece.add_weight_gradient, experts.up, d_up, x_nH))
            state.deferred.add(partial(piece.add_weight_gradient, experts.down, dy_nH, inner))
        dx_AH = last.transpose(dx_NH[: len(gates_N)]).wait()
        return dx_AH, dgates_N, None, None, None, None


def _find_columns(bias: Parameter) -> slice:
    """Return which outputs this rank adds the biases of: of those that it shares an expert's inner
    width with, each adds some."""
    return bias.box.slices[-1]


@dataclass(frozen=True)
class _ExpertSlice:
    """Rows that are multiplied at once: those of one expert, or of all experts.

    Attributes:
        tensor: How products are computed.
        experts: Index of the expert among this rank's, or all.
        rows: The rows.
        ends: Where the rows of each expert end, int32 [E], if they are those of all.
        copies: How often the last row is computed again, to make the number of rows one that
            repeats. The copies have gates of zero, so they add zeros to all gradients. Their own
            results, zeros too, are overwritten by the next expert's or lie behind the last one's.
    """

    tensor: TensorParallel
    experts: Any
    rows: slice
    ends: Tensor | None = None
    copies: int = 0

    @property
    def computed_rows(self) -> slice:
        """Where the results go, with those of the copies."""
        return slice(self.rows.start, self.rows.stop + self.copies) if self.copies else self.rows

    def select_gates(self, gates_N: Tensor) -> Tensor:
        """Return the gates of the rows, and zeros for the copies, [n, 1]."""
        gates_n = gates_N[self.rows]
        # Padded by nothing, they would be copied.
        return (F.pad(gates_n, (0, self.copies)) if self.copies else gates_n)[:, None]

    def write_gate_gradient(self, dgates_N: Tensor, d_inner_nF: Tensor, active_nF: Tensor) -> None:
        """Write the dot product of each row, without the copies, to its gradient."""
        out_n = dgates_N[self.rows]
        torch.linalg.vecdot(d_inner_nF[: len(out_n)], active_nF[: len(out_n)], out=out_n)

    def add_gate_gradient(self, dgates_N: Tensor, dy_nO: Tensor, bias: Tensor) -> None:
        """Add what the gates weigh besides the products: the biases of the outputs."""
        out_n = dgates_N[self.rows]
        out_n += (dy_nO * bias).sum(-1)[: len(out_n)]

    def select_bias(self, bias: Parameter, rows: int) -> Tensor:
        """Return the bias of the expert, [O], or that of each row's, [n, O]."""
        bias_EO = bias.value.flatten(1)
        if self.ends is None:
            return bias_EO[self.experts]
        return bias_EO[self._find_experts(rows)]

    def add_bias_gradient(self, bias: Parameter, dy_nO: Tensor) -> None:
        """Add the sums of dy over the rows of each expert to the gradient of its bias."""
        shape = bias.box.shape
        if self.ends is None:
            bias.add(dy_nO.sum(0).view(shape[1:]), self.experts)
            return
        # As a product, whose order of additions is fixed; a scatter on a GPU would add atomically.
        rows = len(dy_nO)
        is_own_nE = F.one_hot(self._find_experts(rows), shape[0]).to(dy_nO.dtype)
        bias.add((is_own_nE.t() @ dy_nO).view(shape))

    def _find_experts(self, rows: int) -> Tensor:
        """Return the expert of each row, int64 [n]."""
        assert self.ends is not None
        places = torch.arange(rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.bucketize(places, self.ends, right=True)

    def multiply(self, x_nI: Tensor, matrix: Tensor) -> Tensor:
        """Return rows times the transposed matrix [O, I] of their expert. For all experts, matrices
        are [E, O, I]."""
        if self.ends is None:
            return self.tensor.forward_product(x_nI, matrix, None)
        if fp8 := self._get_fp8(*matrix.shape[1:]):
            return fp8.multiply_grouped(x_nI, matrix, self.ends)
        return self._multiply_grouped(x_nI, matrix)

    def multiply_into(self, out_nO: Tensor, x_nI: Tensor, matrix: Tensor) -> None:
        """Write `multiply` to `out_nO`."""
        if self.ends is None and self.tensor.fp8 is None:
            multiply_into(out_nO, x_nI, matrix.t())
        else:
            # Grouped products and those in 8 bits return memory of their own.
            out_nO.copy_(self.multiply(x_nI, matrix))

    def compute_input_gradient(self, dy_nO: Tensor, matrix: Tensor) -> Tensor:
        """Return rows times the matrix [O, I] of their expert. For all experts, matrices are [E, O,
        I]."""
        if self.ends is None:
            return self.tensor.compute_input_gradient(dy_nO, matrix)
        if fp8 := self._get_fp8(*matrix.shape[1:]):
            return fp8.compute_grouped_input_gradient(dy_nO, matrix, self.ends)
        return self._multiply_grouped(dy_nO, matrix.mT)

    def write_input_gradient(self, out_nI: Tensor, dy_nO: Tensor, matrix: Tensor) -> None:
        """Write `compute_input_gradient` to `out_nI`."""
        if self.ends is None and self.tensor.fp8 is None:
            multiply_into(out_nI, dy_nO, matrix)
        else:
            out_nI.copy_(self.compute_input_gradient(dy_nO, matrix))

    def add_weight_gradient(self, weight: Parameter, dy_nO: Tensor, x_nI: Tensor) -> None:
        """Add dy^T x to the gradient of the expert's matrix, or of all experts' matrices."""
        if self.ends is None:
            self.tensor.add_weight_gradient(weight, dy_nO, x_nI, of=self.experts)
        elif fp8 := self._get_fp8(dy_nO.shape[1], x_nI.shape[1]):
            weight.add_with(partial(fp8.compute_grouped_gradient, dy_nO, x_nI, self.ends))
        else:
            weight.add_grouped(dy_nO, x_nI, self.ends, self.tensor.kernels)

    def _get_fp8(self, *widths: int) -> Fp8Matmul | None:
        """Return what multiplies by a matrix of these dims in 8 bits, or None."""
        fp8 = self.tensor.fp8
        return fp8 if fp8 is not None and fp8.supports(*widths) else None

    def _multiply_grouped(self, rows: Tensor, matrices_ENK: Tensor) -> Tensor:
        operands = rows, matrices_ENK, self.ends
        if kernel := self.tensor.kernels.find("grouped_product", *operands):
            return kernel(*operands)
        return F.grouped_mm(rows, matrices_ENK.mT, offs=self.ends)


def _divide(
    x_AH: Tensor, up: Tensor, down: Tensor, expert_rows: ExpertRows, experts: Experts
) -> list[_ExpertSlice]:
    """Return all rows as one slice if that can be multiplied at once, else those of each expert
    that has any."""
    tensor, adapters = experts.tensor, (*experts.up_adapters, *experts.down_adapters)
    if all(
        _can_multiply_at_once(x_AH, matrices, expert_rows.ends_E, tensor)
        for matrices in (up, down, *iterate_matrices(adapters))
    ):
        return [_ExpertSlice(tensor, slice(None), slice(None), expert_rows.ends_E)]
    slices, start, multiple = [], 0, experts.get_row_multiple(x_AH)
    # The host needs the counts, and may wait for them, only if experts are multiplied one by one.
    for expert, count in enumerate(expert_rows.read_counts()):
        if count:
            rows, copies = slice(start, start + count), -count % multiple
            slices.append(_ExpertSlice(tensor, expert, rows, copies=copies))
        start += count
    return slices


def _allocate_rows(
    slices: Sequence[_ExpertSlice], gates_N: Tensor, x_AH: Tensor, state: PassState
) -> Tensor:
    """Return memory for a result of each row, and behind them for those of the last slice's copies.
    It is the workspace's, and valid until the next layer asks for memory: `last.transpose` has read
    it by then."""
    copies = slices[-1].copies if slices else 0
    return state.workspace.allocate_rows(len(gates_N) + copies, x_AH)


def _can_multiply_at_once(
    x: Tensor, matrices_EOI: Tensor, ends_E: Tensor, tensor: TensorParallel
) -> bool:
    """Return whether rows like `x` can be multiplied by all these matrices in one product."""
    widths = matrices_EOI.shape[1:]
    if tensor.fp8 is not None and tensor.fp8.supports(*widths):
        return tensor.fp8.can_group(x, ends_E)
    if can_group(x, *widths):
        return True
    return tensor.kernels.find("grouped_product", x, matrices_EOI, ends_E) is not None


def can_group(x: Tensor, *widths: int) -> bool:
    """Return whether torch can multiply all experts in one product on rows of these widths and of
    the type of `x`, faster than one by one. It can on a GPU if each row is a multiple of 16 bytes,
    except in fp64."""
    aligned = all(width * x.element_size() % 16 == 0 for width in widths)
    return x.is_cuda and aligned and x.dtype is not torch.float64
