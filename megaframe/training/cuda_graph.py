"""StepGraph: all passes of a step as one CUDA graph, which the host starts with one call.

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
from megaframe.data.microbatch import Microbatch, TokensAhead
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.nccl_settings import launch_order_problem
from megaframe.distributed.traffic import CapturedTransfers
from megaframe.errors import UserError
from megaframe.ops.kernel_dispatch import Kernels
from megaframe.pipeline_parallel.executor import PipelineOutput
from megaframe.validate.cuda_graph import find_graph_obstacles

_EAGER = 2
"""Number of steps of each kind that run without a graph first. They create whatever is created only
once."""
_MOST = 4
"""Maximum number of graphs that a run keeps."""


Compute = Callable[[Sequence[Microbatch], Tensor], PipelineOutput]
"""Runs all passes of a step over its microbatches, with gradients multiplied by the given
scalar."""
Record = Callable[[Callable[[], PipelineOutput]], tuple[PipelineOutput, Callable[[], None]]]
"""Records what a function launches. Returns the function's result, and a function that runs the
recorded work again and overwrites that result. Whether the work also runs while it is recorded
makes no difference."""


def record_cuda(compute: Callable[[], PipelineOutput]) -> tuple[PipelineOutput, Callable[[], None]]:
    """Record with torch's CUDA graphs, which share their memory because they run one after the
    other. Threads that save checkpoints continue meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_get_memory_pool(), capture_error_mode="thread_local"):
        output = compute()
    return output, graph.replay


@cache
def _get_memory_pool() -> Any:
    return torch.cuda.graph_pool_handle()


@dataclass(frozen=True)
class _RecordedGraph:
    """A graph. inputs: what it reads. output: what it writes. transfers: those in it."""

    inputs: Sequence[Tensor]
    output: PipelineOutput
    replay: Callable[[], None]
    transfers: CapturedTransfers


class StepGraph:
    """Runs the passes of steps as CUDA graphs, one for each kind of shapes."""

    def __init__(
        self, mesh: Mesh, note: Callable[[str], None], record: Record = record_cuda
    ) -> None:
        """Start without graphs.

        Args:
            mesh: This rank's groups.
            note: Called with a line to show.
            record: Makes a graph.
        """
        self._mesh, self._note, self._record = mesh, note, record
        self._graphs: dict[Any, _RecordedGraph] = {}
        self._eager_runs: dict[Any, int] = {}
        self._has_told = False
        mesh.before_close.append(self._graphs.clear)  # graphs must release NCCL's groups first

    def run(
        self, compute: Compute, microbatches: Sequence[Microbatch], scale: Tensor
    ) -> PipelineOutput:
        """Return what `compute` returns for the microbatches and the scale, an fp64 scalar. After
        the first steps of a kind, record a graph and replay it.

        Args:
            compute: Runs the passes of a step.
            microbatches: Of the step.
            scale: Of the gradients.
        """
        kind = tuple(_list_shapes(microbatch) for microbatch in microbatches)
        graph = self._graphs.get(kind)
        if graph is not None:
            for buffer, x in zip(graph.inputs, _list_inputs(microbatches, scale), strict=True):
                buffer.copy_(x, non_blocking=True)
            graph.transfers.replay(graph.replay)
            return _copy_output(graph.output)
        runs = self._eager_runs[kind] = self._eager_runs.get(kind, 0) + 1
        if runs <= _EAGER:
            return compute(microbatches, scale)
        if len(self._graphs) == _MOST:
            self._tell_once(f"there are {_MOST} graphs for other shapes")
            return compute(microbatches, scale)
        inputs = [_copy_microbatch(microbatch) for microbatch in microbatches]
        input_scale = scale.clone()
        with self._mesh.capture_transfers("the graph of all passes") as transfers:
            output, replay = self._record(lambda: compute(inputs, input_scale))
        self._graphs[kind] = _RecordedGraph(
            _list_inputs(inputs, input_scale), output, replay, transfers
        )
        transfers.replay(replay)
        return _copy_output(output)

    def _tell_once(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._note(f"train.cuda_graph: {why}; some steps run without one")


def check_cuda_graph(config: RunConfig, mesh: Mesh, kernels: Kernels) -> None:
    """Raise `UserError`, with every reason, if the passes of a step cannot be a graph here."""
    reasons = [*find_graph_obstacles(config, mesh.layout.sizes)]
    if mesh.device.type != "cuda":
        reasons.append(f"CUDA graphs need a GPU, and this runs on a {mesh.device.type}")
    elif mesh.num_communicators > 1 and (reason := launch_order_problem()):
        reasons.append(f"the passes use {mesh.num_communicators} communicators, and {reason}")
    if config.model.moe is not None:
        needed = {"experts": "grouped_product"}
        if config.train.fp8 != "none":
            needed["fp8"] = "quantise_columns"
        reasons += [
            f"model.moe: the host distributes tokens without the kernels of kernels.{key}"
            for key, kernel in needed.items()
            if not kernels.has(kernel)
        ]
    if reasons:
        raise UserError("\n  ".join(["train.cuda_graph=true cannot work here", *reasons]))


def _list_shapes(microbatch: Microbatch) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.dtype) for x in _list_tensors(microbatch))


def _list_inputs(microbatches: Sequence[Microbatch], scale: Tensor) -> list[Tensor]:
    return [*(x for microbatch in microbatches for x in _list_tensors(microbatch)), scale]


def _list_tensors(microbatch: Microbatch) -> list[Tensor]:
    fields = [x for x in vars(microbatch).values() if isinstance(x, Tensor)]
    return fields + [x for far in microbatch.ahead for x in far if x is not None]


def _copy_microbatch(microbatch: Microbatch) -> Microbatch:
    fields: dict[str, Any] = {
        name: x.clone() for name, x in vars(microbatch).items() if isinstance(x, Tensor)
    }
    ahead = tuple(TokensAhead(*map(_clone, far)) for far in microbatch.ahead)
    return replace(microbatch, **fields, ahead=ahead)


def _clone(x: Any) -> Any:
    return None if x is None else x.clone()


def _copy_output(output: PipelineOutput) -> PipelineOutput:
    """Return a copy in memory that no graph writes."""
    return PipelineOutput(
        output.loss.clone(),
        output.mtp_loss.clone(),
        [replace(maximum, largest=maximum.largest.clone()) for maximum in output.maxima],
        [statistics.copy() for statistics in output.statistics],
    )
