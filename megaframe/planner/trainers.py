"""Other trainers as software: what each overlaps, fuses and keeps, by its papers and sources.

A year is that of the code: libraries get faster, and what overlaps changes. Published runs of some
of them are predicted on docs/reference/prediction.md; of the others nothing was compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from megaframe.config import RunConfig
from megaframe.errors import UserError, join_or
from megaframe.hardware.chips import CHIPS
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.constants import MEGAFRAME, Constants, Software
from megaframe.planner.prediction import Prediction, predict

MEGATRON_2021 = Software(
    name="Megatron-LM of 2021: masked softmax in one kernel, nothing overlaps",
    fused_attention=False,
    causal_skip=False,
    sequence_parallel=False,
    stream_passes=13.0,  # norms read their rows twice
    inner_passes=3.5,
    gradient_bytes=2,
    overlap_data=False,
    overlap_tensor=False,
    overlap_pipeline=False,
    scatter_pipeline=True,
    selective="attention",
    kernels=36.0,
    backward_kernels=1.0,
    step_kernels=250.0,
    head_backward=True,
    state_bytes=30.0,
    accumulate_bytes=6.0,
    logit_bytes=30.0,
)
MEGATRON_2022 = replace(
    MEGATRON_2021,
    name="Megatron-LM of 2022: weight gradients are added by their products, norms in one pass",
    stream_passes=11.0,
    # By the product; what that costs was measured with later libraries only. What it costs with
    # these is in the start of a tile (A100) and in `Constants.older`.
    accumulate_bytes=0.0,
    gradient_bytes=4,
)
MEGATRON_SP = replace(
    MEGATRON_2022,
    name="Megatron-LM of 2022 with sequence parallelism",
    sequence_parallel=True,
)
MEGATRON_2023 = replace(
    MEGATRON_SP,
    name="Megatron-LM of 2023, as MegaScale compares with",
)
MEGASCALE = replace(
    MEGATRON_SP,
    name="MegaScale: parallel blocks, fused kernels, all axes overlap",
    fused_attention=True,
    attention="flash-2",  # its section 3.2
    stream_passes=5.0,  # one norm, one residual
    inner_passes=2.0,
    overlap_data=True,
    overlap_tensor=True,
    overlap_pipeline=True,
    parallel_block=True,
    gradients_of="chunk",  # its section 3.2
    parts=8,
    fused_parts=True,  # its section 3.2
)
MEGATRON_2024 = replace(
    MEGATRON_SP,
    name="Megatron-LM of 2024: fused attention, all axes overlap",
    fused_attention=True,
    causal_skip=True,
    stream_passes=9.0,
    inner_passes=2.0,
    overlap_data=True,
    overlap_tensor=True,
    overlap_pipeline=True,
    gradients_of="chunk",
    parts="ranks",  # rows go around a ring while the products of those at hand run
    older_libraries=True,
    logit_bytes=52.0,  # cross-entropy in plain kernels, in fp32
    # A whole table of zeros and gradients in 16 bits, which is added to the sum.
    embedding_bytes=12.0,
)
MEGATRON_2025 = replace(
    MEGATRON_2024,
    name="Megatron-Core of 2025 with Transformer Engine: cuDNN attention, all axes overlap",
    older_libraries=False,
    stream_passes=12.0,  # rotation of queries and keys is a kernel of its own
    accumulate_bytes=6.0,  # products add to sums in fp32
    logit_bytes=28.0,  # cross_entropy_loss_fusion: four compiled kernels on logits in fp32
    ring_bytes=(7.0, 9.0),  # sums in 16 bits (AttnFuncWithCPAndKVP2P of Transformer Engine 2.0)
)
NEMO_2025 = replace(
    MEGATRON_2025,
    name="NeMo of 2025: Megatron-Core with the settings of its performance recipes",
    gradient_bytes=2,  # grad_reduce_in_fp32=False: sums are also in 16 bits
    accumulate_bytes=2.0,
    deferred_heads=22.0,  # wgrad_deferral_limit of its Llama 3 70B
    embedding_bytes=8.0,
    # proj_fprop 24 and fc2_fprop 16, by their work (userbuffers.py of NeMo 2.3)
    scatter_units=18.0,
)
_MX_ELEMENT = 1 + 1 / 32
"""Bytes of a value in mxfp8, whose blocks of 32 share a scale of 8 bits, a power of two (OCP
Microscaling Formats specification 1.0, 2023)."""
_MX_FAMILIES = ("b200",)
"""Families of chips that multiply such blocks."""
MEGATRON_2025_MX = replace(
    MEGATRON_2025,
    name="Megatron-Core of 2025 with Transformer Engine and its recipe mxfp8",
    products="fp8",
    scaling="mxfp8",
    # A maximum of 32 values is known once they are read: one kernel reads a tensor once and writes
    # it with blocks along its rows and with blocks along its columns.
    cast_bytes=2 + 2 * _MX_ELEMENT,
)
ZERO_BUBBLE = replace(
    MEGATRON_2022,
    name="Zero Bubble: transfers beside compute, the update checked afterwards",
    overlap_pipeline=True,
    steps_meet=True,
)
FOUNDRY = Software(
    name="llm-foundry: FSDP of PyTorch, Triton's fused attention",
    fused_attention=True,
    stream_passes=16.0,
    inner_passes=2.0,
    gradient_bytes=2,
    attention="flash-1",  # in Triton
    older_libraries=True,
    selective="attention",
    kernels=30.0,
    head_backward=True,
    logit_bytes=30.0,
)
TITAN = Software(
    name="torchtitan: FSDP2 and torch.compile",
    fused_attention=True,
    older_libraries=True,
    attention="flash-2",  # torch's scaled_dot_product_attention of that time
    stream_passes=10.0,
    inner_passes=2.0,
    gradient_bytes=4,
    selective="products",  # selective_ac_option of its llama3 configs: op
    kernels=20.0,
    head_backward=True,
    overlap_tensor=False,
    logit_bytes=24.0,
)
TITAN_2025 = replace(
    TITAN,
    name="torchtitan of late 2025: cuDNN attention, asynchronous tensor parallelism",
    attention="cudnn",  # first of torch's scaled_dot_product_attention on Hopper since 2.9
    older_libraries=False,
    overlap_tensor=True,
    parts=8,
)
TITAN_2025_MX = replace(
    TITAN_2025,
    name="torchtitan of late 2025 with torchao's mxfp8",
    products="fp8",
    scaling="mxfp8",
    cast_bytes=2 * (2 + _MX_ELEMENT),  # a kernel for each direction
)
DEEPSPEED = Software(
    name="DeepSpeed of 2025: ZeRO, eager kernels, FlashAttention-2",
    attention="flash-2",
    stream_passes=16.0,  # norms, residuals and rotation are kernels of their own
    inner_passes=2.0,
    gradient_bytes=2,  # communication_data_type follows bf16
    selective="attention",
    kernels=60.0,
    head_backward=True,
    overlap_tensor=False,
    scatter_pipeline=False,
    logit_bytes=30.0,
)
TRAINERS: Mapping[str, Software] = {
    "megaframe": MEGAFRAME,
    "megatron-2021": MEGATRON_2021,
    "megatron-2022": MEGATRON_SP,
    "megatron-2024": MEGATRON_2024,
    "megatron-2025": MEGATRON_2025,
    "megatron-2025-mxfp8": MEGATRON_2025_MX,
    "nemo-2025": NEMO_2025,
    "megascale": MEGASCALE,
    "zero-bubble": ZERO_BUBBLE,
    "llm-foundry": FOUNDRY,
    "torchtitan-2024": TITAN,
    "torchtitan": TITAN_2025,
    "torchtitan-mxfp8": TITAN_2025_MX,
    "deepspeed": DEEPSPEED,
}
"""Trainers by the names that `tools/plan.py --software` takes."""


def find_trainer(name: str) -> Software:
    """Return the software of a trainer.

    Raises:
        UserError: There is no such trainer; the message names those that resemble it.
    """
    if name not in TRAINERS:
        near = get_close_matches(name.lower(), TRAINERS, n=3, cutoff=0.4)
        raise UserError(f"--software {name}: no such trainer; use {join_or(near or TRAINERS)}")
    return TRAINERS[name]


def predict_trainers(
    names: Sequence[str], config: RunConfig, layout: Layout, cluster: Cluster, constants: Constants
) -> dict[str, Prediction]:
    """Predict what trainers would take for the same run on the same layout, by their names.

    Args:
        names: Keys of `TRAINERS`.
        config, layout, cluster, constants: As in `predict`, but with another software.

    Raises:
        UserError: There is no such trainer, or the chip cannot multiply as it does.
    """
    trainers = {name: find_trainer(name) for name in names}
    for name, software in trainers.items():
        _check_scaling(name, software, cluster)
    return {
        name: predict(config, layout, cluster, replace(constants, software=software))
        for name, software in trainers.items()
    }


def _check_scaling(name: str, software: Software, cluster: Cluster) -> None:
    """Raise `UserError` if the chip has no products whose scales are shared as the trainer does."""
    chip = cluster.chip
    if software.scaling is None or chip.family in _MX_FAMILIES:
        return
    having = [other.name for other in CHIPS.values() if other.family in _MX_FAMILIES]
    raise UserError(
        f"--software {name}: a {chip.name} has no products in {software.scaling}; use a cluster of "
        f"{join_or(having)}, or --software {name.removesuffix('-mxfp8')}"
    )
