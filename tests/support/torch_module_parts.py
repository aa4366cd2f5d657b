"""An extension with torch modules in every role: a mixer of single tokens, a mixer that shares one
matrix between two linears, a feed-forward layer and a norm."""

from typing import ClassVar, Literal

import torch
from torch import nn

from megaframe.model.torch_module import TorchFeedForwardPart, TorchMixerPart, TorchNormPart


class Scaled(nn.Module):
    """Two linears with one matrix, and a factor without dims."""

    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Linear(hidden, hidden)
        self.second = nn.Linear(hidden, hidden, bias=False)
        self.second.weight = self.first.weight
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.factor * self.second(torch.tanh(self.first(x)))


class TokenWise(TorchMixerPart):
    kind: Literal["token_wise"] = "token_wise"
    """A mixer that mixes nothing."""
    token_wise: ClassVar[bool] = True

    def make_module(self, model, output_std):
        return Scaled(model.hidden)


class RunningMean(TorchMixerPart):
    kind: Literal["running_mean"] = "running_mean"
    """The mean of all tokens so far."""

    def make_module(self, model, output_std):
        return Mean(model.hidden)


class Mean(Scaled):
    def forward(self, x):
        number = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
        return super().forward(x.cumsum(1) / number[:, None])


class PlainFeedForward(TorchFeedForwardPart):
    kind: Literal["torch_mlp"] = "torch_mlp"
    """An MLP of torch's own layers."""

    def make_module(self, model, output_std):
        wide = 3 * model.hidden
        return nn.Sequential(
            nn.Linear(model.hidden, wide), nn.GELU(), nn.Linear(wide, model.hidden)
        )


class TorchLayerNorm(TorchNormPart):
    kind: Literal["torch_layer_norm"] = "torch_layer_norm"
    """LayerNorm of torch."""

    def make_module(self, model):
        return nn.LayerNorm(model.hidden)


def register(registry):
    for part in (TokenWise, RunningMean, PlainFeedForward, TorchLayerNorm):
        registry.register(part)
