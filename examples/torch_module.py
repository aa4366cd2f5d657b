"""A plain torch module from outside as a mixer: the gated short convolution of LFM2 (Liquid AI
2025). It knows nothing of ranks, buckets or checkpoints.

python pretrain_gpt.py --config configs/demo.yaml "run.extensions=[examples/torch_module.py]" \
    model.blocks=[{mixer: {kind: short_convolution, length: 3}}, {}]
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaframe.config import ModelConfig
from megaframe.config.section import Positive
from megaframe.extensions import Registry
from megaframe.model.torch_module import TorchMixerPart


class ShortConvolution(nn.Module):
    """y = W_out (c * convolution(b * x)) with b, c and x from one product. A token sees itself and
    the `length` - 1 before it, but no other document."""

    def __init__(self, hidden: int, length: int, stds: tuple[float, float]) -> None:
        super().__init__()
        self.length = length
        self.input = nn.Linear(hidden, 3 * hidden, bias=False)
        self.filters = nn.Parameter(torch.empty(hidden, length))
        self.output = nn.Linear(hidden, hidden, bias=False)
        nn.init.normal_(self.input.weight, std=stds[0])
        nn.init.normal_(self.filters, std=length**-0.5)
        nn.init.normal_(self.output.weight, std=stds[1])
        distances = torch.arange(length).flip(0)
        self.distances = nn.Buffer(distances, persistent=False)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        """Mix [batch, sequence, hidden]."""
        before, after, value = self.input(x).chunk(3, -1)
        padded = F.pad(before * value, (0, 0, self.length - 1, 0))
        windows = padded.unfold(1, self.length, 1)  # [batch, sequence, hidden, length]
        sees = positions[..., None] >= self.distances
        if documents is not None:
            numbers = F.pad(documents, (self.length - 1, 0), value=-1).unfold(1, self.length, 1)
            sees = sees & (numbers == documents[..., None])
        mixed = (windows * self.filters * sees.unsqueeze(2).to(x.dtype)).sum(-1)
        return self.output(after * mixed)


class ShortConvolutionConfig(TorchMixerPart):
    kind: Literal["short_convolution"] = "short_convolution"
    """A gated convolution over a few tokens."""
    length: Positive = 3
    """Tokens that a token sees, itself included."""

    def make_module(self, model: ModelConfig, output_std: float) -> ShortConvolution:
        """Return a new module, on the current device and with initial values."""
        return ShortConvolution(model.hidden, self.length, (model.init_std, output_std))


def register(registry: Registry) -> None:
    """Give the mixer to megaframe."""
    registry.register(ShortConvolutionConfig)
