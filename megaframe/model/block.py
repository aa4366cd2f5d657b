"""The transformer block."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.block import BlockDescription, ScalarDescription
from megaframe.architecture.compressed_attention import CompressedAttentionDescription
from megaframe.architecture.gated_delta_net import GatedDeltaNetDescription
from megaframe.architecture.gated_short_convolution import GatedShortConvolutionDescription
from megaframe.architecture.layer import LayerDescription
from megaframe.architecture.mamba2 import Mamba2Description
from megaframe.architecture.mla import LatentAttentionDescription
from megaframe.architecture.mlp import MLPDescription
from megaframe.architecture.moe import MoEDescription
from megaframe.architecture.no_layer import NoLayer
from megaframe.architecture.shared_keys import SharedKeyAttentionDescription
from megaframe.architecture.sparse_attention import (
    SharedIndexerDescription,
    SparseAttentionDescription,
)
from megaframe.architecture.streams import AltUpDescription, HyperConnectionDescription
from megaframe.config import EmulationConfig
from megaframe.model.attention import Attention
from megaframe.model.compressed_attention import CompressedAttention
from megaframe.model.gated_delta_net import GatedDeltaNet
from megaframe.model.gated_short_convolution import GatedShortConvolution
from megaframe.model.laurel import Laurel
from megaframe.model.layer_embedding import LayerEmbedding
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.mamba2 import Mamba2
from megaframe.model.mla import LatentAttention
from megaframe.model.mlp import MLP
from megaframe.model.moe.layer import MixtureOfExperts
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.model.shared_keys import SharedKeyAttention
from megaframe.model.sparse_attention import SharedIndexerAttention, SparseAttention
from megaframe.model.streams import AltUp, HyperConnection
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients

BlockLayer = (
    Attention
    | LatentAttention
    | CompressedAttention
    | GatedDeltaNet
    | GatedShortConvolution
    | Mamba2
    | MLP
    | MixtureOfExperts
)
"""A mixer, or a feed-forward layer."""


class Absent(Module):
    """Stands for the half that a block does not have, and has no parameters."""


class ModuleList(Module):
    """Several modules that are one part of a block."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = modules


class LayerScalar(Module):
    """A learned factor of the whole stream."""

    def __init__(self, name: str, description: ScalarDescription) -> None:
        (spec,) = description.declare_parameters(name)
        self.gain = Parameter(spec)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x times the factor."""
        return x * self.gain.use()


class TransformerBlock(Module):
    """One transformer layer, as `BlockDescription` says; usually x + attention(norm(x)), then x +
    mlp(norm(x))."""

    def __init__(self, description: BlockDescription, layer: int, setup: LayerSetup) -> None:
        self.name, self.setup, self.kernels = f"blocks.{layer}", setup, setup.kernels
        self.parallel = description.parallel != "none"
        self.residual_scale = description.residual_scale
        self.recomputes_norms = setup.recompute and description.norm.recomputes
        self.attention_norm = self._make_norm("attention_norm", description)
        self.attention = self._build_half(description.mixer)
        self.second_mixer = self._build_half(description.second_mixer)
        self.laurel: Laurel | None = None
        if description.laurel is not None:
            name = f"{self.name}.{description.laurel.name}"
            self.laurel = Laurel(name, description.laurel, setup)
        self.attention_post_norm = self._make_norm("attention_post_norm", description)
        self.mlp_norm = self._make_norm("mlp_norm", description)
        self.mlp_post_norm = self._make_norm("mlp_post_norm", description)
        self.layer_scalar: LayerScalar | None = None
        if description.scalar is not None:
            self.layer_scalar = LayerScalar(f"{self.name}.layer_scalar", description.scalar)
        self.attention_streams = self._make_streams("attention_streams", description)
        self.streams: AltUp | None = None
        if isinstance(description.streams, AltUpDescription):
            self.streams = AltUp(f"{self.name}.streams", description.streams)
        self.mlp_streams = self._make_streams("mlp_streams", description)
        self.mlp = self._build_half(description.feed_forward)
        self.layer_embedding: LayerEmbedding | None = None
        if description.layer_embedding is not None:
            name = f"{self.name}.{description.layer_embedding.name}"
            self.layer_embedding = LayerEmbedding(name, description.layer_embedding, setup)
        candidates = (self.mlp_streams, self.mlp, self.layer_embedding)
        parts: list[Module] = [part for part in candidates if part is not None]
        self._second_half = parts[0] if len(parts) == 1 else ModuleList(parts)

    def _build_half(self, description: LayerDescription) -> BlockLayer | Absent:
        if isinstance(description, NoLayer):
            return Absent()
        return build_layer(description, self.name, self.setup)

    def _make_norm(self, part: str, description: BlockDescription) -> Norm | None:
        if part not in description.first_half:
            return None
        return Norm(f"{self.name}.{part}", description.norm)

    def _make_streams(self, part: str, description: BlockDescription) -> HyperConnection | None:
        streams = description.stream_parts.get(part)
        if not isinstance(streams, HyperConnectionDescription):
            return None
        return HyperConnection(f"{self.name}.{part}", streams)

    @property
    def second_half(self) -> Module:
        """The MLP, or the experts in its place, and what adds an input of the block's own; without
        parameters if there are none."""
        return self._second_half

    @property
    def handed_names(self) -> tuple[str, ...]:
        """Names of what with gradients the block hands to later ones besides the stream."""
        mixer = self.attention
        return mixer.names if isinstance(mixer, Attention) and mixer.computes_keys else ()

    def __call__(self, x: Tensor, inputs: MicrobatchInputs, state: PassState) -> Tensor:
        """Return the residual stream after the block, or the streams.

        Args:
            x: This rank's rows of the stream, [rows, hidden], or of all streams.
            inputs: Of the microbatch.
            state: Of its pass.

        Returns:
            A tensor like x.
        """
        if self.streams is None:
            x = self._add_halves(x, inputs, state)
        else:
            rows, weights = self.streams.read(x)
            x = self.streams.write(x, weights, self._add_halves(rows, inputs, state))
        if self.layer_embedding is not None:
            x = self._add_layer_embedding(self.layer_embedding, x, inputs, state)
        return x if self.layer_scalar is None else self.layer_scalar(x)

    def _add_layer_embedding(
        self, layer: LayerEmbedding, x: Tensor, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Return the stream with the block's own input, or the streams, of which the first one
        gates that input and the others have it."""
        rows = x if self.streams is None else self.streams.select(x)
        added = self._finish(layer(rows, None, inputs, state), None, "input", inputs)
        return x + added if self.streams is None else self.streams.add_to_others(x, added)

    def _add_halves(self, x: Tensor, inputs: MicrobatchInputs, state: PassState) -> Tensor:
        """Return the stream after both halves, or the one that there is."""
        if self.attention_streams is not None or self.mlp_streams is not None:
            return self._write_halves(x, inputs, state)
        if self.parallel:
            return self._run_in_parallel(x, inputs, state)
        if isinstance(self.attention, Absent):
            x = state.boundary.cross(x, self._second_half)
            return x + self._feed_forward(x, inputs, state)
        # Between the halves: the values of the MLP are waited for here, and in the backward pass
        # its gradients are complete here.
        branch = state.boundary.cross(self._mix(x, inputs, state), self._second_half)
        kernels = self.kernels
        if self.laurel is not None:
            x = (x + branch) * 0.5**0.5
            has_none = isinstance(self.mlp, Absent)
            return x if has_none else x + self._feed_forward(x, inputs, state)
        if isinstance(self.mlp, Absent):
            return x + branch
        if self.mlp_norm is None or not kernels.fuses or self.recomputes_norms:
            x = x + branch
            return x + self._feed_forward(x, inputs, state)
        # One kernel adds the branch and normalises the sum. With recompute the norm is left to the
        # linear after it, which computes it again.
        normed, x = self.mlp_norm.add_and_normalize(x, branch, kernels)
        branch = self.mlp(normed, None, inputs, state)
        return x + self._finish(branch, self.mlp_post_norm, "mlp", inputs)

    def _write_halves(self, x: Tensor, inputs: MicrobatchInputs, state: PassState) -> Tensor:
        """Return the streams after both halves, each of which reads and writes them."""
        if self.attention_streams is not None:
            rows, weights = self.attention_streams.read(x)
            branch = state.boundary.cross(self._mix(rows, inputs, state), self._second_half)
            x = self.attention_streams.write(x, weights, branch)
        else:
            x = state.boundary.cross(x, self._second_half)
        if self.mlp_streams is not None:
            rows, weights = self.mlp_streams.read(x)
            x = self.mlp_streams.write(x, weights, self._feed_forward(rows, inputs, state))
        return x

    def _run_in_parallel(self, x: Tensor, inputs: MicrobatchInputs, state: PassState) -> Tensor:
        """Let both halves start from x. Autograd differentiates the MLP first, because it was
        computed last, so its gradients are complete at the boundary here, too."""
        assert not isinstance(self.mlp, Absent)
        rows, norm = self._prepare(x, self.attention_norm)
        branch = self._sum_mixers(rows, norm, inputs, state)
        branch = self._finish(branch, self.attention_post_norm, "attention", inputs)
        branch = state.boundary.cross(branch, self._second_half)
        if self.mlp_norm is not None:
            rows, norm = self._prepare(x, self.mlp_norm)
        # Otherwise one norm for both; if it is recomputed, by each product.
        second = self.mlp(rows, norm, inputs, state)
        return x + branch + self._finish(second, self.mlp_post_norm, "mlp", inputs)

    def _mix(self, x: Tensor, inputs: MicrobatchInputs, state: PassState) -> Tensor:
        """Return what the mixers, and what is beside them, add to the stream."""
        rows, norm = self._prepare(x, self.attention_norm)
        branch = self._sum_mixers(rows, norm, inputs, state)
        branch = self._finish(branch, self.attention_post_norm, "attention", inputs)
        return branch if self.laurel is None else branch + self.laurel(rows, norm, inputs, state)

    def _sum_mixers(
        self, rows: Tensor, norm: Norm | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Return the output of the mixer, and that of a second one added to it."""
        assert not isinstance(self.attention, Absent)
        branch = self.attention(rows, norm, inputs, state)
        if isinstance(self.second_mixer, Absent):
            return branch
        return branch + self.second_mixer(rows, norm, inputs, state)

    def _feed_forward(self, x: Tensor, inputs: MicrobatchInputs, state: PassState) -> Tensor:
        """Return what the MLP or the experts add to the stream."""
        assert not isinstance(self.mlp, Absent)
        rows, norm = self._prepare(x, self.mlp_norm)
        branch = self.mlp(rows, norm, inputs, state)
        return self._finish(branch, self.mlp_post_norm, "mlp", inputs)

    def _prepare(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Return the input of a half, and the norm that is left to its products, which recompute it
        in the backward pass."""
        if norm is None or self.recomputes_norms:
            return x, norm
        return norm(x, self.kernels), None

    def _finish(
        self, branch: Tensor, norm: Norm | None, half: str, inputs: MicrobatchInputs
    ) -> Tensor:
        """Return what a half adds to the stream, from its output."""
        if norm is not None:
            branch = norm(branch, self.kernels)
        if inputs.dropout is not None:
            branch = inputs.dropout(branch, f"{self.name}.{half}")
        return branch if self.residual_scale == 1.0 else branch * self.residual_scale


def build_layer(description: LayerDescription, block: str, setup: LayerSetup) -> BlockLayer:
    """Return the torch layer of a description.

    Args:
        description: What the layer declares.
        block: Name of the block in the model; the first part of the layer's name.
        setup: What the run fixes for layers.

    Raises:
        TypeError: If no layer is known for descriptions of this type, and they make none.
    """
    name = f"{block}.{description.name}"
    # First, because a description from outside may be derived from one of ours.
    if type(description).make_layer is not LayerDescription.make_layer:
        layer: BlockLayer = description.make_layer(name, setup)
        return layer
    match description:
        case SharedKeyAttentionDescription():
            return SharedKeyAttention(name, description, setup)
        case AttentionDescription():
            return Attention(name, description, setup)
        case SharedIndexerDescription():
            return SharedIndexerAttention(name, description, setup)
        case SparseAttentionDescription():
            return SparseAttention(name, description, setup)
        case LatentAttentionDescription():
            return LatentAttention(name, description, setup)
        case CompressedAttentionDescription():
            return CompressedAttention(name, description, setup)
        case GatedDeltaNetDescription():
            return GatedDeltaNet(name, description, setup)
        case GatedShortConvolutionDescription():
            return GatedShortConvolution(name, description, setup)
        case Mamba2Description():
            return Mamba2(name, description, setup)
        case MLPDescription():
            return MLP(name, description, setup.tensor)
        case MoEDescription():
            return MixtureOfExperts(name, description, setup)
    raise TypeError(f"{type(description).__name__} has no method make_layer(name, run)")


_WAKE_UP_SECONDS = 2e-4
"""Seconds before the end of a wait at which it stops sleeping and spins, because a thread that
sleeps wakes up late, by varying times."""


class EmulatedBlock(Module):
    """A block without weights that waits as long as a real one would compute
    (`model.emulate`)."""

    handed_names: tuple[str, ...] = ()

    def __init__(self, times: EmulationConfig) -> None:
        self.times = times

    def __call__(self, x: Tensor, inputs: MicrobatchInputs, state: PassState) -> Tensor:
        """Return a copy of x after the forward time."""
        return _Wait.apply(x, time.perf_counter(), self.times, state.deferred)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: float, times: EmulationConfig, deferred: DeferredGradients
    ) -> Tensor:
        ctx.times, ctx.deferred = times, deferred
        # The copy counts as emulated time: `start` was taken before it.
        y = x.clone()
        _wait_until(start + times.forward)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _wait(ctx.times.backward)
        # A separate wait, so that a schedule can defer it as it defers real weight gradients.
        ctx.deferred.add(partial(_wait, ctx.times.weight))
        return gradients[0], None, None, None


def _wait(seconds: float) -> None:
    _wait_until(time.perf_counter() + seconds)


def _wait_until(end: float) -> None:
    """Return when `time.perf_counter` reaches `end`. Sleeps first and then spins, because sleeping
    until `end` would return late."""
    remaining = end - time.perf_counter() - _WAKE_UP_SECONDS
    if remaining > 0:
        time.sleep(remaining)
    while time.perf_counter() < end:
        pass
