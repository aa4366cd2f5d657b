"""Constants: what chips of a generation achieve, as a few numbers; and what trainers do.

The numbers are fitted to published tables (`benchmarks/prediction/published.py --fit`) or measured
(`tools/measure_kernels.py`; `measured_constants.json` has those of chips that
`make gpu-check` ran on). Everything in `Software` is a fact from a
trainer's paper or source code, and is never fitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megaframe.config import ParallelConfig
from megaframe.errors import UserError
from megaframe.hardware.chips import UNKNOWN
from megaframe.hardware.cluster import Cluster
from megaframe.io.untrusted import read_file
from megaframe.planner.collective_times import get_share_on_tier

Number = Any
"""A float, or a numpy array of them."""
_MAX_BYTES = 1 << 20
NCCL = ("ring", "tree", "in_network", "pairwise", "scatter")
"""Algorithms that NCCL has for collectives, as named in `collectives.ALGORITHMS`."""


ATTENTION_SPEEDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    # Dao 2023 (FlashAttention-2, section 4.1): forward 73% of an A100's peak, backward 63%; in
    # Triton 0.6 times as fast (figure 4).
    "a100": {"flash-2": (1.0, 0.86), "flash-1": (0.6, 0.52)},
    # One H200, causal, heads of 128, sequences of 8,192, TFLOP/s in forward and backward: cuDNN 585
    # and 456 within a step, FlashAttention-2 319 and 294, our kernels in Triton 409 and 360
    # (benchmarks/results/h200). Shah et al. 2024 (FlashAttention-3, figures 5 and 6) is as fast as
    # cuDNN. FlashAttention-1 in Triton relative to FlashAttention-2 is as on an A100.
    "h100": {
        "cudnn": (1.0, 0.78),
        "flash-3": (1.0, 0.78),
        "triton": (0.7, 0.61),
        "flash-2": (0.545, 0.5),
        "flash-1": (0.33, 0.3),
    },
}
"""Speeds of kernels of fused attention in forward and backward, by chip family, relative to the
forward speed of the family's fastest kernel, which is what `Constants.attention` is about."""
_FASTEST_ATTENTION = (1.0, 0.8)
"""The same for the fastest kernel of a family that is not in the table, and for kernels that a
family's table lacks: a kernel is then taken to be as fast as the fastest."""


def get_attention_speeds(kernel: str, family: str) -> tuple[float, float]:
    """Return a kernel's entry in `ATTENTION_SPEEDS`.

    Args:
        kernel: `Software.attention`.
        family: Of the chip.
    """
    speeds = ATTENTION_SPEEDS.get(family, {})
    fastest = next(iter(speeds.values()), _FASTEST_ATTENTION)
    return speeds.get(kernel, fastest)


@dataclass(frozen=True)
class Software:
    """What a trainer does that no config key expresses.

    Attributes:
        fused_attention: Whether the scores stay on the chip; otherwise the kernels that mask,
            normalise and drop out move `score_bytes` per score in forward and
            `score_backward_bytes` in backward.
        attention: Kernel of the fused attention, a key of `ATTENTION_SPEEDS`.
        windowed_attention: Kernel of attention with a window or chunks, if it is another one.
        causal_skip: Whether the masked half of the scores is skipped.
        sequence_parallel: Whether norms and residuals are divided among tensor ranks.
        stream_passes, inner_passes: How often the elementwise kernels of a block read or write a
            value of width `hidden`, and one of the MLP's inner width, in forward; in backward it is
            twice that.
        gradient_bytes: Bytes per gradient element in the sum over data ranks; None: those of master
            precision, or 2 with `parallel.reduce_precision=bf16`.
        gradients_of: Which gradients are sent together, those of a `block`, of a `chunk`, or as
            many as `parallel.bucket_size` says (`buckets`).
        exchange_in_steps: Whether coded parts are exchanged in steps (`layout.exchange_steps`);
            otherwise between all pairs of ranks.
        older_libraries: Whether the libraries of matrix products are from before cuBLAS had
            persistent kernels for Hopper, which traces show since October 2024 (NVIDIA/Fuser, issue
            3137): `Constants.older`.
        copy_engines: Whether copy engines do the transfers of the tensor axis, so that concurrent
            compute is not delayed.
        overlap_data, overlap_tensor, overlap_pipeline: Whether these transfers overlap with
            compute.
        scatter_pipeline: Whether each tensor rank sends only its part of a message to the next
            stage.
        selective: What `train.recompute=selective` recomputes: `norms` (with activations),
            `attention`, or `products` (every other matrix product, norms and activations).
        kernels: Kernels launched in the forward of a block; backward launches `backward_kernels`
            times as many.
        pass_kernels: Kernels launched at the start of a pass while the device idles, because
            without `overlap_pipeline` the host waits for the preceding transfer and launches
            nothing ahead.
        end_kernels: Kernels launched in forward for embedding and loss; in backward
            `backward_kernels` times as many.
        step_kernels: Kernels launched once per step, for the norm, the update and logging.
        collectives: Algorithms of the trainer's communication library.
        head_backward: Whether the head computes its gradients in backward instead of in forward.
        deferred_heads: Number of microbatches whose gradients of the head's weight the last stage
            computes while the others finish the step.
        state_bytes: Bytes that the update reads and writes per element.
        accumulate_bytes: Bytes per element of a block moved to add a microbatch's weight gradient
            to the sum, beyond the 2 that products write. A product that adds to the sum itself does
            not hide them: in a step on an H200 one takes 3.80 ms if it adds to a sum in fp32, and
            3.05 where the result is in 16 bits. A copy of 6 bytes takes as long as the difference
            (the head in benchmarks/results/h200/trace-llama-8b-slice.json.gz).
        products: Type of the matrix products if neither `train.precision` nor `train.fp8` says it.
        scaling: What shares a scale in 8 bits if `products` says so: mxfp8, blocks of 32 values
            along the summed dimension, which only some chips multiply; None if not declared.
        cast_bytes: Bytes moved per element to convert a tensor to 8 bits, as it is and transposed.
        parts: Number of parts in which rows are transferred during forward products; `ranks`: as
            many as there are tensor ranks; None: `parallel.tensor_chunks`.
        fused_parts: Whether the product of all parts is one kernel that waits for each; otherwise
            each part is a kernel of its own.
        logit_bytes: Bytes that the loss moves per logit.
        embedding_bytes: Bytes moved per element of the embedding's table for a microbatch's
            gradient; 0 if only the rows that were looked up are touched.
        ring_bytes: Bytes moved in forward and in backward, per element of the attention's output,
            to combine the results of a tile on a ring of context ranks with those before it. A tile
            between two ranks has half of the queries or all of them.
        scatter_units: Processors of the chip that forward products of row linears leave to the
            scatter of their results over tensor ranks.
        data_tail: Number of parts of the transfers between data ranks; the last part is never
            hidden. None: the number of buckets.
        parallel_block: Whether attention and MLP start from the same rows, which halves the tensor
            axis's transfers of a block.
        steps_meet: Whether a rank begins its next step before others finish this one, so that a
            step takes as long as the longest span of any rank.
    """

    name: str = "megaframe"
    fused_attention: bool = True
    attention: str = "cudnn"
    windowed_attention: str | None = None
    causal_skip: bool = True
    sequence_parallel: bool = True
    stream_passes: float = 12.0
    inner_passes: float = 2.0
    score_bytes: float = 9.0
    score_backward_bytes: float = 11.0
    gradient_bytes: int | None = None
    gradients_of: str = "block"
    exchange_in_steps: bool = True
    older_libraries: bool = False
    copy_engines: bool = False
    overlap_data: bool = True
    overlap_tensor: bool = True
    overlap_pipeline: bool = True
    scatter_pipeline: bool = True
    selective: str = "norms"
    kernels: float = 40.0
    backward_kernels: float = 2.0
    pass_kernels: float = 10.0
    end_kernels: float = 30.0
    step_kernels: float = 100.0
    collectives: tuple[str, ...] = NCCL
    head_backward: bool = False
    deferred_heads: float = 0.0
    state_bytes: float = 30.0
    accumulate_bytes: float = 0.0
    products: str | None = None
    scaling: Literal["mxfp8"] | None = None
    cast_bytes: float = 6.0  # read for the maximum, read again, and written twice in 8 bits
    parts: int | Literal["ranks"] | None = None
    fused_parts: bool = False
    logit_bytes: float = 16.0
    embedding_bytes: float = 0.0
    ring_bytes: tuple[float, float] = (24.0, 25.0)  # sums in fp32, made, added to and rounded
    scatter_units: float = 0.0
    data_tail: float | None = 32.0
    parallel_block: bool = False
    steps_meet: bool = False

    def count_tensor_parts(self, parallel: ParallelConfig, tensor: Number) -> Number:
        """Return the number of parts in which rows are transferred during forward products.

        Args:
            parallel: Of the run.
            tensor: Number of tensor ranks; may be an array.
        """
        return tensor if self.parts == "ranks" else float(self.parts or parallel.tensor_chunks)


MEGAFRAME = Software(
    windowed_attention="triton",  # torch's kernels, cuDNN's too, take no window without a mask
    gradients_of="buckets",
    data_tail=None,
    accumulate_bytes=6.0,
    logit_bytes=6.0,
)


@dataclass(frozen=True)
class Constants:
    """The numbers of a chip generation, its link efficiency, and the software.

    Attributes:
        product: Share of the sustained peak that an infinitely large product reaches.
        older: Speed of products of the libraries of 2024 and before, relative to later ones.
        start: Cost of a tile's prologue and epilogue, in terms of the sum: a sum over k terms takes
            as long as k + `start` terms would. The last, partly filled wave of tiles is charged
            separately.
        attention: Share of the sustained peak that the fastest fused attention of the family
            reaches in forward with heads of 128 (`ATTENTION_SPEEDS` has that of other kernels).
        memory: Share of the memory bandwidth that elementwise kernels reach.
        launch: Seconds of the host per kernel launch.
        contention: How much a concurrent transfer delays compute, as a share of the time that its
            bytes take on the innermost tier.
        links: Share of a link's bandwidth that collectives reach, by tier from the innermost; the
            last one applies to all further tiers. Taken from NCCL measurements, not fitted.
        unfitted: Where the numbers are from if they are neither fitted to steps on such chips nor
            measured on one; every prediction says so.
        measured_on: On what the numbers were measured: the device, the libraries and the commit;
            every prediction says so.
    """

    product: float = 0.85
    start: float = 200.0
    attention: float = 0.5
    memory: float = 0.8
    launch: float = 6e-6
    contention: float = 0.2
    links: tuple[float, ...] = (0.8,)
    software: Software = field(default=MEGAFRAME)
    older: float = 1.0
    unfitted: str = ""
    measured_on: str = ""

    def get_link_efficiency(self, tier: int) -> float:
        """Return the share of its bandwidth that collectives reach on tier number `tier`."""
        return get_share_on_tier(self.links, tier)


# NCCL's all-reduce of large messages reaches 233 of 300 GB/s on 8 A100 (VIA-Research/vTrain,
# trace/a100), and its rings 370 of 450 GB/s on 8 H100 (NVIDIA/nccl-tests, issue 212). Between nodes
# it reached 85 to 96% of HDR adapters and 92 to 96% of NDR (issues 119 and 290).
_A100 = Constants(0.858, 460.0, 0.6099, 0.8792, 3.7e-05, 1.508, (0.775, 0.9))
_H100 = Constants(0.8186, 64.0, 0.6947, 0.8793, 1.2e-05, 0.5692, (0.82, 0.9), older=0.869)
_LIKE_A100 = replace(_A100, unfitted="those of an A100")
_LIKE_H100 = replace(_H100, unfitted="those of an H100")
CONSTANTS: Mapping[str, Constants] = {
    "a100": _A100,
    "h100": _H100,
    "b200": _LIKE_H100,
    "cdna": _LIKE_H100,
    "tpu": _LIKE_H100,
    # Their tensor cores are programmed like those of an A100, warp by warp.
    "v100": _LIKE_A100,
    "t4": _LIKE_A100,
    "ga102": _LIKE_A100,
    "ada": _LIKE_A100,
    "gb202": _LIKE_A100,
    "cpu": Constants(0.9, 0.0, 0.4, 0.8, 5e-6, 1.0, unfitted="guesses"),
    UNKNOWN: _LIKE_A100,
}
"""Constants by chip family. Those of a100 and h100 are fitted, except `start`, and `launch` of h100
(`benchmarks/prediction/published_fit.py`). The others are not (`Constants.unfitted`) until kernels
are measured on such a chip."""


def _read_measured() -> dict[str, dict[str, Any]]:
    """Return what was measured, by the names of chips."""
    path = Path(__file__).with_name("measured_constants.json")
    table: dict[str, dict[str, Any]] = json.loads(read_file(path, _MAX_BYTES))
    return table


MEASURED: Mapping[str, Mapping[str, Any]] = _read_measured()
"""What `make gpu-check` measured on chips, as `benchmarks/gpu/apply_results.py` writes it."""


def get_family_constants(family: str) -> Constants:
    """Return the constants of a chip family.

    Raises:
        UserError: No constants of this family are known.
    """
    if family not in CONSTANTS:
        raise UserError(
            f"no constants are known of chips of the family {family}; use one of "
            f"{', '.join(CONSTANTS)}, or measure them with tools/measure_kernels.py"
        )
    return CONSTANTS[family]


def get_cluster_constants(cluster: Cluster) -> Constants:
    """Return the constants of a cluster's chip: those measured on it, as its description or the
    table of measured chips has them, and otherwise those of the chip's family."""
    family_constants = get_family_constants(cluster.chip.family)
    constants = cluster.constants or MEASURED.get(cluster.chip.name)
    if not constants:
        return family_constants
    return replace(family_constants, **constants, unfitted="")
