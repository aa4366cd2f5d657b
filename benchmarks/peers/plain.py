"""The peer that anyone would write: a GPT of nn.Modules, autograd and torch's fused AdamW.

bf16 is autocast over fp32 weights, as in most training scripts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from workload import WORKLOAD, Workload, make_parser, run


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream [batch, seq, hidden]."""

    def __init__(self, shape: Workload) -> None:
        super().__init__()
        self.head_width = shape.hidden // shape.heads
        self.attention_norm = nn.LayerNorm(shape.hidden, bias=False)
        self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.attention_output = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.hidden, bias=False)
        self.mlp_up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.mlp_down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        fused = self.query_key_value(self.attention_norm(stream))
        by_head = fused.unflatten(-1, (-1, 3, self.head_width))
        query, key, value = by_head.permute(3, 0, 2, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).flatten(2)
        stream = stream + self.attention_output(attended)
        return stream + self.mlp_down(functional.gelu(self.mlp_up(self.mlp_norm(stream))))


class PlainGPT(nn.Module):
    """Token and position tables, blocks, a norm, and the token table again as the head."""

    def __init__(self, shape: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                output = name.endswith(("attention_output.weight", "mlp_down.weight"))
                shrink = math.sqrt(2 * shape.layers) if output else 1.0
                nn.init.normal_(parameter, std=shape.init_std / shrink)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of next tokens; `tokens` and `targets` are [batch, seq]
        ids."""
        stream = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits = functional.linear(self.norm(stream), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module, shape: Workload) -> torch.optim.Optimizer:
    """Return a fused AdamW that decays matrices and embeddings, but not norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": shape.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (shape.beta1, shape.beta2)
    return torch.optim.AdamW(groups, lr=shape.learning_rate, betas=betas, fused=True)


def main() -> None:
    command = make_parser(__doc__)
    command.add_argument("--compile", action="store_true", help="by torch.compile")
    arguments = command.parse_args()
    shape = WORKLOAD
    torch.manual_seed(shape.seed)
    model = PlainGPT(shape)
    optimizer = make_optimizer(model, shape)
    loss_of = torch.compile(model) if arguments.compile else model

    def step() -> float:
        ids = torch.randint(shape.vocab, (shape.batch, shape.seq + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.precision == "bf16"):
            loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    run(step, arguments.steps, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
