"""megaframe's layer of experts. Its overhead is the time of the layer minus that of its experts
alone on the same number of sorted rows: the router, the routes, and moving the rows there and back.
"""

from __future__ import annotations

import statistics
import sys
from importlib.metadata import version
from pathlib import Path

import torch
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megaframe.architecture.spec import Box
from megaframe.config import ModelConfig, MoEConfig, RunConfig, TrainConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.device import tune_host_allocator
from megaframe.expert_parallel.transfer import ExpertRows, SelectRows
from megaframe.model.autotune import tune
from megaframe.model.block import TransformerBlock
from megaframe.model.moe.layer import MixtureOfExperts
from megaframe.parameters.initialization import fill_initial_values
from megaframe.parameters.parameter import PRECISIONS, Module
from megaframe.pipeline_parallel.stage import build_whole_model

_ROUNDS = 4
"""How often the layer and its experts alone take turns."""


def bind(module: Module, precision: str) -> None:
    """Give parameters values and gradient buffers, as an optimizer would; a real one also holds its
    own state and weights."""
    types = PRECISIONS[precision]
    for parameter in module.parameters():
        shape = parameter.spec.shape
        box = Box((0,) * len(shape), shape)
        parameter.bind(box, lambda: None)
        parameter.value = torch.empty(shape, dtype=types.compute)
        parameter.grad = torch.empty(shape, dtype=types.master)
        fill_initial_values(parameter.value, parameter.spec, box, seed=0)


def main() -> None:
    tune_host_allocator()  # as at the start of a run
    arguments = make_parser(__doc__).parse_args()
    shape = SHAPES[arguments.shape]
    numbers = draw_tensors(shape, arguments.precision)
    moe = MoEConfig(
        experts=shape.experts,
        top_k=shape.top_k,
        ffn=shape.width,
        score="softmax",
        balance="none",
    )
    config = RunConfig(
        model=ModelConfig(
            layers=1,
            hidden=shape.hidden,
            heads=8,
            vocab=16,
            position="none",
            activation="swiglu",
            moe=moe,
        ),
        train=TrainConfig(seq=shape.tokens, global_batch=1, precision=arguments.precision),
    )
    tune(config.run, config.train, config.kernels, None)
    stage = build_whole_model(config)
    (block,) = stage.blocks
    assert isinstance(block, TransformerBlock)
    layer = block.mlp
    assert isinstance(layer, MixtureOfExperts)
    bind(layer, arguments.precision)
    experts = layer.experts
    trained = (layer.router.weight, experts.up, experts.down)
    for parameter, value in zip(trained, (numbers.router, numbers.up, numbers.down), strict=True):
        parameter.value.copy_(value.view(parameter.value.shape))
    tokens = torch.zeros(1, shape.tokens, dtype=torch.int64)
    microbatch = Microbatch(tokens, tokens, torch.zeros(1, dtype=torch.int64))
    inputs, state = stage.make_inputs(microbatch), stage.make_pass_state()
    x = numbers.x.requires_grad_()

    def start_step() -> None:
        for parameter in layer.parameters():
            parameter.fresh = True

    def step() -> Tensor:
        start_step()
        x.grad = None
        out = layer(x, None, inputs, state)
        out.backward(numbers.d_out)
        for parameter in trained:
            parameter.finish()
        return out.detach()

    step_seconds = measure_seconds(step, arguments.steps, x, WARM_UP)
    peak_bytes = read_peak_bytes()

    chosen, _ = layer.router(x.detach(), inputs, state)
    loads = torch.bincount(chosen.flatten(), minlength=shape.experts)
    expert_rows = ExpertRows(loads.cumsum(0, dtype=torch.int32), loads.tolist())
    rows = torch.randn(int(loads.sum()), shape.hidden).to(x.dtype).requires_grad_()
    order = SelectRows(torch.arange(len(rows)), len(rows))
    gates = torch.rand(len(rows)).to(x.dtype).requires_grad_()
    d_rows = torch.randn_like(rows)

    def run_experts_alone() -> None:
        start_step()
        rows.grad = gates.grad = None
        experts(rows, gates, order, expert_rows, state).backward(d_rows)

    bare = measure_seconds(run_experts_alone, arguments.steps)
    for _ in range(_ROUNDS - 1):
        step_seconds += measure_seconds(step, arguments.steps, x)
        bare += measure_seconds(run_experts_alone, arguments.steps)
    overhead = statistics.median(step_seconds) / statistics.median(bare) - 1
    out = step()
    loss = answer(out, x.grad, *(parameter.grad for parameter in trained))
    report(shape, step_seconds, peak_bytes, loss, {"torch": version("torch")}, overhead)


if __name__ == "__main__":
    main()
