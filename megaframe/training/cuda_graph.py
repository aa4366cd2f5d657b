"""Graph: all passes of a step as one CUDA graph, which the host starts with one call.

A graph is made for the shapes of a step's microbatches. Before each run, their tensors and the
scale of the gradients are copied to the buffers that the graph reads. Its results always lie in the
same memory, so those that outlive the step are copied. The update is not part of the graph, because
the host computes the learning rate and the number of the step.

Transfers are part of the graph, in the order in which all ranks start them. Those started outside
of it have been waited for before it runs, and those started inside are waited for inside. Whether a
step is recorded, replayed or neither depends only on what is the same on all ranks, so all ranks do
the same, as NCCL requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.nccl_settings import launch_order_problem
from megaframe.distributed.traffic import CapturedTransfers
from megaframe.errors import UserError
from megaframe.model.pass_state import LayerStatistics
from megaframe.ops.kernel_dispatch import Kernels
from megaframe.pipeline_parallel.nonfinite import Sign
from megaframe.validate.cuda_graph import graph_reasons

_EAGER = 2
"""Number of steps of each kind that run without a graph first. They create whatever is created only
once."""
_MOST = 4
"""Maximum number of graphs that a run keeps."""


@dataclass(frozen=True)
class Passed:
    """The results of all passes of a step, with the fields of `Outcome`."""

    loss: Tensor
    ahead: Tensor
    signs: Sequence[Sign]
    tallies: Sequence[LayerStatistics]

    def copied(self) -> Passed:
        """Return a copy in memory that no graph writes."""
        return Passed(
            self.loss.clone(),
            self.ahead.clone(),
            [replace(sign, largest=sign.largest.clone()) for sign in self.signs],
            [tally.copy() for tally in self.tallies],
        )


Compute = Callable[[Sequence[Microbatch], Tensor], Passed]
"""Runs all passes of a step over its microbatches, with gradients multiplied by the given
scalar."""
Record = Callable[[Callable[[], Passed]], tuple[Passed, Callable[[], None]]]
"""Records what a function launches. Returns the function's result, and a function that runs the
recorded work again and overwrites that result. Whether the work also runs while it is recorded
makes no difference."""


def record_cuda(compute: Callable[[], Passed]) -> tuple[Passed, Callable[[], None]]:
    """Record with torch's CUDA graphs, which share their memory because they run one after the
    other. Threads that save checkpoints continue meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        passed = compute()
    return passed, graph.replay


@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


@dataclass(frozen=True)
class _Recorded:
    inputs: Sequence[Tensor]
    passed: Passed
    run: Callable[[], None]
    told: CapturedTransfers


class Graph:
    """Runs the passes of steps as graphs, one for each kind of shapes. record: makes a graph. tell:
    is given a line to show."""

    def __init__(
        self, mesh: Mesh, tell: Callable[[str], None], record: Record = record_cuda
    ) -> None:
        self._mesh, self._tell, self._record = mesh, tell, record
        self._recorded: dict[Any, _Recorded] = {}
        self._met: dict[Any, int] = {}
        self._told = False
        mesh.before_close.append(self._recorded.clear)  # graphs must release NCCL's groups first

    def run(self, compute: Compute, microbatches: Sequence[Microbatch], scale: Tensor) -> Passed:
        """Return what `compute` returns for the microbatches and the scale, an fp64 scalar. After
        the first steps of a kind, record a graph and replay it."""
        kind = tuple(_kind_of(one) for one in microbatches)
        found = self._recorded.get(kind)
        if found is not None:
            for into, x in zip(found.inputs, _inputs(microbatches, scale), strict=True):
                into.copy_(x, non_blocking=True)
            found.told.replay(found.run)
            return found.passed.copied()
        times = self._met[kind] = self._met.get(kind, 0) + 1
        if times <= _EAGER:
            return compute(microbatches, scale)
        if len(self._recorded) == _MOST:
            self._say(f"there are {_MOST} graphs for other shapes")
            return compute(microbatches, scale)
        copies, scaling = [_copied(one) for one in microbatches], scale.clone()
        with self._mesh.capture_transfers("the graph of all passes") as told:
            passed, run = self._record(lambda: compute(copies, scaling))
        self._recorded[kind] = _Recorded(_inputs(copies, scaling), passed, run, told)
        told.replay(run)
        return passed.copied()

    def _say(self, why: str) -> None:
        if not self._told:
            self._told = True
            self._tell(f"train.cuda_graph: {why}; some steps run without one")


def refuse(config: RunConfig, mesh: Mesh, kernels: Kernels) -> None:
    """Raise `UserError`, with every reason, if the passes of a step cannot be a graph here."""
    found = [*graph_reasons(config, mesh.layout.sizes)]
    if mesh.device.type != "cuda":
        found.append(f"CUDA graphs need a GPU, and this runs on a {mesh.device.type}")
    elif mesh.num_communicators > 1 and (reason := launch_order_problem()):
        found.append(f"the passes use {mesh.num_communicators} communicators, and {reason}")
    if config.model.moe is not None:
        needed = {"experts": "grouped_product"}
        if config.train.fp8 != "none":
            needed["fp8"] = "quantise_columns"
        found += [
            f"model.moe: the host distributes tokens without the kernels of kernels.{key}"
            for key, kernel in needed.items()
            if not kernels.has(kernel)
        ]
    if found:
        raise UserError("\n  ".join(["train.cuda_graph=true cannot work here", *found]))


def _kind_of(microbatch: Microbatch) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.dtype) for x in _tensors(microbatch))


def _inputs(microbatches: Sequence[Microbatch], scale: Tensor) -> list[Tensor]:
    return [*(x for one in microbatches for x in _tensors(one)), scale]


def _tensors(microbatch: Microbatch) -> list[Tensor]:
    of_itself = [x for x in vars(microbatch).values() if isinstance(x, Tensor)]
    return of_itself + [x for pair in microbatch.ahead for x in pair]


def _copied(microbatch: Microbatch) -> Microbatch:
    changed: dict[str, Any] = {
        name: x.clone() for name, x in vars(microbatch).items() if isinstance(x, Tensor)
    }
    ahead = tuple((tokens.clone(), labels.clone()) for tokens, labels in microbatch.ahead)
    return replace(microbatch, **changed, ahead=ahead)
