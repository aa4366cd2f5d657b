"""A naive layer of experts: a module for each expert, and a loop over them."""

from __future__ import annotations

from importlib.metadata import version

import torch
import torch.nn.functional as F
from experts_workload import (
    SHAPES,
    WARM_UP,
    answer,
    draw_tensors,
    make_parser,
    measure_seconds,
    read_peak_bytes,
    report,
)
from torch import Tensor, nn


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Softmax over the chosen experts' logits, and the weighted sum of their outputs."""

    def __init__(self, hidden: int, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.router(x).float(), -1)
        weights, chosen = scores.topk(self.top_k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, choice = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                out.index_add_(0, row, expert(x[row]) * weights[row, choice, None])
        return out


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    shape = SHAPES[arguments.shape]
    numbers = draw_tensors(shape, arguments.precision)
    layer = Layer(shape.hidden, shape.width, shape.experts, shape.top_k).to(numbers.x.dtype)
    with torch.no_grad():
        layer.router.weight.copy_(numbers.router)
        for index, expert in enumerate(layer.experts):
            assert isinstance(expert, Expert)
            gate, up = numbers.up[index].chunk(2)
            expert.gate.weight.copy_(gate)
            expert.up.weight.copy_(up)
            expert.down.weight.copy_(numbers.down[index])
    x = numbers.x.requires_grad_()

    def step() -> Tensor:
        layer.zero_grad()
        x.grad = None
        out = layer(x)
        out.backward(numbers.d_out)
        return out.detach()

    seconds = measure_seconds(step, arguments.steps, x, WARM_UP)
    peak_bytes = read_peak_bytes()
    out = step()
    gate, up, down = (
        torch.stack([getattr(expert, name).weight.grad for expert in layer.experts])
        for name in ("gate", "up", "down")
    )
    gate_up = torch.stack((gate, up), 1)
    loss = answer(out, x.grad, layer.router.weight.grad, gate_up, down)
    report(shape, seconds, peak_bytes, loss, {"torch": version("torch")})


if __name__ == "__main__":
    main()
