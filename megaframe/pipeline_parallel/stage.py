"""Stage: runs the passes of one model chunk, the part of the model between two pipeline links.

A stage runs its blocks in an explicit loop. Each block's input is a leaf, and the backward pass
walks the blocks in reverse and calls autograd on one block at a time. Recompute, deferred weight
gradients and the start of gradient reductions are therefore plain lines in that loop, and nothing
depends on autograd hooks. A block's output is kept as an edge of its graph, not as a tensor: the
next block's input holds the same numbers, and the last output is not needed once it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaframe.architecture.cross_layer_tensors import list_crossing_tensors
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.data_parallel.sharded_parameters import NoSharding, ParameterSharding
from megaframe.model.block import EmulatedBlock, TransformerBlock
from megaframe.model.dropout import DropoutKeys
from megaframe.model.embedding import Embedding
from megaframe.model.key_value_cache import KeyValueCache
from megaframe.model.layer_inputs import (
    LayerSetup,
    MicrobatchInputs,
    make_layer_setup,
    make_microbatch_inputs,
)
from megaframe.model.model_chunk import ModelChunk, build_whole_model_chunk
from megaframe.model.output_head import OutputHead, PostProcessActivations, UnitValues
from megaframe.model.pass_state import BlockBoundary, LayerStatistics, PassState
from megaframe.ops.autograd import backward
from megaframe.ops.workspace import Workspace
from megaframe.parameters.parameter import PRECISIONS, Module, Parameter
from megaframe.pipeline_parallel.activation_offload import (
    ActivationOffload,
    OffloadedActivation,
    take_last_input,
)
from megaframe.pipeline_parallel.message import StageMessage
from megaframe.pipeline_parallel.stage_pass import StagePass
from megaframe.tensor_parallel.deferred_gradients import (
    DeferredGradient,
    DeferredGradientQueue,
    DeferredGradients,
    InputDropout,
)

_NO_SHARDING = NoSharding()
_ALWAYS_HERE = nullcontext()


@dataclass
class StageActivations:
    """What a stage keeps of one microbatch between its forward and its backward.

    Attributes:
        inputs: What the microbatch brings to layers.
        state: Of its passes.
        leaves: The input of each block, possibly offloaded.
        outputs: The graph edge of each block's output, None if the block is recomputed.
        embedding_output: The graph edge of the embedding's output.
        post_process: What the predictors and the head keep.
        deferred: The weight gradients that B leaves for W, by unit.
    """

    inputs: MicrobatchInputs
    state: PassState
    leaves: list[Tensor | OffloadedActivation] = field(default_factory=list)
    outputs: list[GradientEdge | None] = field(default_factory=list)
    embedding_output: GradientEdge | None = None
    post_process: PostProcessActivations | None = None
    deferred: list[tuple[Module, list[DeferredGradient]]] = field(default_factory=list)


def _keep_values(unit: Module) -> AbstractContextManager[None]:
    """Return the context of a unit whose values are always on this rank."""
    return _ALWAYS_HERE


class Stage:
    """Runs the passes of one model chunk.

    Attributes:
        setup: What the run fixes for the layers.
        received, sent: Form of the messages from the previous stage, and to the next one.
        precision: Types of numbers.
        keys: Of random masks; None if nothing is random.
    """

    def __init__(
        self,
        config: RunConfig,
        chunk: ModelChunk,
        setup: LayerSetup,
        sharding: ParameterSharding = _NO_SHARDING,
    ) -> None:
        """Prepare to run.

        Args:
            config: The run.
            chunk: The layers.
            setup: What the run fixes for the layers; the one that the chunk was made with.
            sharding: Provides the values of all units, and reduces their gradients.
        """
        self.config, self.setup = config, setup
        self.plan, self.units = chunk.plan, chunk.units
        self.embedding, self.blocks = chunk.embedding, chunk.blocks
        self.post_process = chunk.post_process
        self.precision = PRECISIONS[config.train.precision]
        self.received, self.sent = (
            StageMessage(
                list_crossing_tensors(config.model, layer) if is_between else (),
                config.model.stream_width,
                setup.tensor.group.size,
                self.precision.compute,
            )
            for layer, is_between in (
                (self.plan.blocks.start, not self.plan.first),
                (self.plan.blocks.stop, not self.plan.last),
            )
        )
        self._sharding, self._chunk = sharding, chunk
        moe, adapters = config.model.moe, config.model.adapters
        drops = config.model.dropout > 0 or (adapters is not None and adapters.dropout > 0)
        random = drops or (moe is not None and moe.jitter > 0)
        self.keys = DropoutKeys(config.run.seed) if random else None
        # Added by a forward, removed by the backward (or by W, if backwards are split).
        self._activations: dict[int, StageActivations] = {}
        self._statistics = LayerStatistics()
        self._workspace = Workspace()
        self._offload: ActivationOffload | None = None

    def find_first_unit(self, *, backward: bool) -> Module | None:
        """Return the unit whose values a pass needs first, None if it needs none."""
        if not backward:
            return self.units[0] if self.units else None
        return next(iter(self._backward_units()), None)

    @property
    def head(self) -> OutputHead | None:
        """The model's head on the last stage, else None."""
        return None if self.post_process is None else self.post_process.head

    def _backward_units(self) -> list[Module]:
        """Return the units whose values a backward pass needs, in its order."""
        units: list[Module] = [*self.blocks]
        if self.embedding is not None and self.embedding.multiplies:
            units = [self.embedding, *units]
        if self.post_process is not None:
            units += self.post_process.predictors
        return units[::-1]

    def parameters(self) -> list[Parameter]:
        """Return all parameters in order, without repeating those that units share."""
        return self._chunk.parameters()

    @property
    def live(self) -> int:
        """Number of microbatches whose activations are live."""
        return len(self._activations)

    def start_step(self, step: int) -> None:
        """Begin optimizer step `step`, on which random masks depend."""
        if self.keys is not None:
            self.keys.begin(step)

    def forward(
        self, stage_pass: StagePass, microbatch: Microbatch, scale: Tensor, x: Tensor | None = None
    ) -> Tensor:
        """Run the forward pass of a microbatch and keep what its backward needs.

        Args:
            stage_pass: Which pass, and what follows.
            microbatch: This rank's part of the microbatch.
            scale: fp64 scalar; gradients are those of scale * (loss sum).
            x: The output of the previous stage; None on the first stage.

        Returns:
            The output for the next stage: the stream, [rows, hidden], or a message with it
            (`StageMessage`); on the last stage the loss sum over valid tokens, fp64 scalar.
        """
        inputs = self.make_inputs(microbatch, self.keys, scale)
        state = self.make_pass_state(inputs.adapter_dropout)
        activations = self._activations[stage_pass.microbatch_index] = StageActivations(
            inputs, state
        )
        state.interleave_hook.switch, on_block = stage_pass.hand_over, stage_pass.on_block
        values = self._make_value_contexts(self.units, stage_pass.next_unit, with_second_half=False)
        if self.embedding is not None:
            with values(self.embedding):
                x = self.embedding(microbatch, inputs, state)
            # The edge, not the tensor: the first block's leaf holds the same numbers.
            activations.embedding_output = get_gradient_edge(x)
            if on_block is not None:
                on_block(-1, x.detach())
        else:
            x = self._receive(x, inputs, state)
        for index, block in enumerate(self.blocks):
            # The graph of each block begins at a leaf of its own; a recomputed block keeps none.
            leaf = x.detach().requires_grad_()
            activations.leaves.append(leaf)
            recompute = index < self.plan.recomputed
            with values(block), torch.set_grad_enabled(not recompute):
                x = block(leaf, inputs, state)
            # Keeps the graph alive without its output, which is the next block's leaf or is sent.
            activations.outputs.append(None if recompute else get_gradient_edge(x))
            if recompute and self.config.train.offload:
                # Only a recomputed block's input: the graph of any other block holds its leaf
                # anyway.
                activations.leaves[-1] = self._offload_on(leaf.device).store(leaf.detach())
            if on_block is not None:
                on_block(self.plan.blocks[index], x.detach())
        # Nothing of a pass outlives it in the workspace, so no memory is held between passes.
        self._workspace.clear()
        if self.post_process is None:
            return self._make_message(x.detach(), state)
        loss, activations.post_process = self.post_process.forward(
            x, microbatch, inputs, state, scale, values
        )
        # Only gradients of norms are missing: the head's own is computed with its loss.
        self._sharding.reduce(self.post_process.head, last=stage_pass.last)
        return loss

    def backward(self, stage_pass: StagePass, gradient: Tensor | None = None) -> Tensor:
        """Run the backward pass of a microbatch. A split one leaves the weight gradients of
        matrices for `compute_weight_gradients`, which then reduces gradients.

        Args:
            stage_pass: Which pass, and what follows.
            gradient: That of this stage's output, None on the last stage.

        Returns:
            The gradient of this stage's input; on the first stage, that of the embedding's output.
            Both are messages where outputs are.
        """
        index, last, split = stage_pass.microbatch_index, stage_pass.last, stage_pass.split
        # A split backward leaves the microbatch to `compute_weight_gradients`, which removes it.
        activations = self._activations[index] if split else self._activations.pop(index)
        inputs, state, on_block = activations.inputs, activations.state, stage_pass.on_block

        def finish(unit: Module) -> None:
            if split:
                activations.deferred.append((unit, state.deferred.take()))
            else:
                self._sharding.reduce(unit, last=last)

        state.deferred.deferring = split
        state.interleave_hook.switch = stage_pass.hand_over
        # Called when autograd has passed the boundary of the halves: the second half's reduction
        # starts while the first half is still differentiated.
        state.boundary.done = None if split else partial(self._sharding.reduce, last=last)
        values = self._make_value_contexts(self._backward_units(), stage_pass.next_unit)
        if self.post_process is not None:
            assert activations.post_process is not None
            gradient = self.post_process.backward(activations.post_process, values, finish)
        else:
            gradient = self._receive_gradients(gradient, inputs, state)
        for block in reversed(self.blocks):
            assert gradient is not None
            leaf, output = take_last_input(activations.leaves), activations.outputs.pop()
            with values(block):
                if output is None:
                    # Recomputed inside `values`, with the dropout masks of the first time: their
                    # keys are in the inputs.
                    output = get_gradient_edge(block(leaf, inputs, state))
                self._differentiate(block, output, gradient, state)
            del output  # frees the block's graph before the next block is recomputed
            # The gradient of the leaf is that of the previous block's output.
            gradient = leaf.grad
            finish(block)
            if on_block is not None and gradient is not None:
                on_block(self.plan.blocks[len(activations.leaves)], gradient.detach())
        self._workspace.clear()
        assert gradient is not None
        if self.embedding is not None:
            assert activations.embedding_output is not None
            with values(self.embedding) if self.embedding.multiplies else _ALWAYS_HERE:
                self._differentiate(self.embedding, activations.embedding_output, gradient, state)
            # Drops the graph; the gradients are in the bucket now.
            activations.embedding_output = None
            finish(self.embedding)
        # Gains and biases of all blocks are one bucket, complete only here.
        if last and not split:
            self._sharding.reduce_vectors(self.plan.stage_index)
        if not self.plan.first:
            gradient = self._make_gradient_message(gradient, state)
        state.handed.clear()  # a weight pass does not need it
        return gradient

    def _differentiate(
        self,
        part: TransformerBlock | EmulatedBlock | Embedding,
        output: GradientEdge,
        gradient: Tensor,
        state: PassState,
    ) -> None:
        """Backpropagate the gradient of a part's output, and those of what it handed on."""
        backward(output, gradient, *state.handed.take_edges(part.handed_names))

    def _receive(
        self, message: Tensor | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Return the stream of a message from the previous stage; the rest is handed on."""
        assert message is not None
        x, *handed = self.received.unpack(message, inputs.batch, inputs.length)
        for form, tensor in zip(self.received.tensors, handed, strict=True):
            state.handed.hand_on(form.name, tensor)
        return x

    def _make_message(self, x: Tensor, state: PassState) -> Tensor:
        """Return the message to the next stage."""
        handed = [state.handed.take(form.name) for form in self.sent.tensors]
        return self.sent.pack(x, handed).detach()

    def _receive_gradients(
        self, message: Tensor | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Return the gradient of the stream of a message from the next stage; to the others layers
        of this stage add theirs."""
        assert message is not None
        sent = self.sent.gradients
        gradient, *others = sent.unpack(message, inputs.batch, inputs.length)
        for form, other in zip(sent.tensors, others, strict=True):
            state.handed.set_gradient(form.name, other)
        return gradient

    def _make_gradient_message(self, gradient: Tensor, state: PassState) -> Tensor:
        """Return the message to the previous stage."""
        received = self.received.gradients
        handed = [state.handed.get_gradient(form.name) for form in received.tensors]
        return received.pack(gradient, handed)

    @torch.no_grad()  # as in autograd's own backward pass, where this work would otherwise run
    def compute_weight_gradients(self, stage_pass: StagePass) -> None:
        """Compute and reduce the weight gradients that a microbatch's split backward has left.

        Args:
            stage_pass: The W.
        """
        activations, last = self._activations.pop(stage_pass.microbatch_index), stage_pass.last
        # One queue for all units: the first transfer of a unit overlaps with the work before it.
        queue = DeferredGradientQueue(
            gradient for _, gradients in activations.deferred for gradient in gradients
        )
        for unit, gradients in activations.deferred:
            for _ in range(len(gradients)):
                # Weight gradients in the order in which B left them, hence the same on all tensor
                # ranks.
                queue.compute_next()
            gradients.clear()  # frees the operands before the unit's gradients are reduced
            if unit.second_half is not None:
                self._sharding.reduce(unit.second_half, last=last)
            self._sharding.reduce(unit, last=last)
        if last:
            self._sharding.reduce_vectors(self.plan.stage_index)

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch, x: Tensor | None = None) -> Tensor:
        """Run a forward pass without dropout and gradients. Returns the output for the next stage,
        or on the last stage, the cross-entropy summed over valid tokens, fp64 scalar."""
        x = self.compute_hidden(microbatch, x)
        if self.post_process is None:
            return x
        values = self._make_value_contexts([self.post_process.head])
        return self.post_process.evaluate(x, microbatch, self.make_inputs(microbatch), values)

    @torch.no_grad()
    def compute_hidden(
        self, microbatch: Microbatch, x: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the stream [rows, hidden] after the last block, or a message with it for the next
        stage, without dropout and gradients.

        Args:
            microbatch: The tokens.
            x: The output of the previous stage; None if this stage has the embedding.
            cache: Of the tokens before those of the microbatch, which are added to it.
        """
        inputs, state = self.make_inputs(microbatch), self.make_pass_state()
        state = state if cache is None else replace(state, cache=cache)
        values = self._make_value_contexts(self.units, with_second_half=False)
        if self.embedding is not None:
            with values(self.embedding):
                x = self.embedding(microbatch, inputs, state)
        else:
            x = self._receive(x, inputs, state)
        for block in self.blocks:
            with values(block):
                x = block(x, inputs, state)
        return self._make_message(x, state)

    @torch.no_grad()
    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the logits, in at least fp32, of hidden states [..., hidden] after the last block,
        for this rank's part of the vocabulary. Only the last stage can."""
        head = self.head
        assert head is not None, "the last stage has the head"
        with self._make_value_contexts([head])(head):
            return head.compute_logits(x)

    def _offload_on(self, device: torch.device) -> ActivationOffload:
        """Return what offloads the inputs of recomputed blocks."""
        if self._offload is None:
            self._offload = ActivationOffload(device)
        return self._offload

    def _make_value_contexts(
        self,
        units: Sequence[Module],
        next_unit: Module | None = None,
        *,
        with_second_half: bool = True,
    ) -> UnitValues:
        """Return the contexts of a pass.

        In the context of a unit its values are on this rank, and those of the next unit are being
        gathered.

        Args:
            units: The units of the pass, in order.
            next_unit: The unit after the last, if there is one.
            with_second_half: The values of a unit's second half are there from the start, and not
                only from the boundary of its halves on.
        """
        if not self._sharding.gathers:
            return _keep_values
        # All ranks walk the same units, so they start gathers in the same order.
        unit_after = dict(zip(units, [*units[1:], next_unit], strict=False))
        sharding = self._sharding

        @contextmanager
        def gather_values(unit: Module) -> Iterator[None]:
            sharding.gather(unit, with_second_half=with_second_half)
            # Starts while this unit computes. `next_unit` reaches across the end of a pass.
            if (after := unit_after[unit]) is not None:
                sharding.prefetch(after)
            yield
            sharding.release(unit)

        return gather_values

    def take_statistics(self) -> LayerStatistics:
        """Return the statistics of all microbatches since the last call, and start new ones."""
        statistics, self._statistics = self._statistics, LayerStatistics()
        return statistics

    def make_inputs(
        self, microbatch: Microbatch, keys: DropoutKeys | None = None, scale: Tensor | None = None
    ) -> MicrobatchInputs:
        """Return what a microbatch brings to the layers.

        Args:
            microbatch: This context rank's part of it.
            keys: Of dropout masks; None if nothing is random.
            scale: As in `forward`; None without gradients.
        """
        dtype = self.precision.compute
        return make_microbatch_inputs(self.config.model, self.setup, microbatch, dtype, keys, scale)

    def make_pass_state(self, dropout: InputDropout | None = None) -> PassState:
        """Return the mutable objects of the passes of one microbatch.

        Args:
            dropout: Drops inputs of adapters; None if nothing is dropped.
        """
        sharding = self._sharding
        boundary = BlockBoundary(sharding.gather_second_half if sharding.gathers else None)
        deferred = DeferredGradients(dropout)
        return PassState(self._statistics, self._workspace, boundary, deferred)


def build_whole_model(config: RunConfig) -> Stage:
    """Return the whole model as one stage on one rank."""
    setup = make_layer_setup(config.parallel, config.train)
    return Stage(config, build_whole_model_chunk(config.model, config.train, setup), setup)
