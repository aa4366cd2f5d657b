"""A mixer from outside: linear attention with data-dependent decay (Yang et al. 2023, "Gated Linear
Attention Transformers"), with one decay for each head as in Mamba-2 (Dao and Gu 2024).

Each head has a matrix S: S_t = a_t S_{t-1} + k_t^T v_t and o_t = q_t S_t, with a_t =
sigmoid(w x_t)^(1/16). Tokens of a chunk see each other through products, as in attention, and what
is before the chunk through the state. Decays are sums of logarithms, and nothing is divided by one.

Shapes: B samples, S tokens, N heads, X numbers for a head, P pieces of samples, C chunks, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.norm import RMSNormDescription
from megaframe.config import ModelConfig
from megaframe.config.section import Positive
from megaframe.context_parallel.states import join_chunks, pass_states, split_chunks
from megaframe.extensions import MixerPart, Registry
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.measured import MeasuredMixer
from megaframe.model.norm import Norm
from megaframe.ops.autograd import recompute
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.linear import Linear


class GatedLinearConfig(MixerPart):
    kind: Literal["gated_linear"] = "gated_linear"
    """Gated linear attention, with `model.heads` heads of `model.head_dim`."""
    chunk: Positive = 64
    """Tokens that see each other through products."""

    def describe(self, model: ModelConfig, output_std: float) -> GatedLinearDescription:
        """Return what the layer is made of."""
        sizes, stds = (model.hidden, model.heads, model.head_dim), (model.init_std, output_std)
        return GatedLinearDescription(*sizes, self.chunk, stds)


@dataclass(frozen=True)
class GatedLinearDescription(MeasuredMixer):
    """One product makes queries, keys, values, gates of the output and decays."""

    hidden: int
    heads: int
    width: int
    chunk: int
    stds: tuple[float, float]

    name = "linear_attention"
    context_kinds = ("ring", "all_to_all", "nested")

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Each tensor rank has as many heads."""
        return (Limit("tensor", self.heads, f"model.heads={self.heads}"),)

    @property
    def parts(self) -> Mapping[str, Any]:
        """The product, the norm of each head's output, and the product back to the stream."""
        stream, values, widths = (self.hidden,), (self.heads, self.width), (*[self.width] * 4, 1)
        outputs = (self.heads, sum(widths))
        product = LinearSpec(stream, outputs, self.stds[0], split=0, fused={1: widths})
        output = LinearSpec(values, stream, self.stds[1], split=1)
        return {
            "input": self.adapt("input", product, "stream"),
            "norm": RMSNormDescription(self.width, 1e-6),
            "output": self.adapt("output", output),
        }

    def make_layer(self, name: str, setup: LayerSetup) -> GatedLinearAttention:
        """Return the layer."""
        return GatedLinearAttention(name, self, setup)


class GatedLinearAttention(Module):
    """The heads of this tensor rank for the tokens of this context rank."""

    def __init__(self, name: str, description: GatedLinearDescription, setup: LayerSetup) -> None:
        parts, self.chunk, self.context = description.parts, description.chunk, setup.context
        self.widths = parts["input"].fused[1]
        self.input = Linear(f"{name}.input", parts["input"], setup.tensor)
        self.norm, self.kernels = Norm(f"{name}.norm", parts["norm"]), setup.kernels
        self.output = Linear(f"{name}.output", parts["output"], setup.tensor)

    def __call__(self, x: Tensor, norm: Any, inputs: MicrobatchInputs, state: Any) -> Tensor:
        """Return what the layer adds to this rank's rows of the stream."""
        rows = inputs.rows.remove_padding(self.input(x, state.deferred, norm))
        heads_BSNX = rows.view(inputs.batch, inputs.length, -1, sum(self.widths))
        # Only the result of the product is kept, and all that follows is computed again from it.
        out_TV = recompute(partial(self.mix, inputs), heads_BSNX).flatten(0, 1).flatten(1)
        return self.output(inputs.rows.pad(out_TV), state.deferred)

    def mix(self, inputs: MicrobatchInputs, heads_BSNX: Tensor) -> Tensor:
        """Return the gated outputs of heads, [B, S, N, V]."""
        query, key, value, gate_BSNV, decay = heads_BSNX.split(self.widths, -1)
        falls = F.logsigmoid(decay.to(torch.promote_types(decay.dtype, torch.float32))) / 16
        begins = inputs.begins_BS[..., None, None].int()
        query, key, value, falls, begins = (
            split_chunks(each, self.chunk, self.context).transpose(2, 3)  # [P, C, N, L, ...]
            for each in (query * query.shape[-1] ** -0.5, key, value, falls, begins)
        )
        # Since the chunk's start: logarithms of decays, and how many documents have begun.
        falls, number = falls.cumsum(-2), begins.cumsum(-2)
        within = compute_decays(falls - falls.mT, (number == number.mT).tril()).to(key)
        before = compute_decays(falls, number == 0)
        after = compute_decays(falls[..., -1:, :] - falls, number[..., -1:, :] == number).to(key)
        states = pass_states(before[..., -1:, :], (key * after).mT @ value, self.context).to(key)
        out = (query @ key.mT * within) @ value + (query * before.to(key)) @ states
        out_BSNV = join_chunks(out.transpose(2, 3), inputs.batch, inputs.length)
        return self.norm(out_BSNV, self.kernels) * F.silu(gate_BSNV)


def compute_decays(falls: Tensor, sees: Tensor) -> Tensor:
    """Return exp(falls), and zero for what is of another document or comes later."""
    return falls.masked_fill(~sees, -torch.inf).exp()


def register(registry: Registry) -> None:
    """Give the mixer to megaframe."""
    registry.register(GatedLinearConfig)
