"""megaframe's ring attention."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from context_workload import answer, draw_own_parts, make_parser
from ranks import measure, run

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megaframe.context_parallel.ring import ring_attention
from megaframe.context_parallel.ring_mask import RingMask
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.ops.attention_mask import AttentionMask


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    mesh = Mesh(Layout(context=arguments.ranks), device="cpu")
    _, ring = mesh.divide_context(1)
    ring_mask = RingMask(ring, arguments.seq // arguments.ranks, AttentionMask(None, None), None)
    *qkv, d_out = draw_own_parts(arguments, torch.distributed.get_rank())
    query, key, value = leaves = [part.requires_grad_() for part in qkv]

    def step() -> float:
        out = ring_attention(query, key, value, ring_mask)
        return answer(out.detach(), *torch.autograd.grad(out, leaves, d_out))

    measure(step, arguments.steps, arguments.seq, {"torch": version("torch")})
    mesh.close()


if __name__ == "__main__":
    arguments = make_parser(__doc__).parse_args()
    run(train, arguments, arguments.ranks)
