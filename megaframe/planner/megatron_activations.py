"""Activations that Megatron-LM keeps of a block, to compare the planner with published tables.

What megaframe itself keeps is counted in `activations`.
"""

from __future__ import annotations


def kept_of_baseline(
    seq: int, hidden: int, heads: int, tensor: int, recompute: str, sequence_parallel: bool
) -> float:
    """Return the bytes per element of the stream that a block of Megatron-LM keeps in 16 bits.

    Of an element (s b h of them), 10 bytes are not divided among tensor ranks unless
    `sequence_parallel`, 24 are divided, and attention's scores add 5 heads seq / hidden
    (Korthikanti et al. 2022, equations 1 to 4). recompute: `none`, `selective` (of attention), or
    `full`, which keeps only the block's input, whole on each rank.
    """
    if recompute == "full":
        return 2.0
    scores = 5.0 * heads * seq / hidden / tensor
    stream = 10.0 / tensor if sequence_parallel else 10.0
    return stream + 24.0 / tensor + (scores if recompute == "none" else 0.0)
