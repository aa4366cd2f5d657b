"""How many logits the output head computes at once.

The loss is computed over chunks of rows, so that the logits of all tokens never exist together. The
model, the evaluation and the prediction of memory size their chunks by this bound.
"""

from __future__ import annotations

from megaframe.config import ModelConfig, TrainConfig
from megaframe.config.part_calls import call_part
from megaframe.config.parts import LossPart

MAX_HOST_LOGITS = 25_800_000
"""Logits of a chunk on a CPU: 512 rows of a vocabulary of 50,304. Every product of a chunk packs
the whole weight again, so with half as many the head takes 7% longer and with twice as many 1 to 3%
less (benchmarks/cpu/cache_constants.py)."""
MAX_GPU_LOGITS = 1 << 29
"""Logits of a chunk on a GPU, whose products need many rows even where a rank's part of the
vocabulary is small."""
_GPU_ROWS = 128
"""Rows of a tile of a GPU's matrix products: a part of one would cost as much as a whole."""
FP32_PARTS = 32
"""The largest chunk is processed in this many parts, of which one at a time is in fp32."""
_SOFTCAP_TENSORS = 2
"""Tensors as large as the logits that the derivative of a softcap needs."""


def get_max_logits_per_chunk(*, host: bool) -> int:
    """Return how many logits may exist at once.

    Args:
        host: whether the head is computed on a CPU, where fewer logits would slow down fp32
            products (docs/log.md).
    """
    return MAX_HOST_LOGITS if host else MAX_GPU_LOGITS


def count_rows_per_chunk(vocab: int, *, host: bool) -> int:
    """Return how many rows of logits are computed at once, if there are so many.

    Args:
        vocab: Words of the largest part of the vocabulary that a rank has.
        host: As of `get_max_logits_per_chunk`.
    """
    rows = max(1, get_max_logits_per_chunk(host=host) // max(1, vocab))
    return rows if host or rows < _GPU_ROWS else rows - rows % _GPU_ROWS


def compute_loss_bytes_per_logit(model: ModelConfig, train: TrainConfig, width: int) -> int:
    """Return the bytes that a loss from outside (`train.loss`) needs for each logit that is in fp32
    at a time, of which there are at most `get_max_logits_per_chunk` / `FP32_PARTS`; 0 without one.

    Args:
        model: May bound its logits.
        train: Names the loss.
        width: Bytes of a logit in the precision of the run.
    """
    loss = train.loss
    if not isinstance(loss, LossPart):
        return 0
    tensors = 1 + call_part(loss, "count_logit_tensors", int)
    tensors += _SOFTCAP_TENSORS * (model.logit_softcap is not None)
    return tensors * max(4, width)
