"""The Mixtral block of Hugging Face transformers, with its default way of computing experts."""

from __future__ import annotations

from importlib.metadata import version

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
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--implementation", help="of the experts: eager, batched_mm, grouped_mm")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    numbers = draw_tensors(shape, arguments.precision)
    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    if arguments.implementation:
        config._experts_implementation = arguments.implementation
    layer = MixtralSparseMoeBlock(config).to(numbers.x.dtype)
    with torch.no_grad():
        layer.gate.weight.copy_(numbers.router)
        layer.experts.gate_up_proj.copy_(numbers.up)
        layer.experts.down_proj.copy_(numbers.down)
    x = numbers.x[None].requires_grad_()

    def step() -> Tensor:
        layer.zero_grad()
        x.grad = None
        out = layer(x)
        out.backward(numbers.d_out[None])
        return out.detach()

    seconds = measure_seconds(step, arguments.steps, x, WARM_UP)
    peak_bytes = read_peak_bytes()
    out = step()
    experts = layer.experts
    gradients = (layer.gate.weight.grad, experts.gate_up_proj.grad, experts.down_proj.grad)
    versions = {name: version(name) for name in ("torch", "transformers")}
    report(shape, seconds, peak_bytes, answer(out, x.grad, *gradients), versions)


if __name__ == "__main__":
    main()
