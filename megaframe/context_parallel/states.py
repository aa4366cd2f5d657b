"""States that layers pass from token to token, such as linear attention's, across the pieces of a
sample that context ranks have.

What a piece does to a state S is S' = decay S + state, with which it is described completely: so
ranks gather decay and state of every piece, once and at the same time, and each computes the states
that its own pieces begin with (Sun et al. 2025, "LASP-2"). No rank waits for the one before it.

Shape legend: B samples, S tokens of this rank, C chunks or pieces, P pieces of this rank, L tokens
of a chunk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.context_parallel.context import ContextParallel
from megaframe.ops.autograd import recompute


def split_chunks(x_BS: Tensor, size: int, pieces: int) -> Tensor:
    """Divide each of this rank's pieces into chunks.

    Args:
        x_BS: Numbers of tokens, [B, S, ...].
        size: Tokens of a chunk, at most; a shorter piece is one chunk.
        pieces: Pieces of this rank (`ContextParallel.own_pieces`), P.

    Returns:
        [B * P, C, L, ...]; the last chunk of each piece is filled with zeros.
    """
    x_PS = x_BS.unflatten(1, (pieces, -1)).flatten(0, 1)
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


def scan_states(decay_BC: Tensor, state_BC: Tensor, initial_B: Tensor | None = None) -> Tensor:
    """Return the states before each of consecutive chunks, and after the last one, [B, C + 1, ...].

    Args:
        decay_BC: Factor of the state within each chunk, [B, C, ...]; it broadcasts to `state_BC`.
        state_BC: What each chunk adds to it, [B, C, ...].
        initial_B: The state before the first one, [B, ...]; None for zero.
    """
    state_B = torch.zeros_like(state_BC[:, 0]) if initial_B is None else initial_B
    states = [state_B]
    for decay_B, added_B in zip(decay_BC.unbind(1), state_BC.unbind(1), strict=True):
        state_B = decay_B * state_B + added_B
        states.append(state_B)
    return torch.stack(states, 1)


def pass_states(decay_BP: Tensor, state_BP: Tensor, context: ContextParallel) -> Tensor:
    """Return the states that this rank's pieces begin with, [B, P, ...], in at least fp32.

    All context ranks call this together, whatever `parallel.context_kind` is. A rank sends the
    decay and the state of its two pieces to all others, and as much of gradients in the backward
    pass; a description says so with `MixerDescription.passed_elements`. The numbers of all pieces
    are kept for the backward pass.

    Args:
        decay_BP: Factor of the state within each of this rank's pieces, [B, P, ...] as in
            `scan_states`. It is zero where a document begins in the piece.
        state_BP: What each piece makes of a state of zero, [B, P, ...].
        context: The ranks that divide samples (`RunContext.context`).
    """
    own, shapes = context.own_pieces, (decay_BP.shape[2:], state_BP.shape[2:])
    sizes = [math.prod(shape) for shape in shapes]

    def select_own(pieces_BC: Tensor) -> Tensor:
        parts = pieces_BC.split(sizes, 2)
        decay_BC, state_BC = (
            part.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True)
        )
        before_BC = scan_states(decay_BC, state_BC)
        return torch.stack([before_BC[:, piece] for piece in own], 1)

    wide = torch.promote_types(state_BP.dtype, torch.float32)
    # One message for both.
    both_BP = torch.cat([part.to(wide).flatten(2) for part in (decay_BP, state_BP)], 2)
    return recompute(select_own, context.gather_pieces(both_BP))
