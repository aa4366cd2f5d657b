"""What the authors of published measurements ran: configs of their models.

What their trainers overlap, fuse and keep is declared in `megaframe/planner/trainers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaframe.config import RunConfig


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
