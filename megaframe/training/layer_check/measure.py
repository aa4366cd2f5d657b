"""What the layers of a model have, keep, compute and send, measured on the ranks of a layout.

Every layer runs alone, on random rows. Where numbers would depend on what a router chooses, it
chooses evenly, as descriptions count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from math import comb, lcm
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megaframe.architecture.block import BlockDescription
from megaframe.architecture.cross_layer_tensors import list_handed_tensors
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.spec import ParamSpec
from megaframe.config import ModelConfig, MoEConfig, RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.model.block import Absent, TransformerBlock
from megaframe.model.layer_inputs import LayerRoutines, MicrobatchInputs
from megaframe.model.multi_token_prediction import MultiTokenPredictor
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.ops.attention_local import attend_locally
from megaframe.ops.autograd import backward
from megaframe.parameters.parameter import Module, Parameter
from megaframe.pipeline_parallel.stage import Stage
from megaframe.tensor_parallel.deferred_gradients import DeferredGradientQueue
from megaframe.training.random_microbatch import make_random_microbatch
from megaframe.training.train_step import TrainStep

_MOST_SETS = 512
"""Sets of experts that are chosen in turn; of more, single experts are."""
_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")


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
        forward_bytes: Bytes handed to collectives in the forward pass, by axes.
        backward_bytes: And in the backward pass.
        split_bytes: In a backward pass without weight gradients, and the weight pass after it.
    """

    parameters: dict[str, tuple[ParamSpec, tuple[int, ...]]]
    saved_bytes: int
    weight_pass_bytes: int
    flops: int
    forward_bytes: dict[str, int]
    backward_bytes: dict[str, int]
    split_bytes: dict[str, int]


@dataclass(frozen=True)
class _RunnablePart:
    """A part of the model that runs alone.

    Attributes:
        name: Its name in the model.
        parameters: Its own ones.
        width: Elements of a row of its input.
        compute: Returns its output for rows and the state of a pass, and the gradient of the output
            if the part knows it, as the head does.
        handed_names: Names of what it hands to later layers.
    """

    name: str
    parameters: list[Parameter]
    width: int
    compute: Callable[[Tensor, PassState], tuple[Tensor, Tensor | None]]
    handed_names: tuple[str, ...] = ()


def measure_layers(config: RunConfig) -> dict[str, LayerMeasurement]:
    """Return what this rank measures of every block, its layers and norms, the embedding, the
    predictors and the head, by name. All ranks of `config.parallel` call this together.

    Args:
        config: Its layout has one pipeline rank. Each rank should have equally many tokens.
    """
    (measurements,) = measure_layers_of([config])
    return measurements


def measure_layers_of(configs: Sequence[RunConfig]) -> list[dict[str, LayerMeasurement]]:
    """Return what `measure_layers` does for each of several runs of one layout, whose ranks meet
    once."""
    parallel = configs[0].parallel
    layout = Layout.from_parallel(parallel, read_world_size())
    mesh = Mesh(layout, device="cpu", timeout=parallel.timeout)
    measurements = []
    for config in configs:
        attention = _LocalAttention()
        train_step = TrainStep(config, mesh, routines=_make_routines(config.model, attention))
        train_step.optimizer.initialize(config.run.seed)
        train_step.stages[0].start_step(0)
        microbatch = make_random_microbatch(
            config.model,
            config.train,
            train_step.context,
            mesh.device,
            documents=config.data.reset_attention,
        )
        measurements.append(_Measuring(train_step, mesh, microbatch, attention).measure_all())
        train_step.stages[0].take_statistics()
    mesh.finish()
    return measurements


class _Measuring:
    """Runs the parts of the only stage of a rank."""

    def __init__(
        self, train_step: TrainStep, mesh: Mesh, microbatch: Microbatch, attention: _LocalAttention
    ) -> None:
        self._sharded, self._mesh = train_step.sharded_parameters, mesh
        self._microbatch, self._attention = microbatch, attention
        self._stage: Stage = train_step.stages[0]
        scale = torch.ones((), dtype=torch.float64)
        self._inputs = self._stage.make_inputs(microbatch, self._stage.keys, scale)
        self._scale = scale
        weights = (bucket.parameters[0].value for bucket in self._sharded.buckets)
        self._weights = set(map(_find_storage, weights))
        tables = [t for rotary in self._inputs.rotary.values() for t in (rotary.cos, rotary.sin)]
        tables += self._inputs.query_scales.values()
        ahead = chain(*(far[:2] for far in microbatch.ahead))
        given = [microbatch.tokens_BS, microbatch.labels_BS, *ahead]
        given += [] if microbatch.positions_BS is None else [microbatch.positions_BS]
        self._handed = self._make_handed_tensors()
        given += self._handed.values()
        self._known = self._weights | set(map(_find_storage, [*tables, *given]))
        self._table_shapes = {table.shape for table in tables}  # also of the negated for backward

    def measure_all(self) -> dict[str, LayerMeasurement]:
        """Return what is measured of all parts, by name."""
        return {part.name: self._measure(part) for part in self._list_parts()}

    def _list_parts(self) -> Iterator[_RunnablePart]:
        stage, inputs, microbatch = self._stage, self._inputs, self._microbatch
        width = stage.config.model.stream_width
        embedding, post_process = stage.embedding, stage.post_process
        assert embedding is not None and post_process is not None, "all stages are on this rank"
        shared = list(embedding.parameters())
        yield _RunnablePart(
            "embedding",
            shared,
            width,
            lambda x, state: (embedding(microbatch, inputs, state), None),
            embedding.handed_names,
        )
        for layer, block in zip(stage.plan.blocks, stage.blocks, strict=True):
            assert isinstance(block, TransformerBlock)
            description = describe_block(stage.config.model, layer)
            yield from self._list_parts_of_block(block, description)
        head = post_process.head
        own = [parameter for parameter in head.parameters() if parameter not in shared]
        shared = [*shared, *own]
        for predictor, far in zip(post_process.predictors, microbatch.ahead, strict=True):
            own_ones = [p for p in predictor.parameters() if p not in shared]
            compute = partial(_run_predictor, predictor, far.tokens_BS, inputs)
            yield _RunnablePart(predictor.name, own_ones, width, compute)

        def compute_loss(x: Tensor, state: PassState) -> tuple[Tensor, Tensor | None]:
            normed = head.normalize(x)
            loss = head.compute_loss(normed, microbatch.labels_BS, None, self._scale, inputs)
            return normed, loss.d_hidden

        yield _RunnablePart("head", own, width, compute_loss)

    def _list_parts_of_block(
        self, block: TransformerBlock, description: BlockDescription
    ) -> Iterator[_RunnablePart]:
        inputs, model = self._inputs, self._stage.config.model

        def make_part(name: str, module: Module, compute: Callable[..., Tensor]) -> _RunnablePart:
            parameters, names = list(module.parameters()), block.handed_names
            hands = names if module in (block, block.attention) else ()
            width = model.stream_width if module is block else model.hidden
            run_alone = partial(_run_without_gradient, compute)
            return _RunnablePart(name, parameters, width, run_alone, hands)

        for name in _NORMS:
            norm: Norm | None = getattr(block, name)
            if norm is not None:
                compute = partial(_run_norm, norm, block.setup.kernels)
                yield make_part(f"{block.name}.{name}", norm, compute)
        mixers, second = (block.attention, block.second_mixer), (block.mlp, block.layer_embedding)
        parts = (*mixers, block.laurel, *second)
        layers = [part for part in parts if part is not None and not isinstance(part, Absent)]
        for layer, described in zip(layers, description.layers, strict=True):
            yield make_part(
                f"{block.name}.{described.name}",
                layer,
                lambda x, state, layer=layer: layer(x, None, inputs, state),
            )
        yield make_part(block.name, block, lambda x, state: block(x, inputs, state))

    def _measure(self, part: _RunnablePart) -> LayerMeasurement:
        self._sharded.start_step()
        leaf, state = self._make_leaf(part), self._make_pass_state()
        known, storages = self._known | {_find_storage(leaf)}, {}

        def keep(value: Tensor) -> Tensor:
            if _find_storage(value) not in known and value.numel() and value.dim():
                storages[_find_storage(value)] = value
            return value

        self._mesh.take_traffic()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            output, gradient = part.compute(leaf, state)
        forward_bytes = self._mesh.take_traffic()
        storages.pop(_find_storage(output), None)
        if gradient is not None:
            storages[_find_storage(gradient)] = gradient
        kept = [value for value in storages.values() if value.shape not in self._table_shapes]
        _differentiate(part, output, gradient, state)
        backward_bytes = self._mesh.take_traffic()
        with FlopCounterMode(display=False) as counter, self._attention.compute_all_scores():
            state = self._make_pass_state()
            output, gradient = part.compute(self._make_leaf(part), state)
            flops = counter.get_total_flops()
        self._mesh.take_traffic()
        state.deferred.deferring = True
        _differentiate(part, output, gradient, state)
        deferred = state.deferred.take()
        left = _find_storages(deferred)
        queue = DeferredGradientQueue(deferred)
        for _ in deferred:
            queue.compute_next()
        return LayerMeasurement(
            {
                parameter.spec.name: (parameter.spec, tuple(parameter.value.shape))
                for parameter in part.parameters
            },
            sum(value.untyped_storage().nbytes() for value in kept),
            sum(size for storage, size in left.items() if storage not in self._weights),
            flops,
            forward_bytes,
            backward_bytes,
            self._mesh.take_traffic(),
        )

    def _make_pass_state(self) -> PassState:
        """Return the state of a pass to which all that parts hand on was handed."""
        state = self._stage.make_pass_state(self._inputs.adapter_dropout)
        for name, tensor in self._handed.items():
            state.handed.hand_on(name, tensor)
        return state

    def _make_handed_tensors(self) -> dict[str, Tensor]:
        """Return random tensors, and the first keys for choices, in place of what parts hand to
        later layers, by name."""
        inputs, ranks = self._inputs, self._inputs.rows.ranks
        sizes = inputs.batch, inputs.length, inputs.rows.padded // ranks, ranks
        tensors: dict[str, Tensor] = {}
        for form in list_handed_tensors(self._stage.config.model):
            shape = form.find_shape(*sizes)
            tensors[form.name] = (
                torch.arange(shape[-1], dtype=torch.int32).repeat(*shape[:-1], 1)
                if form.is_choice
                else torch.randn(shape).to(self._stage.precision.compute)
            )
        return tensors

    def _make_leaf(self, part: _RunnablePart) -> Tensor:
        rows = self._inputs.rows
        leaf = torch.randn(rows.padded // rows.ranks, part.width)
        return leaf.to(self._stage.precision.compute).requires_grad_()


def _differentiate(
    part: _RunnablePart, output: Tensor, gradient: Tensor | None, state: PassState
) -> None:
    """Backpropagate random gradients of what a part computes, and hands to later layers."""
    for name in part.handed_names:
        state.handed.set_gradient(name, torch.randn_like(state.handed.take(name)))
    gradient = torch.randn_like(output) if gradient is None else gradient
    backward(output, gradient, *state.handed.take_edges(part.handed_names))


def _run_without_gradient(
    compute: Callable[..., Tensor], x: Tensor, state: PassState
) -> tuple[Tensor, None]:
    return compute(x, state), None


def _run_norm(norm: Norm, kernels: Any, x: Tensor, state: PassState) -> Tensor:
    return norm(x, kernels)


def _run_predictor(
    predictor: MultiTokenPredictor,
    tokens_BS: Tensor,
    inputs: MicrobatchInputs,
    x: Tensor,
    state: PassState,
) -> tuple[Tensor, None]:
    return predictor(x, tokens_BS, inputs, state), None


def _find_storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _find_storages(deferred: Any) -> dict[int, int]:
    """Return the bytes of all storages that deferred weight gradients keep, by address."""
    storages: dict[int, int] = {}
    remaining = [deferred]
    while remaining:
        value = remaining.pop()
        if isinstance(value, Tensor):
            if value.dim():
                storages[_find_storage(value)] = value.untyped_storage().nbytes()
        elif isinstance(value, (tuple, list)):
            remaining += value
        elif isinstance(value, partial):
            remaining += [value.func, *value.args, *value.keywords.values()]
        elif inspect.isfunction(value):
            remaining += [cell.cell_contents for cell in value.__closure__ or ()]
    return storages


class _LocalAttention:
    """Attention among a rank's tokens as layers compute it, or with all scores."""

    def __init__(self) -> None:
        self._computes_all_scores = False

    def __call__(
        self, query_BSND: Tensor, key_BSGD: Tensor, value_BSGV: Tensor, *options: Any
    ) -> Tensor:
        """Compute attention. The arguments are those of `attend_locally`."""
        if not self._computes_all_scores:
            return attend_locally(query_BSND, key_BSGD, value_BSGV, *options)
        # A mask, a softcap and sinks add no products.
        out_BNSV = F.scaled_dot_product_attention(
            query_BSND.transpose(1, 2),
            key_BSGD.transpose(1, 2),
            value_BSGV.transpose(1, 2),
            is_causal=True,
            enable_gqa=query_BSND.shape[2] > key_BSGD.shape[2],
        )
        return out_BNSV.transpose(1, 2)

    @contextmanager
    def compute_all_scores(self) -> Iterator[None]:
        """Within it all queries are multiplied with all keys, so that FLOPs do not depend on tiles
        and padding of this machine's kernels."""
        self._computes_all_scores = True
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            self._computes_all_scores = False


def _make_routines(model: ModelConfig, attention: Callable[..., Tensor]) -> LayerRoutines:
    """Return what layers compute while they are measured.

    Routers choose all sets of experts in turn, or if there are too many, all experts. Rows that are
    computed again only for the CPU's routines are not part of the layer.
    """
    moe = model.moe
    sets = torch.tensor([] if moe is None else list_expert_sets(moe.experts, moe.top_k))

    def choose_evenly(_: MoEConfig, scores_RE: Tensor) -> Tensor:
        return sets[torch.arange(len(scores_RE)) % len(sets)]

    return LayerRoutines(attention, choose_evenly, lambda x: 1)


def list_expert_sets(experts: int, choices: int) -> list[tuple[int, ...]]:
    """Return the sets of experts that rows choose in turn. If the number of a rank's rows is a
    multiple of theirs, all experts are equally loaded."""
    if comb(experts, choices) <= _MOST_SETS:
        return list(combinations(range(experts), choices))
    return [
        tuple((start + i) % experts for i in range(choices))
        for start in range(0, lcm(experts, choices), choices)
    ]
