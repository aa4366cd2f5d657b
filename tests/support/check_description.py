"""Checks that descriptions of layers tell the truth: builds the torch layers of a config on this
rank, measures what they have and do, and compares it with what their descriptions say.

Parameters, bytes kept for backward, FLOPs and traffic are compared exactly. `check_descriptions`
is the whole of it on one rank; on several, each calls `measure_blocks`, and `find_lies` compares
what all of them return.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megaframe.architecture.block import BlockDescription, describe_block
from megaframe.architecture.layer import LayerDescription, MixerDescription
from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec
from megaframe.architecture.spec import ParamSpec
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import barrier
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.model import attention
from megaframe.ops.autograd import backward
from megaframe.tensor_parallel.deferred_gradients import DeferredGradientQueue
from megaframe.training.train_step import TrainStep

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class LayerMeasurement:
    """What one rank measures of a layer or block, for one microbatch.

    Attributes:
        parameters: The specs of the parameters that the layer has, with the shape of this rank's
            part.
        saved_bytes: Bytes of the storages that its forward pass keeps for the backward pass,
            without its input, its output, weights and tables of rotation.
        weight_pass_bytes: Bytes of the storages that a backward pass leaves for a separate weight
            pass.
        flops: FLOPs of the products of the forward pass, with all scores of attention.
        forward_bytes: Bytes over the tensor axis in the forward pass.
        backward_bytes: And in the backward pass.
        split_bytes: In a backward pass without weight gradients, and the weight pass after it.
    """

    parameters: dict[str, tuple[ParamSpec, tuple[int, ...]]]
    saved_bytes: int
    weight_pass_bytes: int
    flops: int
    forward_bytes: int
    backward_bytes: int
    split_bytes: int


@dataclass(frozen=True)
class Lie:
    """A number of a description that is not what the layer does.

    Attributes:
        layer: Name of the layer in the model, and the class of its description.
        what: What the number is of.
        described: The number of the description.
        measured: That of the layer.
        place: The lines of the description that say it.
    """

    layer: str
    what: str
    described: object
    measured: object
    place: str

    def __str__(self) -> str:
        return (
            f"{self.layer}: {self.what}: described {self.described}, measured {self.measured}; "
            f"see {self.place}"
        )


def check_descriptions(config: RunConfig) -> None:
    """Compare the descriptions of a config's blocks with their layers, on this rank alone.

    Raises:
        AssertionError: A description is not exact; names layers, numbers and lines.
    """
    lies = find_lies(config, [measure_blocks(config)])
    assert not lies, "\n".join(map(str, lies))


def measure_blocks(config: RunConfig) -> dict[str, LayerMeasurement]:
    """Return what this rank measures of every block and of its layers, by name. All ranks of
    `config.parallel` call this together."""
    layout = Layout.from_parallel(config.parallel, read_world_size())
    mesh = Mesh(layout, device="cpu", timeout=60)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    stage = train_step.stages[0]
    shape = (config.train.microbatch, config.train.seq)
    tokens = torch.zeros(shape, dtype=torch.int64)
    microbatch = Microbatch(tokens, tokens, torch.arange(len(tokens)))
    scale = torch.ones((), dtype=torch.float64)
    context = stage._make_context(microbatch, scale=scale)
    weights = [bucket.parameters[0].value for bucket in train_step.sharded_parameters.buckets]
    tables = [table for rotary in context.rotary.values() for table in (rotary.cos, rotary.sin)]
    measurements = {}
    for number, block in enumerate(stage.blocks):
        description = describe_block(config.model, number)

        def run_mixer(x, state, block=block):
            return block.attention(x, None, context, state)

        def run_feed_forward(x, state, block=block):
            return block.mlp(x, None, context, state)

        def run_block(x, state, block=block):
            return block(x, context, state)

        for part, module, run in (
            (description.mixer, block.attention, run_mixer),
            (description.feed_forward, block.mlp, run_feed_forward),
            (description, block, run_block),
        ):
            measurements[_name_part(number, part)] = _measure(
                train_step, mesh.group("tensor"), context.rows, module, run, weights, tables
            )
    barrier(mesh.world)  # no rank closes connections that others use
    mesh.close()
    return measurements


def _measure(train_step, tensor, rows, module, run, weights, tables) -> LayerMeasurement:
    stage = train_step.stages[0]
    train_step.sharded_parameters.start_step()
    weights = {value.untyped_storage().data_ptr() for value in weights}
    known_storages = weights | {table.untyped_storage().data_ptr() for table in tables}
    table_shapes = {table.shape for table in tables}  # also of the negated table for backward
    storages = {}

    def keep(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in known_storages and value.numel() and value.dim():
            storages[storage.data_ptr()] = (storage.nbytes(), value)
        return value

    def make_leaf():
        leaf = torch.randn(rows.padded // rows.ranks, stage.config.model.hidden)
        return leaf.to(stage.precision.compute).requires_grad_()

    leaf, state = make_leaf(), stage._make_pass_state()
    known_storages.add(leaf.untyped_storage().data_ptr())
    tensor.traffic.take()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        output = run(leaf, state)
    forward_bytes, _ = tensor.traffic.take()
    storages.pop(output.untyped_storage().data_ptr(), None)
    saved_bytes = sum(size for size, value in storages.values() if value.shape not in table_shapes)
    backward(output, torch.randn_like(output))
    backward_bytes, _ = tensor.traffic.take()

    with FlopCounterMode(display=False) as counter, compute_all_scores():
        state = stage._make_pass_state()
        output = run(make_leaf(), state)
        flops = counter.get_total_flops()
    tensor.traffic.take()
    state.deferred.deferring = True
    backward(output, torch.randn_like(output))
    deferred = state.deferred.take()
    weight_pass_bytes = sum(
        size for storage, size in _find_storages(deferred).items() if storage not in weights
    )
    queue = DeferredGradientQueue(deferred)
    for _ in deferred:
        queue.compute_next()
    split_bytes, _ = tensor.traffic.take()
    parameters = {
        parameter.spec.name: (parameter.spec, tuple(parameter.value.shape))
        for parameter in module.parameters()
    }
    return LayerMeasurement(
        parameters,
        saved_bytes,
        weight_pass_bytes,
        flops,
        forward_bytes,
        backward_bytes,
        split_bytes,
    )


def _find_storages(deferred: Any) -> dict[int, int]:
    """Return the bytes of all storages that deferred weight gradients keep, by address."""
    storages: dict[int, int] = {}
    remaining = [deferred]
    while remaining:
        value = remaining.pop()
        if isinstance(value, torch.Tensor):
            if value.dim():
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (tuple, list)):
            remaining += value
        elif isinstance(value, partial):
            remaining += [value.func, *value.args, *value.keywords.values()]
        elif inspect.isfunction(value):
            remaining += [cell.cell_contents for cell in value.__closure__ or ()]
    return storages


@contextmanager
def compute_all_scores():
    """Within it attention multiplies all queries with all keys, so that its FLOPs do not depend on
    tiles and padding of this machine's kernels."""

    def attend_to_all(query_BSND, key_BSGD, value_BSGV, mask, scale, softcap, sinks_N):
        # A softcap and sinks add no products.
        out_BNSV = F.scaled_dot_product_attention(
            query_BSND.transpose(1, 2),
            key_BSGD.transpose(1, 2),
            value_BSGV.transpose(1, 2),
            is_causal=True,
            scale=scale,
            enable_gqa=query_BSND.shape[2] > key_BSGD.shape[2],
        )
        return out_BNSV.transpose(1, 2)

    attend_locally = attention._attend_locally
    attention._attend_locally = attend_to_all
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        attention._attend_locally = attend_locally


def find_lies(
    config: RunConfig, measured_by_rank: Sequence[Mapping[str, LayerMeasurement]]
) -> list[Lie]:
    """Return where descriptions differ from what the ranks of the tensor axis measured. Both are
    summed over these ranks. config: has an even share of tokens for each rank."""
    lies = []
    for layer in range(config.model.layers):
        block = describe_block(config.model, layer)
        for part in (block.mixer, block.feed_forward, block):
            name = _name_part(layer, part)
            measured = [measurements[name] for measurements in measured_by_rank]
            lies += _compare(config, name, part, measured)
    return lies


def _compare(
    config: RunConfig,
    name: str,
    part: LayerDescription | BlockDescription,
    measured: Sequence[LayerMeasurement],
) -> list[Lie]:
    tensor, train = len(measured), config.train
    tokens, width = train.microbatch * train.seq, DTYPE_BYTES[train.precision]
    title = f"{name} ({type(part).__name__})"
    lies = []

    def compare(what: str, described: object, actual: object, *members: str) -> None:
        if described != actual:
            place = ", ".join(_locate(part, member) for member in members)
            lies.append(Lie(title, what, described, actual, place))

    described_specs = {spec.name: spec for spec in part.declare_parameters(name)}
    for rank, measurement in enumerate(measured):
        has = {key: spec for key, (spec, _) in measurement.parameters.items()}
        members = ("parts" if isinstance(part, LayerDescription) else "first_half",)
        on_rank = f" on tensor rank {rank}" if tensor > 1 else ""
        compare(f"names of parameters{on_rank}", [*described_specs], [*has], *members)
        for key, spec in described_specs.items():
            if key in has:
                compare(f"parameter {key}{on_rank}", spec, has[key], *members)
                shape = measurement.parameters[key][1]
                compare(
                    f"shape of {key}{on_rank}", _find_shape(spec, rank, tensor), shape, *members
                )

    saved = part.count_saved(config.parallel, train.recompute).count_bytes(width)
    compare(
        f"bytes kept for backward with recompute={train.recompute}, {train.precision}",
        round(saved * tokens),
        sum(measurement.saved_bytes for measurement in measured),
        "count_saved",
    )
    left = part.count_saved_for_weights(config.parallel, train.recompute).count_bytes(width)
    compare(
        f"bytes kept for a weight pass with recompute={train.recompute}, {train.precision}",
        round(left * tokens),
        sum(measurement.weight_pass_bytes for measurement in measured),
        "count_saved_for_weights",
    )
    flops = sum(2.0 * tokens * _count_elements(linear, tensor) for linear in part.linears)
    if isinstance(part, BlockDescription):
        flops += part.count_attention_flops(train.seq, causal=False) * tokens
    else:
        products = part.list_batched_products(train.seq)
        flops += sum(product.flops for product in products) * train.microbatch
    mixes = isinstance(part, MixerDescription)
    compare(
        "FLOPs of a forward pass",
        round(flops),
        sum(measurement.flops for measurement in measured),
        *(("linears", "list_batched_products") if mixes else ("linears",)),
    )
    traffic = part.tensor_traffic
    # Each rank sends its share of what is gathered to all others, and a sum takes as much twice.
    gathered = tokens * width * (tensor - 1)
    of_sum = 2 * max(4, width) * (tensor - 1)
    summed = part.count_tensor_sums(train.microbatch) * of_sum
    statistics = part.tensor_statistics * tokens * of_sum
    for what, described, actual in (
        ("forward", traffic.forward * gathered + summed + statistics, "forward_bytes"),
        ("backward", traffic.backward * gathered + statistics, "backward_bytes"),
        (
            "backward and weight",
            (traffic.backward + traffic.weight) * gathered + statistics,
            "split_bytes",
        ),
    ):
        compare(
            f"bytes over the tensor axis in the {what} pass",
            described,
            sum(getattr(measurement, actual) for measurement in measured),
            "tensor_traffic",
            "tensor_statistics",
            "count_tensor_sums",
        )
    return lies


def _count_elements(linear: LinearSpec, tensor: int) -> float:
    """Return the elements of the weight that one token is multiplied by, with what neighbouring
    ranks both have."""
    if linear.split is None or isinstance(linear, GroupedLinearSpec):
        return linear.elements
    results, terms = linear.compute_local_sizes(tensor)
    return float(results * terms * tensor)


def _find_shape(spec: ParamSpec, rank: int, tensor: int) -> tuple[int, ...]:
    alone = {"expert": 1, "expert_tensor": 1}
    coordinate = {"tensor": rank, **dict.fromkeys(alone, 0)}
    return spec.find_local_box(coordinate, {"tensor": tensor, **alone}).shape


def _name_part(layer: int, part: LayerDescription | BlockDescription) -> str:
    block = f"blocks.{layer}"
    return block if isinstance(part, BlockDescription) else f"{block}.{part.name}"


def _locate(description: Any, member: str) -> str:
    """Return the file and line in which a description's class, or one it inherits, defines a
    member."""
    for kind in type(description).__mro__:
        if member in vars(kind):
            function = vars(kind)[member]
            if isinstance(function, property):
                function = function.fget
            elif isinstance(function, cached_property):
                function = function.func
            path = Path(function.__code__.co_filename).resolve()
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            return f"{shown}:{function.__code__.co_firstlineno} ({kind.__name__}.{member})"
    raise AttributeError(f"{type(description).__name__} has no {member}")
