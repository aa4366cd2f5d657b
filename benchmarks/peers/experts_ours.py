"""megaframe's layer of experts. Its overhead is what the layer takes beyond its experts alone, who
get the same rows in order: the router, the routes, and the way there and back."""

from __future__ import annotations

import statistics
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from experts_workload import SHAPES, answer, parser, report, seconds_of, tensors
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.mesh import Mesh
from megaframe.microbatch import Microbatch
from megaframe.nn.moe.layer import MixtureOfExperts
from megaframe.optim.optimizer import Optimizer
from megaframe.stage import whole_model

_ROUNDS = 4
"""Turns of the layer and of its experts alone."""


def main() -> None:
    given = parser(__doc__).parse_args()
    shape = SHAPES[given.shape]
    numbers = tensors(shape, given.precision)
    config = RunConfig(
        model={
            **{"layers": 1, "hidden": shape.hidden, "heads": 8, "vocab": 16, "position": "none"},
            "activation": "swiglu",
            "moe": {
                **{"experts": shape.experts, "top_k": shape.top_k, "ffn": shape.width},
                **{"score": "softmax", "balance": "none"},
            },
        },
        train={"seq": shape.tokens, "global_batch": 1, "precision": given.precision},
    )
    stage = whole_model(config)
    optimizer = Optimizer(config, Mesh(Layout(), device="cpu"), {0: stage.units})
    optimizer.initialise(0)
    layer = stage.blocks[0].mlp
    assert isinstance(layer, MixtureOfExperts)
    experts = layer.experts
    trained = (layer.router.weight, experts.up, experts.down)
    for parameter, value in zip(trained, (numbers.router, numbers.up, numbers.down), strict=True):
        parameter.value.copy_(value.view(parameter.value.shape))
    tokens = torch.zeros(1, shape.tokens, dtype=torch.int64)
    frame = stage._frame(Microbatch(tokens, tokens, torch.zeros(1, dtype=torch.int64)), None)
    x = numbers.x.requires_grad_()

    def step() -> Tensor:
        optimizer.start_step()
        x.grad = None
        out = layer(x, lambda rows: rows, frame)
        out.backward(numbers.d_out)
        return out.detach()

    loads = torch.bincount(layer.router(x.detach(), frame)[0].flatten(), minlength=shape.experts)
    rows = torch.randn(int(loads.sum()), shape.hidden).to(x.dtype).requires_grad_()
    gates = torch.rand(len(rows)).to(x.dtype).requires_grad_()
    d_rows = torch.randn_like(rows)

    def alone() -> None:
        optimizer.start_step()
        rows.grad = gates.grad = None
        experts(rows, gates, loads.tolist(), frame).backward(d_rows)

    whole: list[float] = []
    bare: list[float] = []
    for _ in range(_ROUNDS):
        whole += seconds_of(step, given.steps)
        bare += seconds_of(alone, given.steps)
    overhead = statistics.median(whole) / statistics.median(bare) - 1
    out = step()
    found = {
        parameter: piece
        for bucket in optimizer.buckets
        for parameter, _, piece in bucket.pieces(bucket.sums, bucket.kept)
    }
    loss = answer(out, x.grad, *(found[parameter] for parameter in trained))
    report(shape, whole, loss, {"torch": version("torch")}, overhead)


if __name__ == "__main__":
    main()
