"""What the authors of published measurements ran: their trainers, and configs of their models.

What a trainer overlaps, fuses and keeps is declared here according to its paper and source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megaframe.config import RunConfig
from megaframe.planner.constants import Software

# What the trainers do, according to their papers and sources.
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
    stream_passes=5.0,  # one norm, one residual
    inner_passes=2.0,
    overlap_data=True,
    overlap_tensor=True,
    overlap_pipeline=True,
    parallel_block=True,
    gradients_of="chunk",  # its section 3.2
    parts=8,
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
    parts=8,
    copy_engines=True,
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
    attention_speed=0.6,  # Triton's relative to FlashAttention-2: Dao 2023, figure 4
    selective="attention",
    kernels=30.0,
    head_backward=True,
    logit_bytes=30.0,
)
TITAN = Software(
    name="torchtitan: FSDP2 and torch.compile",
    fused_attention=True,
    stream_passes=10.0,
    inner_passes=2.0,
    gradient_bytes=4,
    selective="attention",
    kernels=20.0,
    head_backward=True,
    overlap_tensor=False,
    logit_bytes=24.0,
)


def make_gpt_config(
    layers: int,
    hidden: int,
    heads: int,
    seq: int,
    vocab: int,
    batch: int,
    microbatch: int = 1,
    recompute: str = "none",
    tied: bool = True,
    **parallel: Any,
) -> RunConfig:
    """Return the config of a classic GPT. Data ranks shard nothing unless `zero` is given, as in
    the runs of that time.

    Args:
        tied: Whether embedding and head share one table.
    """
    return RunConfig.model_validate(
        {
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "vocab": vocab,
                "position": "learned",
                "bias": True,
                "tie_embeddings": tied,
            },
            "parallel": {"zero": 0, **parallel},
            "train": {
                "seq": seq,
                "global_batch": batch,
                "microbatch": microbatch,
                "recompute": recompute,
            },
        }
    )


def divide_evenly(layers: int, pipeline: int, chunks: int) -> dict[str, Any]:
    """Return the parallel keys of a pipeline with equal stages."""
    stages = pipeline * chunks
    return {
        "pipeline": pipeline,
        "chunks": chunks,
        "layers_per_stage": (layers // stages,) * stages,
    }


def list_interleavings(
    layers: int, pipeline: int, batch: int, data: int
) -> Iterator[tuple[int, int]]:
    """Yield the (microbatch, chunks) that a run may have had: at most 4 samples in a pass, and
    chunks of one layer, as in all of NVIDIA's recipes of that month that have chunks
    (NeMo-Megatron-Launcher on 2 July 2024, gpt3 of 40 and 175 billion parameters and mlperf)."""
    chunks = layers // pipeline if pipeline > 1 else 1
    for microbatch in (1, 2, 4):
        many, remainder = divmod(batch, data * microbatch)
        if remainder == 0 and many % pipeline == 0:
            yield microbatch, chunks


def count_full_attention_flops(c: RunConfig, factor: float) -> float:
    """Return the operations of a step as in equation 3 of Narayanan et al.: `factor` B s l h^2 (1 +
    s/6h + V/16lh), with factor 96 with recompute and 72 without (for which the head counts
    V/12lh)."""
    m, s = c.model, c.train.seq
    head = (m.vocab or 0) / ((16 if factor == 96 else 12) * m.layers * m.hidden)
    size = c.train.global_batch * s * m.layers * m.hidden**2
    return factor * size * (1 + s / (6 * m.hidden) + head)


def make_llama_config(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    batch: int,
    micro: int,
    recompute: str,
    **parallel: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "kv_heads": 8,
                "ffn": ffn,
                "vocab": 128256,
                "norm": "rmsnorm",
                "activation": "swiglu",
            },
            "parallel": parallel,
            "train": {
                "seq": 8192,
                "global_batch": batch,
                "microbatch": micro,
                "recompute": recompute,
            },
        }
    )
