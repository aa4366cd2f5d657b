"""Products of one rank: their sizes, and the memory that those in 8 bits take while they run.

The same arithmetic serves a single run and arrays of layouts, so nothing here branches on a size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.architecture.eight_bit_products import (
    BLOCK,
    Scaling,
    count_scales,
    get_width_step,
)
from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec, RepeatedLinearSpec
from megaframe.architecture.model_blocks import describe_block
from megaframe.config.model import ModelConfig
from megaframe.config.schema import TrainConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.planner.layout_sizes import LayoutSizes

Number = Any
"""A float, or a numpy array of them."""
_SCALE_BYTES = 4


@dataclass(frozen=True)
class ProductSizes:
    """The sizes that products depend on, under their names in `LayoutSizes`, which has them too."""

    tensor: Number
    context: Number
    expert: Number
    expert_tensor: Number
    microbatch: Number


def compute_local_product(
    sizes: ProductSizes | LayoutSizes, seq: int, linear: LinearSpec
) -> tuple[Number, Number, Number, Number]:
    """Return the products of a linear layer that one rank computes for a microbatch: their number,
    and rows, results and terms of each. Experts are assumed to be equally loaded.

    Args:
        sizes: Of the layout.
        seq: Tokens of a sample.
        linear: The layer.
    """
    tokens = sizes.microbatch * seq / sizes.context
    rows, groups, divided_by = tokens, 1.0, sizes.tensor
    if isinstance(linear, GroupedLinearSpec):
        groups = np.maximum(1.0, linear.experts / sizes.expert)
        # Rows per expert: those of all ranks that send to this one, spread over all experts.
        choices = tokens / sizes.tensor * linear.top_k
        rows = choices * sizes.expert * sizes.expert_tensor / linear.experts
        divided_by = sizes.expert_tensor
    elif linear.split is None and not isinstance(linear, RepeatedLinearSpec):
        rows = tokens / sizes.tensor  # a rank multiplies its own rows
    return groups, rows, *linear.compute_local_sizes(divided_by)


def compute_eight_bit_bytes(
    model: ModelConfig, train: TrainConfig, sizes: ProductSizes | LayoutSizes
) -> Number:
    """Return the most bytes that exist while a backward pass multiplies in 8 bits: the gradients of
    a linear layer's results and inputs, the 8-bit copies of the operands with their scales, and
    results that are added to a gradient or copied afterwards. 0 without `train.fp8`.

    A forward pass needs less, because its rows and results are kept activations.

    Args:
        model: The section `model`.
        train: The section `train`.
        sizes: Of the layout, or of many.
    """
    if train.fp8 == "none" or model.emulate is not None:
        return 0.0
    kinds = dict.fromkeys(describe_block(model, layer) for layer in range(model.layers))
    linears = [linear for block in kinds for linear in block.linears]
    width, step = DTYPE_BYTES[train.precision], get_width_step(train.fp8)
    most: Number = 0.0
    for linear in linears:
        groups, rows, outputs, inputs = compute_local_product(sizes, train.seq, linear)
        gradients = width * groups * rows * (outputs + inputs)
        compute = (
            compute_grouped_copies if isinstance(linear, GroupedLinearSpec) else _compute_copies
        )
        needed = gradients + compute(train.fp8, width, groups, rows, outputs, inputs)
        is_multiplied_so = (outputs % step == 0) & (inputs % step == 0)
        most = np.maximum(most, np.where(is_multiplied_so, needed, 0.0))
    return most


def _compute_copies(
    scaling: Scaling, width: int, groups: Number, rows: Number, outputs: Number, inputs: Number
) -> Number:
    """Return the bytes of both operands in 8 bits, and of the weight gradient before it is added;
    of the product of the backward pass that takes more."""
    matrix = outputs * inputs
    scales = count_scales(scaling, rows, outputs)
    scales = scales + count_scales(scaling, inputs, outputs, matrix=True)
    input_gradient = rows * outputs + matrix + _SCALE_BYTES * scales
    # Tokens are summed, so both operands are rows of tokens, transposed.
    scales = count_scales(scaling, outputs, rows) + count_scales(scaling, inputs, rows)
    weight_gradient = rows * (outputs + inputs) + width * matrix + _SCALE_BYTES * scales
    return groups * np.maximum(input_gradient, weight_gradient)


def compute_grouped_copies(
    scaling: Scaling, width: int, groups: Number, rows: Number, outputs: Number, inputs: Number
) -> Number:
    """Return the same for the products of all experts at once, which add weight gradients
    themselves. Their results are copied to where rows are sent back from."""
    places, matrices = groups * rows, groups * outputs * inputs
    # Experts have scales of their own, which are written for each row (ops/fp8.py).
    apart: Scaling = "row" if scaling == "tensor" else scaling
    scales = count_scales(apart, places, outputs)
    scales = scales + groups * count_scales(apart, inputs, outputs, matrix=True)
    # Scales of square blocks are made before the matrices are transposed, as a copy.
    made = 2 if scaling == "block" else 1
    input_gradient = places * outputs + made * matrices + _SCALE_BYTES * scales
    # Columns of each expert start at a multiple of a block.
    spaced = BLOCK * (-(-places // BLOCK) + groups)
    of_column = spaced / BLOCK if scaling == "block" else groups
    weight_gradient = (spaced + _SCALE_BYTES * of_column) * (outputs + inputs)
    return np.maximum(input_gradient + width * places * inputs, weight_gradient)
