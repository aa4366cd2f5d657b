"""nanoGPT's own model and optimizer from a checkout, compiled, in the loop of its train.py.

nanoGPT's train.py turns autocast off on a CPU, whatever its dtype. bf16 here is the autocast that
it uses on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nanogpt_checkout import import_model, read_revision
from torch import nn
from workload import WORKLOAD, make_parser, run


def build(checkout: Path) -> Any:
    """Return nanoGPT's GPT in the shapes of the workload (its ffn is always 4 * hidden)."""
    module, shape = import_model(checkout), WORKLOAD
    return module.GPT(
        module.GPTConfig(
            block_size=shape.seq,
            vocab_size=shape.vocab,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.hidden,
            dropout=0.0,
            bias=False,
        )
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    arguments = parser.parse_args()
    shape = WORKLOAD
    torch.manual_seed(shape.seed)
    model = build(arguments.nanogpt)
    betas = (shape.beta1, shape.beta2)
    optimizer = model.configure_optimizers(shape.weight_decay, shape.learning_rate, betas, "cpu")
    compiled = torch.compile(model)

    def step() -> float:
        ids = torch.randint(shape.vocab, (shape.batch, shape.seq + 1))
        tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.precision == "bf16"):
            _, loss = compiled(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    run(
        step,
        arguments.steps,
        {"torch": torch.__version__, "nanogpt": read_revision(arguments.nanogpt)},
    )


if __name__ == "__main__":
    main()
