"""LayerNorm and RMSNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megaframe.parameter import Module, Parameter
from megaframe.spec import Constant, ParamSpec


class Norm(Module):
    """y = normalised x times a gain (plus a bias), over the last dim.

    `kind` is layernorm (mean and variance; Ba et al. 2016) or rmsnorm (root mean square; Zhang and
    Sennrich 2019). A bias exists for layernorm only.
    """

    def __init__(self, name: str, width: int, *, kind: str, eps: float, bias: bool) -> None:
        self.kind, self.eps, self.width = kind, eps, width
        self.gain = Parameter(ParamSpec(f"{name}.gain", (width,), Constant(1.0), role="gain"))
        self.bias: Parameter | None = None
        if bias and kind == "layernorm":
            self.bias = Parameter(ParamSpec(f"{name}.bias", (width,), Constant(0.0), role="bias"))

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., width] to the same shape."""
        if self.kind == "rmsnorm":
            return F.rms_norm(x, (self.width,), self.gain.use(), self.eps)
        bias = None if self.bias is None else self.bias.use()
        return F.layer_norm(x, (self.width,), self.gain.use(), bias, self.eps)
