"""States that layers pass from token to token, such as linear attention's, across the pieces of a
sample that context ranks have.

What a piece of a sample does to a state S is S' = decay S + added, whatever S is; the decay is a
number for each element, or a matrix. So ranks gather both of all pieces at once, and each computes
the states that its own pieces begin with (Sun et al. 2025, "LASP-2"). No rank waits for the one
before it.

Shape legend: B samples, S tokens of this rank, P its pieces of samples, C chunks of a piece, L
tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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


def prepend_tokens(x_BS: Tensor, count: int, context: ContextParallel) -> Tensor:
    """Put before each of this rank's pieces the tokens before it, as a short convolution sees them.

    All context ranks call this together, as `pass_states`, and what is sent is in at least fp32
    too.

    Args:
        x_BS: Numbers of tokens, [B, S, ...].
        count: How many tokens.
        context: The ranks that divide samples, whose pieces they have.

    Returns:
        [B * P, count + tokens of a piece, ...]; zeros where a sample has none.
    """
    zeros = (0, 0) * (x_BS.dim() - 2) + (count, 0)
    if context.size == 1:
        return F.pad(x_BS, zeros)
    x_BP = x_BS.unflatten(1, (len(context.own_pieces), -1))
    wide = torch.promote_types(x_BS.dtype, torch.float32)
    # A piece may have fewer tokens; then some are of the piece before.
    ends_BPT = x_BP[:, :, -min(count, x_BP.shape[2]) :] if count else x_BP[:, :, :0]
    length = ends_BPT.shape[2]
    ends_BT = F.pad(context.gather_pieces(ends_BPT.to(wide)).flatten(1, 2), zeros)
    starts = [length * piece for piece in context.own_pieces]
    before_BP = torch.stack([ends_BT[:, start : start + count] for start in starts], 1)
    return torch.cat((before_BP.to(x_BS), x_BP), 2).flatten(0, 1)


def pass_states(
    decay_PC: Tensor,
    added_PC: Tensor,
    context: ContextParallel,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> Tensor:
    """Return the state before each chunk, [B * P, C, ...], if each makes S' = decay S + added.

    All context ranks call this together, whatever `parallel.context_kind` is. A rank sends what its
    two pieces do to a state to all others, and in the backward pass as much of gradients, in at
    least fp32. A description says how much that is (`MixerDescription.passed_elements`).

    Args:
        decay_PC: Factor of the state within each chunk of `split_chunks`, [B * P, C, ...]; it
            broadcasts to `added_PC`, or is a square matrix. It is zero where a sample or document
            begins in the chunk.
        added_PC: What each chunk makes of a state of zero, [B * P, C, ...].
        context: The ranks that divide samples (`LayerSetup.context`).
        multiply: `torch.mul`, or for matrices `torch.matmul`.
    """
    wide = torch.promote_types(added_PC.dtype, torch.float32)
    decay_PC, added_PC = decay_PC.to(wide), added_PC.to(wide)
    states = _scan(decay_PC, added_PC, multiply)
    if context.size == 1:
        return torch.stack(states[:-1], 1)
    # From the start of a piece to the end of each chunk.
    decays = [decay_PC[:, 0]]
    for decay in decay_PC.unbind(1)[1:]:
        decays.append(multiply(decay, decays[-1]))
    ends = decays[-1], states[-1]
    # One message for both.
    ends_BPX = torch.cat([end.flatten(1) for end in ends], 1).unflatten(0, (-1, 2))
    shapes = [end.shape[1:] for end in ends]
    parts = context.gather_pieces(ends_BPX).split([math.prod(shape) for shape in shapes], 2)
    decay_BP, added_BP = (x.unflatten(2, shape) for x, shape in zip(parts, shapes, strict=True))
    before = _scan(decay_BP, added_BP, multiply)
    own_P = torch.stack([before[piece] for piece in context.own_pieces], 1).flatten(0, 1)
    # Each piece was begun with zero; what it really begins with is what its chunks leave of it.
    left = [own_P, *(multiply(decay, own_P) for decay in decays[:-1])]
    return torch.stack([state + more for state, more in zip(states, left, strict=False)], 1)


def _scan(
    decay_C: Tensor, added_C: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """Return the states before each of consecutive chunks or pieces, beginning with zero, and after
    the last one."""
    decays, added = decay_C.unbind(1), added_C.unbind(1)
    states = [torch.zeros_like(added[0]), added[0]]  # nothing is left of zero
    for decay, more in zip(decays[1:], added[1:], strict=True):
        states.append(multiply(decay, states[-1]) + more)
    return states
