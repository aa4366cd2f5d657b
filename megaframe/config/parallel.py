"""Division of the work over ranks: keys of `parallel`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.parts import PipelineSchedulePart
from megaframe.config.registry import Extensible
from megaframe.config.section import NonNegative, Positive, Section


class ParallelConfig(Section):
    """The layout: sizes of the axes, and how ranks divide work and communicate."""

    auto: bool = False
    """Let the planner choose the layout for the available ranks: every key from `tensor` to
    `schedule` here that is not given, `train.microbatch` and `train.recompute`. A resumed run keeps
    the layout it began with."""
    cluster: str | None = None
    """Description of the cluster to plan for: a name from `configs/clusters`, or a path. Default:
    the likely one for the device, with its memory; of an unknown device only memory is planned.
    tools/plan.py assumes h100-ib."""
    tensor: Positive = 1
    """Tensor-parallel ranks. They split each matrix and, outside the matrices, the sequence."""
    tensor_chunks: Positive = 1
    """Number of parts in which rows are exchanged between tensor ranks. The product of one part
    overlaps with gathering the next or summing the previous one."""
    symmetric_memory: Literal["auto", "off"] = "off"
    """`auto` overlaps communication with forward products by PyTorch's fused operators, instead of
    `tensor_chunks`, on NVIDIA GPUs of one node that support them. Not yet run on such a machine."""
    context: Positive = 1
    """Context-parallel ranks. They split each sample."""
    context_kind: Literal["ring", "all_to_all", "nested"] = "ring"
    """How attention sees tokens on other context ranks. `ring` passes keys and values around a
    ring. `all_to_all` exchanges heads for tokens. `nested` uses `all_to_all` among neighbours and
    `ring` between groups of neighbours."""
    context_heads: Positive | None = None
    """nested: number of neighbours that exchange heads for tokens; divides `context`."""
    pipeline: Positive = 1
    """Pipeline-parallel ranks. They split the layers into stages."""
    chunks: Positive = 1
    """Stages per pipeline rank (virtual pipeline). With more than one, `schedule` is interleaved
    unless it is given."""
    data: Positive | None = None
    """Data-parallel ranks. They split the batch. Default: the ranks left over by the other axes."""
    data_replicate: Positive = 1
    """Number of replicas of a shard group (hybrid sharding); divides `data`."""
    islands: Positive = 1
    """Islands of data ranks for slow links: gradients are summed within an island only, and the
    section `sync` says how islands exchange weights. Divides `data`. An island is consecutive
    ranks, and with `data_replicate` each island has that many replicas."""
    expert: Positive = 1
    """Expert-parallel ranks. They split the experts."""
    expert_tensor: Positive = 1
    """Ranks that split each expert's matrices."""
    dispatch: Literal["all_to_all", "all_gather", "hierarchical", "deduplicated"] = "all_to_all"
    """How tokens reach their experts. `all_to_all` sends them directly. `all_gather` sends every
    token to all ranks of the expert axis, for a small axis. `hierarchical` exchanges within a node
    first and then between nodes, in fewer and larger messages. `deduplicated` sends each token once
    to each node and distributes it there."""
    expert_overlap: bool = False
    """Interleave a forward pass with the backward pass that follows it in the schedule, so that one
    computes while the tokens of the other are in transit. Interleaved and V-shaped schedules have
    such pairs."""
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    """What data ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights. With
    one data rank there is nothing to shard, and 1 is the same as 0."""
    reduce_precision: Literal["master", "bf16"] = "master"
    """Type in which gradients are reduced. `master` keeps their own type. `bf16` sends half the
    bytes and sums in master precision, over many ranks in steps, which round once each; with
    `zero=0` the sums come back in bf16."""
    compress: Literal[
        "none", "fp16", "int8", "int4", "topk", "randomk", "threshold", "powersgd"
    ] = "none"
    """Gradient compression for matrices, between replicas, or between all data ranks if there is
    one replica: `fp16`, `int8` and `int4` in blocks with a scale each, `topk` the largest elements,
    `randomk` as many at random, `threshold` the elements that are large beside the root mean
    square, at most as many, `powersgd` low-rank factors. The compression error is added to the next
    step's gradients."""
    compress_keep: Annotated[float, Field(gt=0)] | None = None
    """How much of a gradient is sent. topk, randomk, threshold: share of its elements (threshold:
    at most), 0.01 by default. powersgd: number of columns of the factors, 4 by default."""
    bucket_size: Positive | Literal["auto"] = "auto"
    """Elements of a rank's matrices that are at least reduced, updated and gathered together, in
    whole blocks; half a block if that has as many. `auto`: as many as balance the latency of the
    collectives and the part that nothing hides, by the number of data ranks and the links of
    `parallel.cluster`; at most a block with `zero` 2 and 3."""
    node_size: Positive | None = None
    """Ranks per node. Tensor ranks on several nodes give a warning. Default: the number of ranks
    that the launcher starts on this node."""
    schedule: Annotated[str | PipelineSchedulePart, Extensible("pipeline_schedule")] = Field(
        default_factory=lambda values: "interleaved" if values["chunks"] > 1 else "1f1b"
    )
    """Pipeline schedule, the order of forward and backward passes: gpipe, 1f1b, interleaved,
    breadth-first, zb-h1, zb-h2, zb-v, v-half, dualpipe-v, search (the best order found for the work
    of the stages), file:PATH, or a schedule of an extension. `tools/schedule.py` draws them.
    Default: interleaved with more than one of `chunks`, 1f1b otherwise."""
    schedule_microbatches: Annotated[float, Field(ge=1)] | None = None
    """interleaved: microbatches that a chunk runs in succession. search: microbatches of which a
    rank keeps activations at most, in units of all its layers. Default: `pipeline`, as many as 1f1b
    keeps on the first rank."""
    layers_per_stage: tuple[NonNegative, ...] | Literal["measured"] | None = None
    """Layers of each stage, in order. Default: balanced by work, including the head. `measured`:
    balanced by the times that passes of each kind of block, the embedding and the head take on the
    run's own ranks, measured when it starts; a resumed run keeps the division it began with."""
    serial: bool = False
    """Do not overlap communication with compute. Never changes a bit of the result; for
    debugging."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which an unfinished collective ends the run with an error."""
