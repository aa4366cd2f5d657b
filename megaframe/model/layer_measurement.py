"""What a layer keeps, computes, needs and sends, measured: one rank runs it forward and backward on
tensors without content.

Nothing is assumed of the layer but that it can be built and called. So the numbers are those of its
code, and whoever brings a layer derives none of them by hand. The other ranks of the axes that
divide it are pretended (`Mesh(alone=)`); memory is what is allocated, not what autograd lists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.architecture.layer import LayerDescription, MixerDescription
from megaframe.architecture.norm import NormDescription
from megaframe.config import ModelConfig, ParallelConfig, TrainConfig
from megaframe.config.part_calls import describe_failure
from megaframe.config.parts import ActivationPart
from megaframe.context_parallel.axis import ContextParallel
from megaframe.data.microbatch import Microbatch, select_context_part
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.model.block import build_layer
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs, make_microbatch_inputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.ops.autograd import backward
from megaframe.ops.meta_tensors import MetaTensorMode
from megaframe.parameters.parameter import PRECISIONS, Module
from megaframe.tensor_parallel.axis import TensorParallel
from megaframe.tensor_parallel.deferred_gradients import DeferredGradientQueue

Operator = tuple[str, tuple[tuple[int, ...], ...]]
"""The name of an operator, and the shapes of the tensors that it is given."""


@dataclass(frozen=True)
class MeasuredProduct:
    """A product of matrices in a forward pass: `number` times [rows, terms] and [terms, outputs].

    Attributes:
        has_weight: Whether one of them is a parameter.
    """

    number: int
    rows: int
    outputs: int
    terms: int
    has_weight: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of all of them."""
        return 2 * self.number * self.rows * self.outputs * self.terms


@dataclass(frozen=True)
class MeasuredLayer:
    """What one rank measured of a layer, for one microbatch.

    Attributes:
        saved_bytes: What is allocated after the forward pass and kept for the backward pass: all
            but the layer's input, its parameters and, unless the layer keeps it, its output.
        keeps_output: Whether its output is kept.
        weight_pass_bytes: What a backward pass leaves for a separate weight pass.
        forward_peak_bytes: The most that exists at a time in the forward pass, with what it keeps
            and its output.
        backward_peak_bytes: The most in the backward pass, with what the forward pass has kept and
            the gradient of the input, but not that of the output.
        forward_flops: FLOPs of the products of the forward pass.
        backward_flops: And of the backward pass, with the weight gradients and what is recomputed.
        products: The products of matrices of the forward pass, in order.
        forward_bytes: Bytes handed to collectives in the forward pass, by axes.
        backward_bytes: And in the backward pass.
        split_bytes: In a backward pass without weight gradients, and the weight pass after it.
    """

    saved_bytes: int
    keeps_output: bool
    weight_pass_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_flops: int
    backward_flops: int
    products: tuple[MeasuredProduct, ...]
    forward_bytes: Mapping[str, int]
    backward_bytes: Mapping[str, int]
    split_bytes: Mapping[str, int]


def measure_layer(
    description: LayerDescription,
    hidden: int,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    rank: int = 0,
) -> MeasuredLayer:
    """Run the layer of a description on tensors without content, and count.

    Args:
        description: The layer. Its torch layer is built by `build_layer`.
        hidden: Width of the stream.
        parallel: The tensor and context ranks that divide it, and how; nothing else is used.
        train: `seq`, `microbatch`, `precision` and `recompute` (`full` counts as `none`, which is
            what exists while a block is recomputed).
        rank: Which of the tensor and context ranks, tensor fastest.

    Raises:
        UserError: The layer cannot be built or run, changes something that outlives a pass, or does
            not do the same twice.
    """
    layout = Layout(tensor=parallel.tensor, context=parallel.context)
    with _Counter() as counter:
        mesh = Mesh(layout, alone=rank)
        try:
            return _Passes(counter, mesh, description, hidden, parallel, train).measure()
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{_name_layer(description)} cannot be measured: "
                f"{describe_failure(description.origin, error)}; it is run on tensors without "
                "content, so it must not read values of tensors, and it must return one tensor "
                "like its input"
            ) from error


class OperationLayer(Module):
    """A norm, or an activation, as a layer of its own."""

    def __init__(self, name: str, part: NormDescription | ActivationPart) -> None:
        self.norm = Norm(name, part) if isinstance(part, NormDescription) else None
        self.part = part

    def __call__(self, x: Tensor, norm: None, inputs: MicrobatchInputs, state: PassState) -> Any:
        """Return the norm of x; or the activation, with x as gate and as up."""
        if self.norm is not None:
            return self.norm(x)
        assert isinstance(self.part, ActivationPart)
        return self.part.compute(*[x] * (1 + self.part.gated))


@dataclass
class _Record:
    """What one pass did: FLOPs, products and operators that are no views, and the names of such as
    write to what is older than the pass, and of such as draw random numbers."""

    flops: int = 0
    products: list[MeasuredProduct] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    writing: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Numbers:
    """Records of a forward and a backward pass, bytes of memory as in `MeasuredLayer`, and bytes
    sent."""

    forward: _Record
    backward: _Record
    saved: int
    keeps_output: bool
    left: int
    forward_peak: int
    backward_peak: int
    forward_bytes: Mapping[str, int]
    backward_bytes: Mapping[str, int]


class _Counter(MetaTensorMode):
    """Counts the memory, the products and the operators of passes.

    Attributes:
        record: Of the current pass.
        parameters: Storages of parameters.
        writable: Storages that are older than a pass and that it may write to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = _Record()
        self.parameters: set[int] = set()
        self.writable: set[int] = set()
        self._older: set[int] | None = None

    def start(self) -> _Record:
        """Begin a pass, and return its record."""
        self.record = _Record()
        self.mark()
        return self.record

    def has(self, storage: int) -> bool:
        """Return whether a storage exists, by its key."""
        return storage in self._known

    def protect(self) -> None:
        """From now on, notice what is written to storages that exist already."""
        self._older = {*self._known}

    def _leave(self, key: int, size: int) -> None:
        # New memory may have the address of what is freed.
        if self._older is not None:
            self._older.discard(key)
        super()._leave(key, size)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, and record it."""
        if self._older is not None:
            self._look_for_writes(func, args, kwargs)
        out = super().run(func, args, kwargs)
        record = self.record
        if not func.is_view:  # layers may keep views of their weights
            record.operators.append((str(func), _describe_shapes(args)))
        name = func._overloadpacket
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot" not in str(name):
            record.random.append(str(name))
        products = [*self._list_products(str(name), args)]
        record.products += products
        record.flops += sum(product.flops for product in products)
        if not products and (count := _get_flop_formulas().get(name)) is not None:
            record.flops += count(*args, **kwargs, out_val=out)
        return out

    def _list_products(self, name: str, args: tuple[Any, ...]) -> Iterator[MeasuredProduct]:
        """Yield the products of matrices that an operator is made of."""
        if name.startswith("aten._scaled_dot_product"):
            is_backward = name.endswith("_backward")
            query, key, value = args[is_backward : 3 + is_backward]
            number, (rows, terms) = query.shape[:-2].numel(), query.shape[-2:]
            keys, outputs = key.shape[-2], value.shape[-1]
            yield MeasuredProduct(number, rows, keys, terms)
            yield MeasuredProduct(number, rows, outputs, keys)
            if is_backward:  # computes the scores again (Dao 2023, section 3.1)
                yield MeasuredProduct(number, keys, outputs, rows)
                yield MeasuredProduct(number, rows, terms, keys)
                yield MeasuredProduct(number, keys, terms, rows)
        first = {"aten.mm": 0, "aten.bmm": 0, "aten.addmm": 1, "aten.baddbmm": 1}.get(name)
        if first is not None:
            left, right = args[first : first + 2]
            has_weight = any(t.untyped_storage()._cdata in self.parameters for t in (left, right))
            number, rows, outputs = left.shape[:-2].numel(), left.shape[-2], right.shape[-1]
            yield MeasuredProduct(number, rows, outputs, left.shape[-1], has_weight)

    def _look_for_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = func._schema.arguments
        for position, argument in enumerate(schema):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            target = args[position] if position < len(args) else kwargs.get(argument.name)
            if not isinstance(target, Tensor):
                continue
            key = target.untyped_storage()._cdata
            assert self._older is not None
            is_new = key in self._known and key not in self._older
            if not is_new and key not in self.writable:
                self.record.writing.append(str(func._overloadpacket))


class _Passes:
    """A layer on one rank, with what it needs to run."""

    def __init__(
        self,
        counter: _Counter,
        mesh: Mesh,
        description: LayerDescription,
        hidden: int,
        parallel: ParallelConfig,
        train: TrainConfig,
    ) -> None:
        self._counter, self._mesh, self._description = counter, mesh, description
        tensor = TensorParallel(
            mesh.group("tensor"),
            chunks=parallel.tensor_chunks,
            recompute=train.recompute == "selective",
        )
        context = ContextParallel(*mesh.divide_context(count_exchanging_ranks(parallel)))
        setup = LayerSetup(tensor, context)
        self._precision = PRECISIONS[train.precision]
        self._layer: Any = build_layer(description, "layer", setup)
        self._bind_parameters()
        mixers = [description] if isinstance(description, MixerDescription) else []
        microbatch = _make_microbatch(train, context)
        dtype = self._precision.compute
        self._inputs = make_microbatch_inputs(
            ModelConfig(), setup, microbatch, dtype, mixers=mixers
        )
        rows = self._inputs.rows
        self._shape = rows.padded // rows.ranks, hidden

    def _bind_parameters(self) -> None:
        mesh, counter = self._mesh, self._counter
        assert isinstance(self._layer, Module)
        coordinate = mesh.layout.get_full_coordinate(mesh.rank)
        for parameter in self._layer.parameters():
            box = parameter.spec.find_local_box(coordinate, mesh.layout.sizes)
            parameter.bind(box, lambda: None)
            parameter.value = torch.empty(box.shape, dtype=self._precision.compute)
            parameter.grad = torch.empty(box.shape, dtype=self._precision.master)
            counter.parameters.add(parameter.value.untyped_storage()._cdata)
            counter.writable.add(parameter.grad.untyped_storage()._cdata)
            parameter.fresh = False  # each pass adds to a gradient, so that all do the same

    def measure(self) -> MeasuredLayer:
        """Run the passes, and return what they did.

        Raises:
            UserError: They do what layers must not.
        """
        before = self._run()
        self._counter.protect()
        first = self._run()
        # A layer that makes what outlives passes, such as tables, does so in the run before.
        problem = _find_problem(first, before) and _find_problem(first, self._run())
        if problem:
            raise UserError(f"{_name_layer(self._description)} {problem}")
        split = self._run(split=True)
        return MeasuredLayer(
            saved_bytes=first.saved,
            keeps_output=first.keeps_output,
            weight_pass_bytes=split.left,
            forward_peak_bytes=first.forward_peak,
            backward_peak_bytes=first.backward_peak,
            forward_flops=first.forward.flops,
            backward_flops=first.backward.flops,
            products=tuple(first.forward.products),
            forward_bytes=first.forward_bytes,
            backward_bytes=first.backward_bytes,
            split_bytes=split.backward_bytes,
        )

    def _run(self, *, split: bool = False) -> _Numbers:
        """Run both passes, with a weight pass after them if they are split."""
        counter, state, dtype = self._counter, PassState(), self._precision.compute
        start = counter.live
        counter.start()  # what is made here is of no pass
        leaf = torch.empty(self._shape, dtype=dtype).requires_grad_()
        before = counter.live
        forward = counter.start()
        edge, output = self._run_forward(leaf, state)
        keeps_output = counter.has(output)
        saved, forward_peak = counter.live - before, counter.peak - before
        forward_bytes = self._take_traffic()
        state.deferred.deferring = split
        gradient = torch.empty(self._shape, dtype=dtype)
        given = counter.live - saved
        record = counter.start()
        backward(edge, gradient)
        backward_peak = counter.peak - given
        del edge, leaf, gradient
        deferred = state.deferred.take()
        left = counter.live - start
        queue = DeferredGradientQueue(deferred)
        for _ in deferred:
            queue.compute_next()
        backward_bytes = self._take_traffic()
        return _Numbers(
            forward=forward,
            backward=record,
            saved=saved,
            keeps_output=keeps_output,
            left=left,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
        )

    def _run_forward(self, leaf: Tensor, state: PassState) -> tuple[GradientEdge, int]:
        """Return the edge of the output, and the key of its storage: the output itself is not
        kept, as between blocks."""
        output = self._layer(leaf, None, self._inputs, state)
        if not isinstance(output, Tensor) or output.shape != leaf.shape:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"it returns {shape}, and its input is {tuple(leaf.shape)}")
        return get_gradient_edge(output), output.untyped_storage()._cdata

    def _take_traffic(self) -> Mapping[str, int]:
        return {axes: size for axes, size in self._mesh.take_traffic().items() if size}


def _find_problem(first: _Numbers, second: _Numbers) -> str:
    """Return what two runs of a layer do that layers must not do, empty if there is nothing."""
    passes = (
        ("forward", first.forward, second.forward),
        ("backward", first.backward, second.backward),
    )
    for name, record, again in passes:
        if record.writing:
            operators = ", ".join(dict.fromkeys(record.writing))
            return (
                f"changes a tensor in its {name} pass that is older than the pass ({operators}): a "
                "parameter, a buffer or its input; recomputed or under another layout it would not "
                "compute the same; let it write to new tensors only"
            )
        if record.random:
            operators = ", ".join(dict.fromkeys(record.random))
            return (
                f"draws random numbers in its {name} pass ({operators}), which would be others "
                "when it is recomputed and under another layout; leave them to model.dropout"
            )
        difference = _find_difference(record.operators, again.operators)
        if difference:
            return (
                f"is not repeatable: its second {name} pass {difference}; let what it computes "
                "depend on its input and its parameters only"
            )
    return ""


def _make_microbatch(train: TrainConfig, context: ContextParallel) -> Microbatch:
    """Return this context rank's part of a microbatch of samples of one document each."""
    tokens = torch.zeros(train.microbatch, train.seq, dtype=torch.int64)
    microbatch = Microbatch(tokens, tokens, torch.arange(train.microbatch))
    return select_context_part(microbatch, context.index, context.size)


def _find_difference(first: Sequence[Operator], second: Sequence[Operator]) -> str:
    """Return what differs between the operators of two passes, empty if nothing does."""
    for one, other in zip(first, second, strict=False):
        if one != other:
            return f"calls {other[0]} on {other[1]} where the first called {one[0]} on {one[1]}"
    if len(first) != len(second):
        return f"calls {len(second)} operators, and the first {len(first)}"
    return ""


def _describe_shapes(args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))


@cache
def _get_flop_formulas() -> Mapping[Any, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry  # takes a third of a second to import

    formulas: Mapping[Any, Callable[..., int]] = flop_registry
    return formulas


def _name_layer(description: LayerDescription) -> str:
    """Return the class of a description and its place, for a message."""
    kind = type(description.origin)
    source = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{kind.__name__} ({source or kind.__module__})"
