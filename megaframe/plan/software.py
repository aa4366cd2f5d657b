"""What another trainer keeps of a block for its backward, to hold the planner to published tables.

What megaframe itself keeps is counted in `memory`.
"""

from __future__ import annotations


def kept_of_baseline(
    seq: int, hidden: int, heads: int, tensor: int, recompute: str, sequence_parallel: bool
) -> float:
    """Bytes for each row and value of the stream that a block of Megatron-LM keeps in 16 bits:
    10 undivided and 24 divided among tensor ranks, and 5 of attention's scores (Korthikanti et al.
    2022, equations 1 to 4). recompute: `none`, `selective` (attention), `full` (all but the
    block's input, which is whole on each rank)."""
    if recompute == "full":
        return 2.0
    scores = 5.0 * heads * seq / hidden / tensor
    stream = 10.0 / tensor if sequence_parallel else 10.0
    return stream + 24.0 / tensor + (scores if recompute == "none" else 0.0)
