"""megatron-core's tensor parallel GPTModel on CPUs, over gloo; with `--sequence` also sequence
parallel.

The model and the replacements for a CUDA device are those of `megatron_core.py`. Its asynchronous
all-reduce, which overlaps with the weight gradient, is on, as it is by default.
"""

from __future__ import annotations

import argparse
import warnings
from importlib.metadata import version

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron_core import MainWeights, build, replace_cuda
from ranks import measure, run
from tensor_workload import clip, make_parser
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from workload import WORKLOAD


class DividedWeights(MainWeights):
    """A rank has a part of each divided weight. Gradients of weights that run on parts of the
    sequence are summed over the ranks, as in megatron's `finalize_model_grads`."""

    def clip_gradients(self) -> None:
        """Clip at the norm over all ranks."""
        divided: list[Tensor] = []
        replicated: list[Tensor] = []
        shares: list[Tensor] = []
        for weight, main in zip(self.weights, self.main, strict=True):
            assert main.grad is not None
            (divided if getattr(weight, "tensor_model_parallel", False) else replicated).append(
                main.grad
            )
            if getattr(weight, "sequence_parallel", False):
                shares.append(main.grad)
        if shares:
            flat = _flatten_dense_tensors(shares)
            torch.distributed.all_reduce(flat)
            for share, total in zip(shares, _unflatten_dense_tensors(flat, shares), strict=True):
                share.copy_(total)
        clip(divided, replicated, self.clip)


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    warnings.filterwarnings("ignore", module="megatron")
    replace_cuda()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=arguments.ranks)
    torch.manual_seed(WORKLOAD.seed)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    model = build(
        WORKLOAD,
        dtype,
        tensor_model_parallel_size=arguments.ranks,
        sequence_parallel=arguments.sequence,
    )
    optimizer = DividedWeights(model, WORKLOAD)
    positions = torch.arange(WORKLOAD.seq).expand(WORKLOAD.batch, -1)

    def step() -> float:
        ids = torch.randint(WORKLOAD.vocab, (WORKLOAD.batch, WORKLOAD.seq + 1))
        tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        loss = model(tokens, positions, None, labels=targets).float().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    versions = {"torch": torch.__version__, "megatron-core": version("megatron-core")}
    measure(step, arguments.steps, WORKLOAD.tokens_per_step, versions)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sequence", action="store_true", help="sequence parallel")
    arguments = parser.parse_args()
    run(train, arguments, arguments.ranks)


if __name__ == "__main__":
    main()
