"""What flows from the loader through the pipeline: one microbatch, as one rank sees it.

Shape suffixes: B samples of the microbatch, S tokens per sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORE = -1
"""Label of a position that has no loss."""


@dataclass(frozen=True)
class Microbatch:
    """Token ids and everything that the model needs to know of them.

    tokens_BS:    int64, inputs.
    labels_BS:    int64, the next token of each position, or `IGNORE`.
    samples_B:    int64, number of each sample in the training order; with the position in the
                  sample it numbers tokens globally, which is what dropout masks are keyed by.
    positions_BS: int64 or None for 0..S-1; restarts at documents with `data.reset_positions`.
    documents_BS: int64 or None; attention stays among equal numbers (`data.reset_attention`).
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    samples_B: Tensor
    positions_BS: Tensor | None = None
    documents_BS: Tensor | None = None
