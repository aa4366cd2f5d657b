"""Attention from outside: differential attention (Ye et al. 2024, "Differential Transformer").

Two heads of queries and keys are a pair with values of twice the width, and their softmaxes are
subtracted: out = (softmax(q1 k1) - lambda softmax(q2 k2)) v. What both attend to without need
cancels. All pairs of a layer share lambda = exp(a . b) - exp(c . d) + 0.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megaframe.architecture.attention import SoftmaxAttention
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.norm import RMSNormDescription
from megaframe.architecture.rotary import describe_rotary
from megaframe.architecture.spec import Normal, ParamSpec
from megaframe.config import ModelConfig, ParallelConfig
from megaframe.config.section import Positive
from megaframe.extensions import MixerPart, Registry
from megaframe.model.attention import attend_heads
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.measured import Measured
from megaframe.model.norm import Norm
from megaframe.ops.autograd import recompute
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Linear


class DifferentialConfig(MixerPart):
    kind: Literal["differential"] = "differential"
    """Differential attention: pairs of `model.heads` heads."""
    window: Positive | None = None
    """Sliding window in tokens; null for all tokens before."""

    def describe(self, model: ModelConfig, output_std: float) -> DifferentialDescription:
        """Return what the layer is made of."""
        return DifferentialDescription(
            hidden=model.hidden,
            heads=model.heads,
            width=model.head_dim,
            window=self.window,
            rotary=describe_rotary(model, model.head_dim * (model.position == "rotary")),
            score_scale=model.head_dim**-0.5,
            bias=model.bias,
            norm_eps=model.norm_eps,
            init_std=model.init_std,
            output_std=output_std,
        )


@dataclass(frozen=True)
class Factors:
    """The four vectors of lambda, [4, width]."""

    width: int

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the only spec."""
        yield ParamSpec(f"{name}.vectors", (4, self.width), Normal(0.1), role="bias")


@dataclass(frozen=True, kw_only=True)
class DifferentialDescription(Measured, SoftmaxAttention):
    """A pair has two heads of queries and of keys, and values of their width together."""

    width: int

    @property
    def query_width(self) -> int:
        """Width of a query or key head."""
        return self.width

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return 2 * self.width

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message if heads make no pairs, or ranks cannot divide pairs or heads."""
        if self.heads % 2:
            yield f"model.heads={self.heads} is odd and makes no pairs; use {self.heads + 1}"
        pairs = Limit("tensor", self.heads // 2, f"the pairs of model.heads={self.heads}")
        yield from pairs.find_mistakes(parallel)
        yield from super().find_mistakes(parallel)

    @property
    def parts(self) -> Mapping[str, Any]:
        """The products, the vectors of lambda, and the norm of each pair's output."""
        stream, pairs, value = (self.hidden,), self.heads // 2, self.value_width
        qkv, values = (pairs, 6, self.width), (pairs, value)
        return {
            "qkv": LinearSpec(stream, qkv, self.init_std, split=0, fused={1: (2, 2, 2)}),
            "factors": Factors(self.width),
            "norm": RMSNormDescription(value, self.norm_eps),
            "output": LinearSpec(values, stream, self.output_std, split=1, bias=self.bias),
        }

    def make_layer(self, name: str, setup: LayerSetup) -> DifferentialAttention:
        """Return the layer."""
        return DifferentialAttention(name, self, setup)


class DifferentialAttention(Module):
    """The pairs of this tensor rank."""

    constant = 0.8  # the paper also lets it grow with depth, and finds little difference

    def __init__(self, name: str, description: DifferentialDescription, setup: LayerSetup) -> None:
        self.description, self.setup, parts = description, setup, description.parts
        self.qkv = Linear(f"{name}.qkv", parts["qkv"], setup.tensor)
        self.factors = Parameter(*parts["factors"].declare_parameters(f"{name}.factors"))
        self.norm = Norm(f"{name}.norm", parts["norm"])
        self.output = Linear(f"{name}.output", parts["output"], setup.tensor)

    def __call__(self, x: Tensor, norm: Any, inputs: MicrobatchInputs, state: Any) -> Tensor:
        """Return what the layer adds to this rank's rows of the stream."""
        rows, this = self.qkv(x, state.deferred, norm), self.description
        shape = inputs.batch, inputs.length, -1, 6, this.width
        query, key, value = inputs.rows.remove_padding(rows).view(shape).split(2, 3)
        query, key, value = query.flatten(2, 3), key.flatten(2, 3), value.flatten(3)
        if this.rotary is not None:
            query, key = map(inputs.rotary[this.rotary], (query, key))
        # Both heads of a pair have its values. Copies, because views would keep the whole product.
        heads = query.contiguous(), key.contiguous(), value.repeat_interleave(2, 2)
        out_TX = attend_heads(*heads, inputs.masks[this.window], this.score_scale, self.setup)
        out_TX = recompute(self.join, out_TX).flatten(1)
        return self.output(inputs.rows.pad(out_TX), state.deferred)

    def join(self, out_TX: Tensor) -> Tensor:
        """Return the pairs' outputs, [T, P, V], from those of their heads."""
        a, b, c, d = self.factors.use().double()
        factor = ((a @ b).exp() - (c @ d).exp() + self.constant).to(out_TX)
        first, second = out_TX.unflatten(1, (-1, 2, self.description.value_width)).unbind(2)
        return self.norm(first - factor * second, self.setup.kernels) * (1 - self.constant)


def register(registry: Registry) -> None:
    """Give the mixer to megaframe."""
    registry.register(DifferentialConfig)
