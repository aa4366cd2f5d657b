"""Constants: what a chip really reaches, six numbers for a generation; and what software does.

The six are fitted to one half of published tables (`benchmarks/published.py --fit`) or measured
(`tools/measure_kernels.py`); everything in `Software` is a fact of a trainer that can be read in
its paper or its source, and is never fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.plan.collectives import on_tier

NCCL = ("ring", "tree", "in_network", "pairwise", "scatter")
"""Algorithms of NCCL's collectives."""


@dataclass(frozen=True)
class Software:
    """What a trainer does, beside what the keys of a config say.

    fused_attention: scores never leave the chip; else masked, normalised and dropped out in
    kernels that move `score_bytes` for each in forward and `score_backward_bytes` in backward.
    attention_speed: of its fused attention beside FlashAttention-2's.
    causal_skip: the half of the scores that is masked is not computed.
    sequence_parallel: norms and residuals are divided among tensor ranks.
    stream_passes, inner_passes: times that the elementwise kernels of a block read or write a value
    of width `hidden` and of the MLP's inner width in forward; backward does so twice as often.
    gradient_bytes: of an element, as it is summed over data ranks; None: of master precision.
    gradients_of: what leaves together, the gradients of a `block` or of a `chunk`.
    copy_engines: whether the tensor axis's transfers are made by engines of their own, so that they
    do not delay the compute beside them.
    overlap_data, overlap_tensor, overlap_pipeline: whether these transfers run beside compute.
    scatter_pipeline: whether tensor ranks each send their part of what goes to the next stage.
    selective: what `train.recompute=selective` computes again: norms and activations, or attention.
    kernels: launched in the forward of a block; backward launches `backward_kernels` times as many.
    pass_kernels: launched for a pass before the device computes, where the host waited for the
    transfer before it (no `overlap_pipeline`), so that nothing was launched ahead.
    end_kernels: launched in forward for embedding and loss; backward launches as for a block.
    step_kernels: launched once a step, for the norm, the update and what is logged.
    collectives: algorithms that its library has.
    head_backward: whether the head makes its gradients in backward instead of in forward.
    state_bytes: that the update of an element reads and writes.
    accumulate_bytes: that adding a microbatch's gradient of a weight to the sum moves besides the
    product, 0 where the product adds.
    products: type of the products where it is not `train.precision`: fp8.
    parts: into which transfers beside forward products are cut; None: `parallel.tensor_chunks`.
    logit_bytes: that the loss moves for each logit.
    data_tail: parts that data ranks' transfers come in, the last of which nothing hides.
    parallel_block: whether attention and MLP start from the same rows, so that a block has half of
    the tensor axis's transfers.
    steps_meet: whether a rank begins its next step before others end this one, so that a step is as
    long as the longest span of a rank.
    """

    name: str = "megaframe"
    fused_attention: bool = True
    attention_speed: float = 1.0
    causal_skip: bool = True
    sequence_parallel: bool = True
    stream_passes: float = 12.0
    inner_passes: float = 2.0
    score_bytes: float = 9.0
    score_backward_bytes: float = 11.0
    gradient_bytes: int | None = None
    gradients_of: str = "block"
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
    state_bytes: float = 30.0
    accumulate_bytes: float = 0.0
    products: str | None = None
    parts: int | None = None
    logit_bytes: float = 16.0
    data_tail: float = 32.0
    parallel_block: bool = False
    steps_meet: bool = False

    def tensor_parts(self, config: RunConfig) -> float:
        """Parts in which rows travel beside forward products."""
        return float(self.parts or config.parallel.tensor_chunks)


MEGAFRAME = Software()


@dataclass(frozen=True)
class Constants:
    """The six numbers of a generation, and the software.

    product: share of the sustained peak that an endless product reaches.
    start: rows, columns or terms that a tile's beginning and end cost: a sum over k terms takes as
    long as one over k + `start` (multiplied by what the last, unfilled wave of tiles costs).
    attention: share of the sustained peak of fused attention.
    memory: share of its bandwidth that elementwise kernels reach.
    launch: seconds of the host for each kernel.
    contention: by how much a transfer beside compute delays that, as a share of the time that the
    bytes would take on the innermost tier.
    links: share of a link's bandwidth that collectives reach, by tier, the innermost first and the
    last one for all beyond; as NCCL was seen to reach them, not fitted.
    """

    product: float = 0.85
    start: float = 200.0
    attention: float = 0.5
    memory: float = 0.8
    launch: float = 6e-6
    contention: float = 0.2
    links: tuple[float, ...] = (0.8,)
    software: Software = field(default=MEGAFRAME)

    def link(self, tier: int) -> float:
        """That share on the tier of this number."""
        return on_tier(self.links, tier)


# NCCL's all-reduce of large messages on 8 A100 carries 233 of 300 GB/s (VIA-Research/vTrain,
# trace/a100), its rings on 8 H100 370 of 450 (NVIDIA/nccl-tests, issue 212); between nodes it was
# seen to carry 85 to 96% of HDR adapters and 92 to 96% of NDR (issues 119 and 290).
_H100 = Constants(0.778, 1104.0, 0.328, 1.000, 1.2e-05, 0.474, (0.82, 0.9))
CONSTANTS: Mapping[str, Constants] = {
    "a100": Constants(0.878, 467.0, 0.520, 0.909, 4.5e-05, 3.6, (0.775, 0.9)),
    "h100": _H100,
    "b200": _H100,
    "tpu": _H100,
    "cpu": Constants(0.9, 0.0, 0.4, 0.8, 5e-6, 1.0),
}
"""By family of chips. Fitted: a100, h100 (but for its `launch`, of which its tables tell nothing).
The others are guesses, those of h100, until kernels are measured on them."""


def constants_of(family: str) -> Constants:
    """The constants of a family of chips. Raises `UserError` for one that is not known."""
    if family not in CONSTANTS:
        raise UserError(
            f"no constants are known of chips of the family {family}; use one of "
            f"{', '.join(CONSTANTS)}, or measure them with tools/measure_kernels.py"
        )
    return CONSTANTS[family]
