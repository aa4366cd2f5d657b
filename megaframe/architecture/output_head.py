"""How many logits the output head computes at once.

The loss is computed over chunks of rows, so that the logits of all tokens never exist together. The
model, the evaluation and the prediction of memory size their chunks by this bound.
"""

from __future__ import annotations

MAX_HOST_LOGITS = 25_800_000
"""Logits of a chunk on a CPU: 512 rows of a vocabulary of 50,304. Every product of a chunk packs
the whole weight again, so with half as many the head takes 7% longer and with twice as many 1 to 3%
less (benchmarks/cpu/cache_constants.py)."""
MAX_GPU_LOGITS = 1 << 28
"""Logits of a chunk on a GPU, whose products need many rows even where a rank's part of the
vocabulary is small."""


def get_max_logits_per_chunk(*, host: bool) -> int:
    """Return how many logits may exist at once.

    Args:
        host: whether the head is computed on a CPU, where fewer logits would slow down fp32
            products (docs/log.md).
    """
    return MAX_HOST_LOGITS if host else MAX_GPU_LOGITS
