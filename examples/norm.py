"""From outside: a tanh with a learned slope in place of a norm (Zhu et al. 2025, "Transformers
without Normalization"), ReGLU (Shazeer 2020), and an MLP whose first matrix is a product of two.

python pretrain_gpt.py --config configs/demo.yaml "run.extensions=[examples/norm.py]" \
    model.norm=dynamic_tanh model.activation=reglu model.blocks=[{feed_forward: low_rank}]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megaframe.architecture.layer import HasParameters
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.mlp import MLPDescription, describe_mlp
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.config import ModelConfig
from megaframe.config.blocks import MLPConfig
from megaframe.config.section import Positive
from megaframe.extensions import FeedForwardPart, NormPart, Registry
from megaframe.model.activation import activate
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.measured import Measured, MeasuredActivation, MeasuredNorm
from megaframe.model.pass_state import PassState
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.linear import Elementwise, Linear


class DynamicTanhConfig(NormPart):
    kind: Literal["dynamic_tanh"] = "dynamic_tanh"
    """gain * tanh(slope * x) + bias, with one slope for all elements."""
    slope: float = 0.5
    """Initial slope."""

    def describe(self, model: ModelConfig) -> NormDescription:
        """Return what it is made of."""
        return DynamicTanhDescription(model.hidden, self.slope)


@dataclass(frozen=True)
class DynamicTanhDescription(MeasuredNorm):
    """Its parameters, and what computes it."""

    slope: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the slope, the gain and the bias, in the order in which `compute` takes them."""
        yield ParamSpec(f"{name}.slope", (1,), Constant(self.slope), role="gain")
        yield ParamSpec(f"{name}.gain", (self.width,), Constant(1.0), role="gain")
        yield ParamSpec(f"{name}.bias", (self.width,), Constant(0.0), role="bias")

    def compute(self, x: Tensor, slope: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        """Autograd differentiates it."""
        return torch.tanh(slope * x) * gain + bias


class ReGLUConfig(MeasuredActivation):
    kind: Literal["reglu"] = "reglu"
    """relu(gate) * up."""
    gated: ClassVar[bool] = True

    def compute(self, gate: Tensor, up: Tensor) -> Tensor:
        """Autograd differentiates it."""
        return torch.relu(gate) * up


class LowRankConfig(FeedForwardPart):
    kind: Literal["low_rank"] = "low_rank"
    """An MLP whose first matrix is a product of two."""
    rank: Positive = 64
    """Width between them."""

    def describe(self, model: ModelConfig, output_std: float) -> MLPDescription:
        """Return what it is made of."""
        ours = describe_mlp(model, MLPConfig(), output_std)
        return LowRankDescription(**vars(ours), rank=self.rank)


@dataclass(frozen=True, kw_only=True)
class LowRankDescription(Measured, MLPDescription):
    """hidden -> rank -> width -> hidden. Tensor ranks multiply their own rows by the whole first
    matrix, so that only `rank` elements per token are gathered."""

    rank: int
    name = "low_rank"

    @property
    def narrow(self) -> LinearSpec:
        """The first product."""
        return LinearSpec((self.hidden,), (self.rank,), self.init_std)

    @property
    def up(self) -> LinearSpec:
        """The second product."""
        return replace(super().up, inputs=(self.rank,))

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """All three products."""
        return {"narrow": self.narrow, "up": self.up, "down": self.down}

    def make_layer(self, name: str, setup: LayerSetup) -> Module:
        """Return the torch layer."""
        return LowRankMLP(name, self, setup)


class LowRankMLP(Module):
    """The layer. Its linears communicate, and add their gradients where they belong."""

    def __init__(self, name: str, own: LowRankDescription, setup: LayerSetup) -> None:
        self.narrow = Linear(f"{name}.narrow", own.narrow, setup.tensor)
        self.up = Linear(f"{name}.up", own.up, setup.tensor)
        self.down = Linear(f"{name}.down", own.down, setup.tensor)
        self.activate = partial(activate, own.activation)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Any:
        """Apply the layer to this rank's rows [rows, hidden], after the norm if there is one."""
        up = self.up(self.narrow(x, state.deferred, norm), state.deferred)
        return self.down(up, state.deferred, self.activate)


def register(registry: Registry) -> None:
    """Give all three to megaframe."""
    for part in (DynamicTanhConfig, ReGLUConfig, LowRankConfig):
        registry.register(part)
