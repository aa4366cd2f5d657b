"""States that layers pass from token to token, such as linear attention's, across the pieces of a
sample that context ranks have.

What a piece of a sample does to a state S is S' = decay S + added, whatever S is. So ranks gather
both numbers of all pieces at once, and each computes the states that its own pieces begin with (Sun
et al. 2025, "LASP-2"). No rank waits for the one before it.

Shape legend: B samples, S tokens of this rank, P its pieces of samples, C chunks of a piece, L
tokens of a chunk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.context_parallel.axis import ContextParallel


def split_chunks(x_BS: Tensor, size: int, context: ContextParallel) -> Tensor:
    """Divide each of this rank's pieces into chunks.

    Args:
        x_BS: Numbers of tokens, [B, S, ...].
        size: Tokens of a chunk, at most; a shorter piece is one chunk.
        context: The ranks that divide samples, whose pieces they have.

    Returns:
        [B * P, C, L, ...]; the last chunk of each piece is filled with zeros.
    """
    x_PS = x_BS.unflatten(1, (len(context.own_pieces), -1)).flatten(0, 1)
    length = min(size, x_PS.shape[1])
    missing = -x_PS.shape[1] % length
    if missing:
        x_PS = F.pad(x_PS, (0, 0) * (x_PS.dim() - 2) + (0, missing))
    return x_PS.unflatten(1, (-1, length))


def join_chunks(x_PCL: Tensor, batch: int, length: int) -> Tensor:
    """Undo `split_chunks`.

    Args:
        x_PCL: [B * P, C, L, ...].
        batch: Samples, B.
        length: Tokens of a sample on this rank, S.

    Returns:
        [B, S, ...].
    """
    tokens = length // (len(x_PCL) // batch)
    return x_PCL.flatten(1, 2)[:, :tokens].unflatten(0, (batch, -1)).flatten(1, 2)


def pass_states(decay_PC: Tensor, added_PC: Tensor, context: ContextParallel) -> Tensor:
    """Return the state before each chunk, [B * P, C, ...], if each makes S' = decay S + added.

    All context ranks call this together, whatever `parallel.context_kind` is. A rank sends what its
    two pieces do to a state to all others, and in the backward pass as much of gradients, in at
    least fp32. A description says how much that is (`MixerDescription.passed_elements`).

    Args:
        decay_PC: Factor of the state within each chunk of `split_chunks`, [B * P, C, ...]; it
            broadcasts to `added_PC`. It is zero where a sample or document begins in the chunk.
        added_PC: What each chunk makes of a state of zero, [B * P, C, ...].
        context: The ranks that divide samples (`LayerSetup.context`).
    """
    wide = torch.promote_types(added_PC.dtype, torch.float32)
    decay_PC, added_PC = decay_PC.to(wide), added_PC.to(wide)
    states_PC = _scan(decay_PC, added_PC)
    if context.size == 1:
        return states_PC[:, :-1]
    # From the start of a piece to the start of each chunk, and to the end of the piece.
    decays_PC = torch.cat((torch.ones_like(decay_PC[:, :1]), decay_PC.cumprod(1)), 1)
    ends = decays_PC[:, -1], states_PC[:, -1]
    # One message for both.
    ends_BPX = torch.cat([end.flatten(1) for end in ends], 1).unflatten(0, (-1, 2))
    shapes = [end.shape[1:] for end in ends]
    parts = context.gather_pieces(ends_BPX).split([math.prod(shape) for shape in shapes], 2)
    decay_BP, added_BP = (x.unflatten(2, shape) for x, shape in zip(parts, shapes, strict=True))
    before_BP = _scan(decay_BP, added_BP)
    own_BP = torch.stack([before_BP[:, piece] for piece in context.own_pieces], 1)
    # Each piece was begun with zero; what it really begins with is what its chunks leave of it.
    return states_PC[:, :-1] + decays_PC[:, :-1] * own_BP.flatten(0, 1)[:, None]


def _scan(decay_C: Tensor, added_C: Tensor) -> Tensor:
    """Return the states before each of consecutive chunks or pieces, beginning with zero, and after
    the last one, [., C + 1, ...]."""
    states = [torch.zeros_like(added_C[:, 0])]
    for decay, added in zip(decay_C.unbind(1), added_C.unbind(1), strict=True):
        states.append(decay * states[-1] + added)
    return torch.stack(states, 1)
