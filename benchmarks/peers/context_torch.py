"""PyTorch's context parallel attention.

As it is (`--as-is`), `torch.distributed.tensor.experimental.context_parallel` only supports the
fused kernels of GPUs. This contender is its ring, `_templated_ring_attention` and the backward of
that, unchanged, with torch's fused kernel for CPUs. `--rotate` selects how keys and values travel:
all gathered at once, which is torch's default, or passed on by an all-to-all.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed
from context_workload import answer, draw_own_parts, make_parser
from ranks import measure, run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.nn import functional

SEQ = 2
"""The dim of the tokens, [1, heads, S, width]."""


def forward_on_cpu(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return one tile's output and log-sum-exp.

    Args:
        kwargs: is_causal.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, 0.0, kwargs["is_causal"])


def backward_on_cpu(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return one tile's gradients.

    Args:
        kwargs: grad_out, out, logsumexp, is_causal.
    """
    attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    forward = (query, key, value, kwargs["out"], kwargs["logsumexp"])
    return attend_backward(kwargs["grad_out"], *forward, 0.0, kwargs["is_causal"])


class TorchRing(torch.autograd.Function):
    """PyTorch's ring over all ranks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = torch.distributed.group.WORLD
        assert group is not None
        out, lse = _templated_ring_attention(
            group, SEQ, forward_on_cpu, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        group = torch.distributed.group.WORLD
        assert group is not None
        return _templated_ring_attention_backward(
            group,
            SEQ,
            backward_on_cpu,
            gradients[0],
            "grad_out",
            query,
            key,
            value,
            out,
            lse,
            is_causal=True,
        )


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    torch.distributed.init_process_group("gloo")
    parts = draw_own_parts(arguments, torch.distributed.get_rank())
    *qkv, d_out = (part.transpose(1, SEQ).contiguous() for part in parts)
    leaves = [part.requires_grad_() for part in qkv]
    if arguments.as_is:
        full_sequences = [torch.randn_like(part).repeat(1, 1, arguments.ranks, 1) for part in parts]
        mesh = init_device_mesh("cpu", (arguments.ranks,))
        with context_parallel(
            mesh, buffers=full_sequences, buffer_seq_dims=[SEQ] * len(full_sequences)
        ):
            query, key, value, _ = full_sequences
            functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    _attention.set_rotate_method(arguments.rotate)

    def step() -> float:
        out = TorchRing.apply(*leaves)
        return answer(out.detach(), *torch.autograd.grad(out, leaves, d_out))

    measure(step, arguments.steps, arguments.seq, {"torch": torch.__version__})
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rotate", choices=("allgather", "alltoall"), default="allgather")
    parser.add_argument("--as-is", action="store_true", help="show what it says on a CPU")
    arguments = parser.parse_args()
    run(train, arguments, arguments.ranks)


if __name__ == "__main__":
    main()
