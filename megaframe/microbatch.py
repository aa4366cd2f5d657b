"""What flows from the loader through the pipeline: one microbatch, as one rank sees it.

Shape suffixes: B samples of the microbatch, S tokens per sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
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
                  [1, S] where all samples count alike.
    documents_BS: int64 or None; attention stays among equal numbers (`data.reset_attention`).
    whole:        None, or where this is one context rank's part: tokens of a whole sample. Then
                  `documents_BS` still has all of them, for attention sees the others' keys.
    ahead:        what `look_ahead` adds: of each number of tokens further on, from 1 on, the tokens
                  and labels that are so far ahead of each position.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    samples_B: Tensor
    positions_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    whole: int | None = None
    ahead: tuple[tuple[Tensor, Tensor], ...] = ()


def look_ahead(microbatch: Microbatch, depth: int) -> Microbatch:
    """The microbatch with what is 1 to `depth` tokens ahead of each position; of whole samples.
    Behind the end of a sample are tokens 0, and where a sample or the position's document ends
    before, there is no loss."""
    tokens, labels, documents = microbatch.tokens_BS, microbatch.labels_BS, microbatch.documents_BS
    found = []
    for by in range(1, depth + 1):
        far = _shifted(labels, by, IGNORE)
        if documents is not None:
            far = far.masked_fill(_shifted(documents, by, -1) != documents, IGNORE)
        found.append((_shifted(tokens, by, 0), far))
    return replace(microbatch, ahead=tuple(found))


def _shifted(x_BS: Tensor, by: int, filling: int) -> Tensor:
    return F.pad(x_BS[:, by:], (0, min(by, x_BS.shape[1])), value=filling)


def zigzag(x: Tensor, index: int, parts: int, filling: int) -> Tensor:
    """Part `index` of the last dim of x: of 2 * parts equal pieces, those numbered `index` and
    2 * parts - 1 - index. What does not divide is filled up at its end; one part is all of x.

    Under a causal mask a token is as much work as tokens are before it; so all parts are as much.
    """
    if parts == 1:
        return x
    piece = -(-x.shape[-1] // (2 * parts))
    pieces = F.pad(x, (0, 2 * parts * piece - x.shape[-1]), value=filling).split(piece, -1)
    return torch.cat((pieces[index], pieces[-1 - index]), -1)


def part_of(microbatch: Microbatch, index: int, parts: int) -> Microbatch:
    """The microbatch as context rank `index` of `parts` sees it, divided in zigzag. Filling stands
    behind all tokens of a sample, where no other token sees it, and has no loss."""
    if parts == 1:
        return microbatch
    tokens, positions = microbatch.tokens_BS, microbatch.positions_BS
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return Microbatch(
        zigzag(tokens, index, parts, 0),
        zigzag(microbatch.labels_BS, index, parts, IGNORE),
        microbatch.samples_B,
        zigzag(positions, index, parts, 0),
        microbatch.documents_BS,
        tokens.shape[1],
        tuple(
            (zigzag(far, index, parts, 0), zigzag(labels, index, parts, IGNORE))
            for far, labels in microbatch.ahead
        ),
    )
