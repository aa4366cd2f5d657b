"""The same model in plain PyTorch: modules, autocast to bf16, torch's attention and fused AdamW.

Each block is compiled by torch.compile, as its authors compile large models, and so are head and
loss together. Experts are sorted by a stable argsort and multiplied by torch's grouped product,
without a wait of the host.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from gpu_workload import make_batches, read, run
from torch import Tensor, nn
from torch.nn import functional

from megaframe.architecture.activation import GATED
from megaframe.config import ModelConfig
from megaframe.config.registry import get_part_name


class TorchNorm(nn.Module):
    """LayerNorm or RMSNorm by torch."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.kind, self.eps = model.norm, model.norm_eps
        self.gain = nn.Parameter(torch.ones(model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rmsnorm":
            return functional.rms_norm(x, self.gain.shape, self.gain.to(x.dtype), self.eps)
        return functional.layer_norm(x, self.gain.shape, self.gain.to(x.dtype), None, self.eps)


class TorchAttention(nn.Module):
    """Causal attention with grouped heads, and with rotary positions if the model has them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelConfig, seq: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = model.heads, model.kv_heads, model.head_dim
        outputs = (model.heads + 2 * model.kv_heads) * model.head_dim
        self.qkv = nn.Linear(model.hidden, outputs, bias=False)
        self.output = nn.Linear(model.heads * model.head_dim, model.hidden, bias=False)
        self.rotary = model.position == "rotary"
        rate = model.rotary_base ** -(torch.arange(0, self.width, 2).float() / self.width)
        angle = torch.arange(seq).float()[:, None] * rate
        self.register_buffer("cos", torch.cat((angle.cos(), angle.cos()), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-angle.sin(), angle.sin()), -1), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        swapped = torch.cat(x.chunk(2, -1)[::-1], -1)
        return x * self.cos.to(x.dtype) + swapped * self.sin.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.heads, self.groups, self.groups)
        by_head = self.qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        query, key, value = by_head.split(sizes, 1)
        if self.rotary:
            query, key = self.turn(query), self.turn(key)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads > self.groups
        )
        return self.output(attended.transpose(1, 2).flatten(2))


def activate(kind: str, x: Tensor) -> Tensor:
    if kind == "swiglu":
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up
    if kind not in ("gelu", "gelu_tanh"):
        raise ValueError(f"the plain model has no activation {kind}, only swiglu, gelu, gelu_tanh")
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


class TorchMLP(nn.Module):
    """Plain or gated MLP."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.kind = get_part_name(model.activation)
        wide = model.ffn * (2 if model.activation in GATED else 1)
        self.up = nn.Linear(model.hidden, wide, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activate(self.kind, self.up(x)))


class TorchExperts(nn.Module):
    """The k best experts of a softmax, with weights normalised to sum to one."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.moe is not None
        self.kind, self.k = get_part_name(model.activation), model.moe.top_k
        count, wide = model.moe.experts, model.moe.ffn or model.ffn
        outer = wide * (2 if model.activation in GATED else 1)
        self.router = nn.Linear(model.hidden, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, outer, model.hidden))
        self.down = nn.Parameter(torch.empty(count, model.hidden, wide))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        best = self.router(flat).float().softmax(-1).topk(self.k, -1)
        gates = best.values / best.values.sum(-1, keepdim=True)
        chosen = best.indices.flatten()
        order = chosen.argsort(stable=True)
        ends = functional.one_hot(chosen, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        kind = torch.bfloat16
        rows = flat[order // self.k].to(kind)
        inner = functional.grouped_mm(rows, self.up.to(kind).mT, offs=ends)
        inner = activate(self.kind, inner)
        outputs = functional.grouped_mm(inner, self.down.to(kind).mT, offs=ends)
        outputs = outputs * gates.flatten()[order, None].to(kind)
        home = torch.empty_like(outputs).index_copy(0, order, outputs)
        return home.unflatten(0, (-1, self.k)).sum(1).view(x.shape)


class TorchBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, model: ModelConfig, seq: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = TorchNorm(model), TorchNorm(model)
        self.attention = TorchAttention(model, seq)
        self.mlp = TorchMLP(model) if model.moe is None else TorchExperts(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TorchHead(nn.Module):
    """Final norm, logits and mean cross-entropy."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = TorchNorm(model)

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(self.norm(x), weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TorchGPT(nn.Module):
    """Tables, blocks and head."""

    def __init__(self, model: ModelConfig, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab or 1, model.hidden)
        self.positions = nn.Embedding(seq, model.hidden) if model.position == "learned" else None
        self.blocks = nn.ModuleList(TorchBlock(model, seq) for _ in range(model.layers))
        self.head = TorchHead(model)
        self.logits = self.tokens
        if not model.tie_embeddings:
            self.logits = nn.Embedding(model.vocab or 1, model.hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=model.init_std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x, self.logits.weight, targets)


def main() -> None:
    config, device, _ = read()
    train, optim = config.train, config.optim
    with device:
        model = TorchGPT(config.model, train.seq)
    if config.train.compile != "none" or device.type == "cuda":
        for part in (*model.blocks, model.head):
            part.compile(dynamic=False)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas, decay = (optim.beta1, optim.beta2), optim.weight_decay
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, weight_decay=decay, fused=True)
    make, count = make_batches(config, device), train.global_batch // train.microbatch

    def step() -> Tensor:
        losses = []
        for _ in range(count):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(*make())
            (loss / count).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), optim.clip, foreach=True)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    made_of = ["torch.compile of each block", "autocast", "fused AdamW"]
    print(json.dumps(run(step, config, device, made_of)))


if __name__ == "__main__":
    main()
