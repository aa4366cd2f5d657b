"""Microbatch: the tokens and labels of one microbatch on one rank, from the loader to the loss.

Shape suffixes: B samples of the microbatch, S tokens per sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""Label of a position that does not count in the loss."""


class TokensAhead(NamedTuple):
    """Tokens some positions ahead, as `Microbatch` has those of the next position."""

    tokens_BS: Tensor
    labels_BS: Tensor
    weights_BS: Tensor | None = None


@dataclass(frozen=True)
class Microbatch:
    """Token ids and everything that the model needs to know about them.

    Attributes:
        tokens_BS: int64, inputs.
        labels_BS: int64, the next token of each position, or `IGNORE`.
        samples_B: int64, number of each sample in the training order. Together with the position in
            the sample it identifies a token globally, as the key of dropout masks.
        positions_BS: int64, or None for 0..S-1. Restarts at documents with `data.reset_positions`.
            [1, S] if all samples have the same positions.
        documents_BS: int64 or None. Tokens attend only to tokens with the same number
            (`data.reset_attention`).
        whole: Tokens of a whole sample if this is one context rank's part, else None.
            `documents_BS` then still covers whole samples, because attention sees the keys of other
            ranks.
        ahead: Filled by `look_ahead`: for each distance from 1 on, what is this far ahead of each
            position.
        weights_BS: fp32, factor of the loss of each label; None if all are 1. A label that counts
            for nothing is `IGNORE`.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    samples_B: Tensor
    positions_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    whole: int | None = None
    ahead: tuple[TokensAhead, ...] = ()
    weights_BS: Tensor | None = None

    def sum_label_weights(self) -> Tensor:
        """Return the sum of the weights of all labels, fp64 scalar: how many there are, if all
        weights are 1. Losses are divided by this number of the global batch."""
        counted_BS = (self.labels_BS != IGNORE).double()
        return (counted_BS if self.weights_BS is None else counted_BS * self.weights_BS).sum()


def look_ahead(microbatch: Microbatch, depth: int) -> Microbatch:
    """Return the microbatch, which must have whole samples, with the tokens and labels that are 1
    to `depth` positions ahead. After the end of a sample the token is 0. There is no loss beyond
    the end of a sample or of the position's document."""
    tokens, labels, documents = microbatch.tokens_BS, microbatch.labels_BS, microbatch.documents_BS
    ahead = []
    for by in range(1, depth + 1):
        far = _shift(labels, by, IGNORE)
        if documents is not None:
            far = far.masked_fill(_shift(documents, by, -1) != documents, IGNORE)
        weights = microbatch.weights_BS
        far_weights = None if weights is None else _shift(weights, by, 0)
        ahead.append(TokensAhead(_shift(tokens, by, 0), far, far_weights))
    return replace(microbatch, ahead=tuple(ahead))


def _shift(x_BS: Tensor, by: int, filling: int) -> Tensor:
    return F.pad(x_BS[:, by:], (0, min(by, x_BS.shape[1])), value=filling)


def divide_zigzag(x: Tensor, index: int, parts: int, filling: int) -> Tensor:
    """Return part `index` of the last dim of x.

    Of 2 * parts equal pieces, these are those numbered `index` and 2 * parts - 1 - index. Under a
    causal mask, the work for a token grows with the number of tokens before it, so all parts have
    the same amount of work.

    Args:
        x: [..., S]. With one part, it is returned as it is.
        index: Number of the part.
        parts: Number of parts.
        filling: Value with which x is first padded at its end if S is not divisible.

    Returns:
        [..., S / parts], with S rounded up to a multiple of 2 * parts if there are several parts.
    """
    if parts == 1:
        return x
    piece = -(-x.shape[-1] // (2 * parts))
    pieces = F.pad(x, (0, 2 * parts * piece - x.shape[-1]), value=filling).split(piece, -1)
    return torch.cat((pieces[index], pieces[-1 - index]), -1)


def select_context_part(microbatch: Microbatch, index: int, parts: int) -> Microbatch:
    """Return the part of a microbatch for a context rank, in zigzag order. Padding comes after all
    tokens of a sample, where no token attends to it, and has no loss.

    Args:
        microbatch: All tokens of the samples.
        index: The context rank.
        parts: Number of context ranks.
    """
    if parts == 1:
        return microbatch
    tokens, positions = microbatch.tokens_BS, microbatch.positions_BS
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]

    def divide_weights(weights_BS: Tensor | None) -> Tensor | None:
        return None if weights_BS is None else divide_zigzag(weights_BS, index, parts, 0)

    return Microbatch(
        divide_zigzag(tokens, index, parts, 0),
        divide_zigzag(microbatch.labels_BS, index, parts, IGNORE),
        microbatch.samples_B,
        divide_zigzag(positions, index, parts, 0),
        microbatch.documents_BS,
        tokens.shape[1],
        tuple(
            TokensAhead(
                divide_zigzag(far.tokens_BS, index, parts, 0),
                divide_zigzag(far.labels_BS, index, parts, IGNORE),
                divide_weights(far.weights_BS),
            )
            for far in microbatch.ahead
        ),
        divide_weights(microbatch.weights_BS),
    )
