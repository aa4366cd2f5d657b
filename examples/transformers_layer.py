"""A layer of the library `transformers` from outside as a mixer: the attention of gpt-oss with its
sinks, rotation and windows, by its own code.

python pretrain_gpt.py --config configs/demo.yaml model.position=none \
    "run.extensions=[examples/transformers_layer.py]" \
    "model.blocks=[{mixer: {kind: gpt_oss_attention, window: 128}}]"
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from megaframe.config import ModelConfig
from megaframe.config.section import Positive
from megaframe.extensions import Registry
from megaframe.model.torch_module import TorchMixerPart


class GptOssMixer(nn.Module):
    """The attention, with the angles and the mask that its own model gives it."""

    def __init__(self, config: GptOssConfig, window: int | None, output_std: float) -> None:
        super().__init__()
        self.window = window
        self.rotary = GptOssRotaryEmbedding(config)
        self.attention = GptOssAttention(config, layer_idx=0)
        for name, parameter in self.attention.named_parameters():
            std = output_std if name.startswith("o_proj") else config.initializer_range
            nn.init.normal_(parameter, std=0.0 if name.endswith("bias") else std)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        """Attend within documents, [batch, sequence, hidden]."""
        place = torch.arange(x.shape[1], device=x.device)
        distance = place[:, None] - place
        sees = (distance >= 0) & (distance < (self.window or x.shape[1]))
        if documents is not None:
            sees = sees & (documents[:, :, None] == documents[:, None])
        mask = torch.zeros(sees.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(~sees, torch.finfo(x.dtype).min).view(-1, 1, *distance.shape)
        out, _ = self.attention(x, self.rotary(x, positions), mask)
        return out


class GptOssAttentionConfig(TorchMixerPart):
    kind: Literal["gpt_oss_attention"] = "gpt_oss_attention"
    """Attention of gpt-oss with sinks, as transformers computes it."""
    window: Positive | None = None
    """Tokens that a token sees, itself included; none: all before it."""

    def make_module(self, model: ModelConfig, output_std: float) -> GptOssMixer:
        """Return a new module, on the current device and with initial values."""
        config = GptOssConfig(
            hidden_size=model.hidden,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
            initializer_range=model.init_std,
            num_hidden_layers=1,
        )
        config._attn_implementation = "eager"
        return GptOssMixer(config, self.window, output_std)


def register(registry: Registry) -> None:
    """Give the mixer to megaframe."""
    registry.register(GptOssAttentionConfig)
