"""PyTorch's tensor parallelism over DTensor, applied to the GPT of `plain.py` as torchtitan does.

It has column and row parallel linears, a token table that is divided by the vocabulary and used
again as the head, and `loss_parallel` for the cross entropy. With `--sequence`, norms and residuals
work on parts of the sequence. The update runs on each rank's own parts, which avoids DTensor's
dispatch.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed
from plain import PlainGPT, make_optimizer
from ranks import measure, run
from tensor_workload import clip, make_parser
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from workload import WORKLOAD


class DividedGPT(PlainGPT):
    """Tokens are the same on all ranks. The residual stream is whole or, with `sequence`,
    divided."""

    def divide(self, mesh: DeviceMesh, sequence: bool) -> None:
        """Make the weights DTensors on the ranks of `mesh`."""
        self.mesh, self.stream = mesh, Shard(1) if sequence else Replicate()
        plan = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=self.stream),
            "blocks.*.query_key_value": ColwiseParallel(input_layouts=self.stream),
            "blocks.*.attention_output": RowwiseParallel(output_layouts=self.stream),
            "blocks.*.mlp_up": ColwiseParallel(input_layouts=self.stream),
            "blocks.*.mlp_down": RowwiseParallel(output_layouts=self.stream),
        }
        if sequence:
            plan |= {
                "norm": SequenceParallel(),
                "blocks.*.attention_norm": SequenceParallel(),
                "blocks.*.mlp_norm": SequenceParallel(),
            }
            rows = distribute_tensor(self.positions.weight.detach(), mesh, [Shard(0)])
            self.positions.weight = nn.Parameter(rows)
        parallelize_module(self, mesh, plan)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of next tokens; `tokens` and `targets` are [batch, seq]
        ids."""
        stream = self.tokens(tokens) + to_local(self.positions.weight)
        for block in self.blocks:
            stream = block(stream)
        normed = self.norm(stream)
        if not isinstance(normed, DTensor):
            normed = DTensor.from_local(normed, self.mesh, [self.stream])
        normed = normed.redistribute(placements=[Replicate()])
        logits = functional.linear(normed, self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class OwnParts(nn.Module):
    """This rank's parts of the weights, as ordinary parameters that share memory with them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = list(model.parameters())
        self.parts = nn.ParameterList(nn.Parameter(to_local(p.detach())) for p in self.weights)

    def take_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Move the gradients to the parts, summed over ranks if each rank has only a partial sum.
        Return those of divided weights and those of whole weights."""
        divided: list[Tensor] = []
        replicated: list[Tensor] = []
        for weight, part in zip(self.weights, self.parts, strict=True):
            gradient, weight.grad = weight.grad, None
            assert gradient is not None
            if isinstance(weight, DTensor):
                assert isinstance(gradient, DTensor)
                gradient = gradient.redistribute(placements=weight.placements)
            part.grad = to_local(gradient)
            split = isinstance(weight, DTensor) and weight.placements[0].is_shard()
            (divided if split else replicated).append(part.grad)
        return divided, replicated


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(WORKLOAD.seed)
    model = DividedGPT(WORKLOAD)
    model.divide(init_device_mesh("cpu", (arguments.ranks,)), arguments.sequence)
    parts = OwnParts(model)
    optimizer = make_optimizer(parts, WORKLOAD)

    def step() -> float:
        ids = torch.randint(WORKLOAD.vocab, (WORKLOAD.batch, WORKLOAD.seq + 1))
        with loss_parallel():
            with torch.autocast("cpu", torch.bfloat16, enabled=arguments.precision == "bf16"):
                loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
        clip(*parts.take_gradients(), WORKLOAD.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return to_local(loss).item()

    measure(step, arguments.steps, WORKLOAD.tokens_per_step, {"torch": torch.__version__})
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sequence", action="store_true", help="sequence parallel")
    arguments = parser.parse_args()
    run(train, arguments, arguments.ranks)


if __name__ == "__main__":
    main()
